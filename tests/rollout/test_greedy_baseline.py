"""ReMax (2310.10505): one greedy response a group, sampled after the groups and not trained on."""

import dataclasses
import itertools

import jax
import numpy as np
import pytest
from samplers import greedy_loop
from small_runs import make_quick_config, open_run, read_rows

from dapo_jax import algorithms
from dapo_jax.structs import Failure, Interrupted, Outcome


@pytest.fixture(scope="module")
def run(base, tmp_path_factory):
    devices = jax.devices
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax, "devices", lambda *args: devices(*args)[:1])
        config = make_quick_config(base, tmp_path_factory.mktemp("remax") / "run", "remax")
        with open_run(config) as run:
            yield run


def sample(run, **changes):
    """The rollouts of the first step, with fields of the source changed."""
    source = dataclasses.replace(run.trainer.source, **changes)
    return source.sample(run.state.source, run.state.learners.policy.params, 0, policy_step=0)


def responses_of(groups):
    return [[done.tokens.tolist() for done in group.completions] for group in groups]


def test_the_baseline_is_the_reward_of_the_greedy_response(run):
    rollout = sample(run)
    components, params = run.components, run.state.learners.policy.params
    assert len(rollout.groups) == 4
    for group in rollout.groups:
        tokens = greedy_loop(params, group.prompt.tokens.tolist(), 24, components.decoder)
        first = dataclasses.replace(group.completions[0], tokens=np.array(tokens, np.int32))
        greedy = dataclasses.replace(first, sampler_logprobs=np.zeros(len(tokens)), text="")
        (judged,) = components.judge.groups([components.judge.submit(group.prompt, (greedy,))])
        assert group.baseline == judged.rewards[0]
    assert len({group.baseline for group in rollout.groups}) == 2


def test_the_trained_responses_are_those_of_reinforce_and_all_are_counted(run, base, tmp_path):
    rollout = sample(run)
    with open_run(make_quick_config(base, tmp_path / "other", "reinforce")) as other:
        plain = sample(other)
    assert responses_of(rollout.groups) == responses_of(plain.groups)
    assert rollout.counts.responses == plain.counts.responses + 4
    assert rollout.counts.tokens > plain.counts.tokens


def test_an_interrupted_step_samples_the_same_baselines_again(run):
    expected, calls = sample(run), itertools.count()
    assert expected.counts.bursts > 2
    config = dataclasses.replace(run.components.config, algorithm=algorithms.reinforce())
    sample(run, config=config, interrupted=lambda: next(calls) < 0)
    first = next(calls)  # checks of a step without baselines
    calls = itertools.count()
    with pytest.raises(Interrupted):
        sample(run, interrupted=lambda: next(calls) > first)
    again = sample(run)
    assert [g.baseline for g in again.groups] == [g.baseline for g in expected.groups]
    assert responses_of(again.groups) == responses_of(expected.groups)


def test_a_group_whose_greedy_response_has_no_reward_is_not_trained(run):
    class Failing:
        """A judge that fails to reward single responses to the first prompt."""

        submit = run.components.judge.submit

        def groups(self, pending):
            groups = run.components.judge.groups(pending)
            failed = (Failure(Outcome.TIMEOUT, "late"),)
            return [
                dataclasses.replace(group, failed=failed)
                if len(group.completions) == 1 and group.prompt.index == 0
                else group
                for group in groups
            ]

    assert [group.prompt.index for group in sample(run, judge=Failing()).groups] == [1, 2, 3]


@pytest.mark.slow
def test_a_killed_run_resumes_with_the_same_rows(base, alone, tmp_path):
    """The second step of a resumed run equals that of an uninterrupted one."""
    configs = [make_quick_config(base, tmp_path / name, "remax") for name in ("whole", "resumed")]
    for config in configs:
        config.checkpoint.every_steps = 1
    with open_run(configs[0]) as run:
        run.begin()
        run.step()
        run.step()
    with open_run(configs[1]) as run:
        run.begin()
        run.step()
        run.store.checkpoints.close()
    with open_run(configs[1]) as run:
        assert run.state.step == 1
        run.step()
    left, right = (read_rows(tmp_path / name)[-1] for name in ("whole", "resumed"))
    assert left["gradient_norm"] == right["gradient_norm"] > 0
    assert left["reward"] == right["reward"]
