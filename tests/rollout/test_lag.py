"""rollout.lag: the next step is sampled while the policy is updated."""

import dataclasses
import itertools
import types

import jax
import numpy as np
import pytest
from small_runs import make_quick_config, open_run, read_rollouts, read_rows

from dapo_jax import algorithms
from dapo_jax.config.experiment import Checkpoint, Config, Data, Evaluation, Log, Mesh, Rollout
from dapo_jax.rollout import source
from dapo_jax.rollout.dynamic_sampling import Starved
from dapo_jax.run.run import train
from dapo_jax.runtime.sampler_devices import split_devices
from dapo_jax.runtime.settings import ConfigError


def make_config(base, run_dir, lag=1, **changes) -> Config:
    algorithm = algorithms.dapo()
    algorithm.importance_cap = 2.0
    settings = {
        "algorithm": algorithm,
        "total_steps": 4,
        "data": Data(min_terms=2, max_terms=3, max_prompt_tokens=8, heldout_problems=4),
        "rollout": Rollout(4, 4, updates_per_rollout=2, lag=lag),
        "checkpoint": Checkpoint(every_steps=1, keep=9),
        "evaluation": Evaluation(every_steps=2, samples_per_problem=1, top_p=1.0),
        # Log-probs of tokens are rounded, and may round otherwise on another mesh.
        "log": Log(show_group_every_steps=0, tensorboard=False, token_groups=0),
        "mesh": Mesh(data=2, fsdp=2, tensor=2),
    }
    return make_quick_config(base, run_dir, **settings | changes)


@pytest.fixture(scope="module")
def finished(base, tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("lag") / "run"
    train(make_config(base, run_dir))
    return run_dir


def test_responses_are_one_policy_old_from_the_second_step_on(finished):
    assert [row["policy_lag"] for row in read_rows(finished)[1:]] == [0, 1, 1, 1]


def test_the_second_step_is_sampled_by_the_policy_before_the_first_update(base, tmp_path):
    with open_run(make_config(base, tmp_path / "run")) as run:
        before = jax.tree.map(np.asarray, run.state.learners.policy.params)
        run.step()
        jax.tree.map(np.testing.assert_array_equal, before, run.state.source.behaviour)
        changed = jax.tree.leaves(
            jax.tree.map(lambda a, b: (a != b).any(), before, run.state.learners.policy.params)
        )
        state = run.state.source
        params = run.components.learners.policy.copy(state.behaviour)
        ahead = state.ahead.groups
        now = run.trainer.source.sample(state, params, 1, policy_step=0).groups
    tokens = [
        [c.tokens.tolist() for group in groups for c in group.completions]
        for groups in (ahead, now)
    ]
    assert any(changed) and tokens[0] == tokens[1] != []


def interrupt(run, interrupted) -> None:
    changed = dataclasses.replace(run.trainer.source, interrupted=interrupted)
    run.trainer = dataclasses.replace(run.trainer, source=changed)


def test_a_signal_or_starvation_ahead_loses_no_step(base, finished, tmp_path, monkeypatch):
    with open_run(make_config(base, tmp_path / "run")) as run:
        run.begin()
        bursts = itertools.count()
        interrupt(run, lambda: run.state.step == 1 and next(bursts) > 1)
        run.step()
        ahead = run.state.source.ahead
        run.step()
        assert (run.state.step, run.state.source.ahead) == (2, None) and ahead is not None
        collect = source.collect
        monkeypatch.setattr(source, "collect", starve)
        interrupt(run, lambda: False)
        with pytest.raises(Starved):
            run.step()
        monkeypatch.setattr(source, "collect", collect)
        run.store.checkpoints.close()
    train(make_config(base, tmp_path / "run"))
    assert read_rows(tmp_path / "run") == read_rows(finished)
    assert read_rollouts(tmp_path / "run") == read_rollouts(finished)


def starve(*arguments, **options):
    raise Starved


@pytest.mark.slow
def test_dedicated_sampling_devices_sample_the_same(base, finished, tmp_path):
    """Four train and four sample: the same tokens as eight that do both."""
    config = make_config(base, tmp_path / "run")
    config.mesh = Mesh(data=1, fsdp=2, tensor=2, sampler_share=0.5)
    train(config)
    assert read_rollouts(tmp_path / "run") == read_rollouts(finished)
    for row, expected in zip(read_rows(tmp_path / "run"), read_rows(finished), strict=True):
        assert row == pytest.approx(expected, rel=1e-3, abs=1e-5)


def test_a_flat_torus_of_several_hosts_cannot_be_split():
    """Their compiler aborts where a program's chips have gaps between them."""
    chips = [
        types.SimpleNamespace(
            platform="tpu", device_kind="TPU v5 lite", process_index=y // 2, coords=(x, y, 0)
        )
        for y in range(4)
        for x in range(2)
    ]
    with pytest.raises(ConfigError, match="mesh.sampler_share = 0.5: must be 0 on several hosts"):
        split_devices(chips, 0.5, 1)
    learning, sampling = split_devices(chips[:4], 0.5, 1)  # of one host
    assert (learning, sampling) == (chips[:2], chips[2:4])
