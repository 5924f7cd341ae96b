"""Whole runs on rewards of several parts: a failing function costs groups, not the run."""

import json

import numpy as np
import pytest
from small_runs import make_quick_config, open_run, read_rollouts, read_rows

from dapo_jax.config.experiment import Checkpoint, Log, Reward, Rollout
from dapo_jax.rollout.dynamic_sampling import Starved
from dapo_jax.run.checkpointing.checkpoints import Checkpoints
from dapo_jax.run.run import train

OWN = """
def picky(prompt, response, answer):
    if response.endswith("7"):
        raise RuntimeError("seven is not for me")
    return len(response)

def broken(prompt, response, answer):
    return {}["no such key"]
"""


def test_a_run_goes_on_without_the_groups_whose_reward_failed(
    base, score_folder, write_module, alone, tmp_path, capsys
):
    write_module("own", OWN)
    parts = "rule=1,own:picky=0.1,model=0.2,repetition=1"
    config = make_quick_config(
        base,
        tmp_path,
        updates=1,
        total_steps=1,
        reward=Reward(parts=parts, model_folder=str(score_folder), workers=2),
        log=Log(tensorboard=False),
    )
    with open_run(config) as run:
        run.step()
    row = read_rows(tmp_path)[-1]
    assert row["broken_groups"] > 0 and row["trained_groups"] == 4 and not row["starved"]
    assert None not in row.values()
    lines = [json.loads(line) for line in read_rollouts(tmp_path)["step_000001.jsonl"].splitlines()]
    failed = {line["index"] for line in lines if line["failure"]}
    assert len(failed) == row["broken_groups"] and len(lines) > 4 * len(failed)
    names = ["rule", "own:picky", "model", "repetition", "overlong"]
    for line in lines:
        assert list(line["reward_parts"]) == names
        sevens = line["response"].endswith("7")
        assert (line["reward"] is None) == sevens == (line["failure"] is not None)
        if not sevens:
            np.testing.assert_allclose(
                line["reward_parts"]["own:picky"], len(line["response"]) / 10
            )
            np.testing.assert_allclose(line["reward"], sum(line["reward_parts"].values()))
    judged = [line for line in lines if line["index"] not in failed and not line["surplus"]]
    for name in names:
        mean = np.mean([line["reward_parts"][name] for line in judged])
        np.testing.assert_allclose(row[f"reward_parts/{name}"], mean)
    shown = capsys.readouterr().out
    assert "step 1: a group was dropped: own:picky: " in shown
    assert 'raise RuntimeError("seven is not for me"): RuntimeError: seven is not for me' in shown
    assert f"prompt {next(line['prompt_id'] for line in lines if line['failure'])}" in shown


def test_a_run_in_which_every_group_fails_is_saved_and_stops_with_the_cause(
    base, write_module, alone, tmp_path
):
    write_module("own", OWN)
    config = make_quick_config(
        base,
        tmp_path,
        reward=Reward(parts="rule=1,own:broken=1"),
        rollout=Rollout(4, 4, updates_per_rollout=1, max_sample_rounds=2),
    )
    with pytest.raises(
        Starved, match="failed in every group, first: own:broken: .*KeyError.*prompt"
    ):
        train(config)
    checkpoints = Checkpoints(tmp_path, Checkpoint())
    assert checkpoints.latest_step() == 0
    checkpoints.close()
