"""rollout.carry_over: the next step continues with groups that a step did not use."""

import json

import pytest
from samplers import finish
from small_runs import make_quick_config, open_run, read_rollouts, read_rows

from dapo_jax import algorithms
from dapo_jax.config.experiment import Checkpoint, Config, Log, Optimizer, Rollout, Sampler
from dapo_jax.rollout.sampling import SAMPLE_FOR_TRAINING
from dapo_jax.types.structs import RolloutKey, SamplingRule, with_texts

SLOW = pytest.mark.slow


def make_config(base, run_dir, carry_over="all", **changes) -> Config:
    algorithm = algorithms.dapo()
    algorithm.importance_cap = 2.0
    settings = {
        "algorithm": algorithm,
        "total_steps": 4,
        "rollout": Rollout(4, 4, updates_per_rollout=2, carry_over=carry_over),
        "sampler": Sampler(slots=24, burst_tokens=2, max_response_tokens=24),
        "checkpoint": Checkpoint(every_steps=1, keep=9),
        "log": Log(show_group_every_steps=0, tensorboard=False, report=False),
    }
    return make_quick_config(base, run_dir, **settings | changes)


def draw_whole(run, step: int, indices: list[int]) -> dict[int, list[str]]:
    """Return the responses to these prompts as that step would have completed them."""
    sampler, prompts = run.components.sampler, run.components.prompts
    params = run.state.learners.policy.params
    sampler.begin(params, RolloutKey(SAMPLE_FOR_TRAINING, step), SamplingRule())
    for prompts.position in indices:
        sampler.submit(next(prompts), 4)
    decode = run.components.tokenizer.decode_all
    groups = {index: with_texts(group, decode) for index, group in finish(sampler).items()}
    return {index: [done.text for done in group] for index, group in groups.items()}


@pytest.mark.parametrize(
    ("carry_over", "preset"),
    [
        ("all", "dapo"),
        pytest.param("unfinished", "grpo", marks=SLOW),
        pytest.param("unfinished", "dapo", marks=SLOW),
    ],
)
def test_with_an_unchanged_policy_carried_groups_equal_groups_of_one_step(
    carry_over, preset, base, tmp_path, alone
):
    """With and without dynamic sampling; and rows report the lag of the policies."""
    algorithm = algorithms.preset(preset)
    algorithm.importance_cap = 2.0
    still = {"algorithm": algorithm, "optimizer": Optimizer(learning_rate=1e-30, warmup_steps=0)}
    with open_run(make_config(base, tmp_path / "run", carry_over, **still)) as run:
        for _ in range(4):
            run.step()
        rows = read_rows(tmp_path / "run")
        assert rows[0]["policy_lag"] == rows[0]["continued_fraction"] == 0
        assert all(row["carried_tokens"] >= row["carried_groups"] > 0 for row in rows)
        assert all(0 <= row["policy_lag"] <= row["policy_lag_max"] <= 2 for row in rows)
        assert any(row["policy_lag"] > 0 < row["continued_fraction"] for row in rows)
        assert all(row["trained_groups"] == 4 and row["abandoned_tokens"] == 0 for row in rows)
        texts, first_steps, continued = {}, {}, 0
        for lines in read_rollouts(tmp_path / "run").values():
            for line in map(json.loads, lines.splitlines()):
                if line["surplus"] and carry_over == "unfinished":
                    continue  # it is drawn anew
                place, first = line["index"], line.get("sampled_by", [[line["policy_step"]]])[0][0]
                continued += "sampled_by" in line
                texts.setdefault(place, {})[line["sample"]] = line["response"]
                first_steps[place] = min(first, first_steps.get(place, first))
        for step in range(4):
            begun = [place for place, first in first_steps.items() if first == step]
            for place, whole in draw_whole(run, step, begun).items():
                assert [texts[place][i] for i in range(4)] == whole
    assert continued > 5
