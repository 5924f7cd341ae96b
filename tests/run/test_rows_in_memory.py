"""Whole runs on rows of the program, with rewards that take their columns."""

import dataclasses
from typing import Any

import pytest
from small_runs import make_quick_config, read_rollouts

import dapo_jax
from dapo_jax.config.experiment import Checkpoint, Data, Log, Reward, Rollout
from dapo_jax.types.errors import ConfigError

ROWS = [{"problem": f"{i}+{i}=", "tests": [i, {"digit": 2 * i % 10}]} for i in range(40)]


def score(prompt, response, answer, tests, **columns):
    assert prompt == columns["problem"] == f"{tests[0]}+{tests[0]}=" and answer == ""
    return response.count(str(tests[1]["digit"])) + len(response) / 100


def config_of(folder, run_dir):
    return make_quick_config(
        folder,
        run_dir,
        algorithm=dataclasses.replace(dapo_jax.preset("dapo"), old_logprobs="sampler"),
        data=Data(max_prompt_tokens=8),
        reward=Reward(correct="spread"),
        rollout=Rollout(prompts_per_step=4, samples_per_prompt=4, carry_over="all"),
        checkpoint=Checkpoint(every_steps=1),
        log=Log(0, console=False, tensorboard=False, report=False),
    )


@pytest.mark.slow
def test_a_resumed_run_reads_the_columns_again_and_refuses_others(tiny_folder, tmp_path, alone):
    whole = dapo_jax.train(config_of(tiny_folder, tmp_path / "whole"), data=ROWS, reward=score)
    assert not any(whole.metrics["broken_groups"].to_pylist())
    config = config_of(tiny_folder, tmp_path / "parts")
    part = dapo_jax.train(config, data=ROWS, reward=score, on_step=lambda step, row: step == 1)
    assert part.stopped == "on_step"
    for other in ROWS[:-1], [*ROWS[:-1], ROWS[-1] | {"tests": [39, {"digit": 1}]}]:
        with pytest.raises(ConfigError, match="changed = 'refuse': .* of given:data has"):
            dapo_jax.train(config, data=other, reward=score)
    with pytest.raises(ConfigError, match="'given:data': none .* has no column 'tests', which a"):
        dapo_jax.train(config, data=[{"problem": row["problem"]} for row in ROWS], reward=score)
    dapo_jax.train(config, data=iter_of(ROWS), reward=score)
    rollouts = [read_rollouts(tmp_path / name) for name in ("whole", "parts")]
    assert rollouts[0] == rollouts[1] and len(rollouts[0]) == 2


def iter_of(rows):
    class Iterator:
        def __len__(self):
            return len(rows)

        def __iter__(self):
            return iter(rows)

    return Iterator()


def test_columns_of_a_table_are_prompts(tiny_folder):
    sampling = {"max_response_tokens": 8, "temperature": 0}
    lists, iterator = (
        dapo_jax.sample(tiny_folder, prompts, **sampling)
        for prompts in (["1+1=", "2+2="], iter(["1+1=", "2+2="]))
    )
    assert [own[0].text for own in lists] == [own[0].text for own in iterator]
    wrong: list[Any] = [*ROWS]
    with pytest.raises(ConfigError, match=r"prompts\[0\] = .*: must be text, or a list of mess"):
        dapo_jax.sample(tiny_folder, wrong, **sampling)
