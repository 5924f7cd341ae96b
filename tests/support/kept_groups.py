"""Runs that keep scored groups, with responses of very different lengths."""

import pathlib
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from small_runs import make_quick_config, read_rollouts, read_rows

from dapo_jax import algorithms
from dapo_jax.config import experiment
from dapo_jax.config.experiment import Config, Data, Mesh, Rollout

# What a step cost is counted from where it went on.
COSTS = (
    "decode_ prefills slot_occupancy abandoned_tokens put_back_tokens surplus_groups verdicts/ "
    "environment_ remote_ sampled_to_kept_tokens tokens_per_slot_step outcomes/"
).split()
STALE = {"rollout": Rollout(6, 4, updates_per_rollout=2, staleness=1)}
PAGES = {"cache": "paged", "page_tokens": 8, "pages": 48}
GUESSING = {"name": "guessing", "max_turns": 4, "max_observation_tokens": 4, "wait_bursts": 2}
GAME = {"environment": experiment.Environment(**GUESSING)}
INT8 = {"sampler": {"cache_dtype": "int8"}}
# Changes by setting; prompts wait for 8 slots, a model gives the rewards.
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bfloat16": {"compute": experiment.Compute(dtype="bfloat16")},
    "staleness": STALE,
    "adapters": {"lora": experiment.Lora(rank=2)},
    "critic": {"preset": "vapo", "correct": "threshold"},
    "pages": {"sampler": PAGES},
    "int8 cache": INT8,
    "turns": GAME,
    "turns in pages": GAME | {"sampler": PAGES},
    "turns with staleness": GAME | STALE,
    "turns, int8 cache": GAME | INT8,
    "turns kept in pages": GAME | {"sampler": PAGES | {"keep_turns": True}},
    "experts": {"replay": "sampler"},  # with a folder of experts
    "two devices": {"mesh": Mesh(data=2, fsdp=1, tensor=1)},
}


# What a step hands to the next besides the policy: an entropy bonus, compiled shapes of rows.
SETTINGS["adaptive"] = {"preset": "adaptive_entropy", "packing": experiment.Packing(-1, 4)}
SETTINGS["interpolated"] = {"preset": "log_linear"}


def make_kept(setting: str, folder, score_folder, run_dir, **changes: Any) -> Config:
    """Return a run of a policy that samples nearly at random, 1 to 100 tokens."""
    changes = SETTINGS[setting] | changes
    sampler = {"slots": 8, "burst_tokens": 4, "max_response_tokens": 100, "temperature": 4.0}
    algorithm = algorithms.preset(changes.pop("preset", "dapo"))
    algorithm.importance_cap = 2.0
    algorithm.entropy_target *= 50  # above the entropy of this policy
    algorithm.router_replay = changes.pop("replay", "none")
    correct = changes.pop("correct", "spread")
    reward = experiment.Reward(parts="model=1,repetition=0.1", model_folder=str(score_folder))
    reward.correct = correct
    reward.threshold = 0.0 if correct == "threshold" else 0.5
    sections = {
        "algorithm": algorithm,
        "rollout": Rollout(prompts_per_step=6, samples_per_prompt=4, updates_per_rollout=2),
        "sampler": experiment.Sampler(**sampler | changes.pop("sampler", {})),
        "data": Data(min_terms=2, max_terms=3, max_prompt_tokens=12, heldout_problems=0),
        "reward": reward,
        "checkpoint": experiment.Checkpoint(every_steps=0, keep_groups=True),
        "log": experiment.Log(0, tensorboard=False, report=False),
        "packing": experiment.Packing(row_tokens=128, rows_per_microbatch=4),
    }
    return make_quick_config(folder, run_dir, **sections | changes)


def final_arrays(run_dir: pathlib.Path) -> dict[str, np.ndarray]:
    """Return the arrays of the newest checkpoint by path, the critic's too."""
    (folder,) = (run_dir / "checkpoints").iterdir()
    states = {
        name: ocp.PyTreeCheckpointHandler().restore(folder / name)
        for name in ("state", "critic")
        if (folder / name).exists()
    }
    return {
        jax.tree_util.keystr(path): np.asarray(x) for path, x in jax.tree.leaves_with_path(states)
    }


def differing(run_dir: pathlib.Path, other: pathlib.Path) -> list[str]:
    arrays, others = final_arrays(run_dir), final_arrays(other)
    assert arrays.keys() == others.keys() and len(arrays) > 10
    return [path for path in arrays if arrays[path].tobytes() != others[path].tobytes()]


def without_costs(run_dir):
    rows = read_rows(run_dir)
    return [{k: v for k, v in row.items() if not k.startswith(tuple(COSTS))} for row in rows]


def used(run_dir):
    """The lines of responses that a step did not draw in vain."""
    files = read_rollouts(run_dir)
    return {
        name: [line for line in text.splitlines() if '"surplus": true' not in line]
        for name, text in files.items()
    }


def same_run(run_dir: pathlib.Path, other: pathlib.Path) -> list[str]:
    """Return what differs between two runs besides their costs."""
    kinds = {"metrics": without_costs, "groups": used}
    differences = [name for name, read in kinds.items() if read(run_dir) != read(other)]
    return differences + differing(run_dir, other)
