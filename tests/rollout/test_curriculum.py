"""Pools of resting problems: fewer samples for the same batches, repeatable after a resume."""

import dataclasses
import itertools
import json
import zlib
from concurrent.futures import Future

import numpy as np
import pytest
from conftest import make_completion, make_prompt
from scripted_sampler import ScriptedSampler

from dapo_jax import algorithms
from dapo_jax.config.experiment import Config, Data, Reward, Rollout
from dapo_jax.data.prompt_stream import PromptStream
from dapo_jax.extras.arithmetic import arithmetic_tokenizer
from dapo_jax.rewards.group_rewards import Judge, reward_group
from dapo_jax.rollout.curriculum import RestingPrompts, update_pools
from dapo_jax.rollout.source import RolloutSource, SourceState
from dapo_jax.run.identity import RunProgress
from dapo_jax.types.structs import Verdict

STEPS, SAMPLES = 24, 2


class PoolById:
    """Makes two thirds of the problems all right or all wrong, by their ids."""

    def submit_group(self, prompt, completions):
        right = (2, 0, 1)[zlib.crc32(prompt.id.encode()) % 3]
        future = Future()
        count = len(completions)
        future.set_result([Verdict(i < right, "1", decided="direct") for i in range(count)])
        return future


def open_source(curriculum: str) -> RolloutSource:
    config = Config(
        algorithm=algorithms.dapo(),
        data=Data(train_problems=30),
        rollout=Rollout(
            prompts_per_step=4,
            samples_per_prompt=SAMPLES,
            updates_per_rollout=1,
            curriculum=curriculum,
        ),
    )
    prompts = PromptStream(config.data, 0, arithmetic_tokenizer())
    sampler = ScriptedSampler(lambda index: 1)
    return RolloutSource(config, prompts, sampler, Judge(config, PoolById()))


def follow(source: RolloutSource, state: SourceState, steps: range):
    """Return the state after steps, and the positions of the groups that they scored."""
    scored = []
    for step in steps:
        state, rollout = source.collect(state, None, step)
        scored.append([group.prompt.index for group in rollout.batch.scored])
    return state, scored


def test_resting_problems_save_samples_and_a_resumed_run_repeats_them():
    _, without = follow(open_source("none"), SourceState(), range(STEPS))
    state, scored = follow(open_source("pools"), SourceState(), range(STEPS))
    assert sum(map(len, scored)) < 0.75 * sum(map(len, without))
    assert 0 < len(state.pools) < 30 and {*state.pools.values()} == {True, False}
    half, _ = follow(open_source("pools"), SourceState(), range(STEPS // 2))
    saved = RunProgress(position=half.position, pools=dict(half.pools))
    saved = RunProgress(**json.loads(json.dumps(dataclasses.asdict(saved))))
    resumed = SourceState(saved.position, half.kept_fraction, pools=saved.pools)
    again, rest = follow(open_source("pools"), resumed, range(STEPS // 2, STEPS))
    assert rest == scored[STEPS // 2 :] and again == state


def test_a_resting_problem_is_requested_at_its_rate():
    def open_prompts(seed):
        pools = {f"p{index}": True for index in range(0, 8000, 2)}
        stream = (make_prompt(index, [3]) for index in itertools.count())
        return RestingPrompts(stream, pools, 0.25, seed)

    prompts = open_prompts(seed=0)
    taken = np.array([next(prompts).index for _ in range(5000)])
    resting = taken % 2 == 0
    turns = taken[-1] // 2
    assert (~resting).sum() == pytest.approx(turns, abs=1)
    assert resting.sum() == pytest.approx(0.25 * turns, rel=0.1)
    assert prompts.passed_over == taken[-1] + 1 - 5000
    others = open_prompts(seed=1)
    assert [next(others).index for _ in range(5000)] != taken.tolist()


def score(prompt, *correct):
    verdicts = tuple(Verdict(bool(value), "1") for value in correct)
    return reward_group(Config(), prompt, (make_completion([5]),) * len(correct), verdicts)


def test_a_signal_makes_a_problem_active_again():
    scores = {1: (1, 1), 2: (0, 0), 3: (1, 0), 4: (1, 0)}
    groups = [score(make_prompt(index, [2]), *correct) for index, correct in scores.items()]
    pools = update_pools({"p3": True, "p9": False}, groups, Reward())
    assert pools == {"p1": True, "p2": False, "p9": False}


def test_rows_whose_ids_restart_rest_by_themselves(tmp_path):
    for name, answer in ("a", "1"), ("b", "2"):
        (tmp_path / name).mkdir()
        rows = [{"problem": f"{i}+0=", "answer": answer, "id": i % 3} for i in range(9)]
        (tmp_path / name / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    source = f"{tmp_path}/a/train.jsonl,{tmp_path}/b/train.jsonl"
    stream = PromptStream(
        Data(source=source, heldout_problems=0, max_prompt_tokens=8), 0, arithmetic_tokenizer()
    )
    prompts = [next(stream) for _ in range(18)]
    groups = [score(prompt, True, prompt.answer == "1") for prompt in prompts]
    pools = update_pools({}, groups, Reward())
    assert len(pools) == 9
    resting = RestingPrompts(stream, pools, 0.0, seed=0)
    assert {next(resting).answer for _ in range(18)} == {"2"} and resting.passed_over >= 9
