"""A training run in an environment that says nothing is the run of single turns, bit for bit."""

import json

import jax
import pytest
from small_runs import equal, make_quick_config, open_run, read_rollouts, read_rows

from dapo_jax.config.experiment import Environment, Log, Rollout, Sampler

SILENT = """
class Silent:
    def step(self, text):
        return None
"""
# A group ends a burst later than it would alone, and so the batch is full when other groups, which
# are thrown away, have been drawn.
OF_THE_SCHEDULE = (
    "abandoned_tokens decode_bursts decode_steps prefills sampled_to_kept_tokens slot_occupancy "
    "surplus_groups verdicts/"
)


def learned(run_dir, but: str = "") -> list[dict]:
    """Rows of metrics without those of turns, and of names that begin like those in `but`."""
    without = ("environment_", *but.split())
    return [{k: v for k, v in x.items() if not k.startswith(without)} for x in read_rows(run_dir)]


def responses(run_dir) -> list[dict]:
    """Responses that steps used; in an environment they also say that no step gave a reward."""
    texts = read_rollouts(run_dir).values()
    lines = [json.loads(line) for text in texts for line in text.splitlines()]
    lines = [line for line in lines if not line["surplus"]]
    for line in lines:
        assert not any(line.pop("environment_rewards", []) + line.pop("turns", []))
    return lines


@pytest.mark.parametrize(
    ("cache", "rounds", "but"), [("slots", 10, OF_THE_SCHEDULE), ("paged", 1, "")]
)
def test_silence_changes_no_bit_of_a_run(cache, rounds, but, base, tmp_path, write_module, alone):
    write_module("silence", SILENT)
    states = []
    for run_dir, environment in (
        (tmp_path / "alone", Environment()),
        (tmp_path / "asked", Environment("silence:Silent", workers=1)),
    ):
        config = make_quick_config(
            base,
            run_dir,
            total_steps=2,
            environment=environment,
            rollout=Rollout(4, 4, updates_per_rollout=2, max_sample_rounds=rounds),
            # Prompts one by one: what is prefilled beside them may round their log-probs otherwise.
            sampler=Sampler(16, max_response_tokens=24, cache=cache, prefill_prompts=1),
            log=Log(0, tensorboard=False, report=False),
        )
        with open_run(config) as run:
            run.begin()
            while run.state.step < config.total_steps:
                run.step()
            run.finish()
            states.append(jax.device_get(run.state.learners.policy))
    assert equal(*states)
    assert learned(tmp_path / "alone", but) == learned(tmp_path / "asked", but)
    assert responses(tmp_path / "alone") == responses(tmp_path / "asked")
    rows = read_rows(tmp_path / "asked")
    assert all(row["environment_turns"] > 0 for row in rows)
