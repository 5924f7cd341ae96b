"""Runs that keep scored groups, with responses of very different lengths."""

import pathlib
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from small_runs import make_quick_config

from dapo_jax import algorithms
from dapo_jax.config.experiment import (
    Checkpoint,
    Compute,
    Config,
    Critic,
    Data,
    Environment,
    Log,
    Lora,
    Mesh,
    Packing,
    Reward,
    Rollout,
    Sampler,
)

STEPS = 2
ROLLOUT = Rollout(prompts_per_step=6, samples_per_prompt=4, updates_per_rollout=2)
GAME = Environment(name="guessing", max_turns=4, max_observation_tokens=4, wait_bursts=2)
# Changes by setting; prompts wait for 8 slots, a model gives the rewards.
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bfloat16": {"compute": Compute(dtype="bfloat16")},
    "lag": {"rollout": Rollout(6, 4, updates_per_rollout=2, lag=1)},
    "adapters": {"lora": Lora(rank=2)},
    "critic": {"preset": "vapo", "correct": "threshold"},
    "pages": {"sampler": {"cache": "paged", "page_tokens": 8, "pages": 48}},
    "int8 cache": {"sampler": {"cache_dtype": "int8"}},
    "turns": {"environment": GAME},
    "turns in pages": {
        "environment": GAME,
        "sampler": {"cache": "paged", "page_tokens": 8, "pages": 48},
    },
    "turns with lag": {
        "environment": GAME,
        "rollout": Rollout(6, 4, updates_per_rollout=2, lag=1),
    },
    "turns, int8 cache": {"environment": GAME, "sampler": {"cache_dtype": "int8"}},
    "turns kept in pages": {
        "environment": GAME,
        "sampler": {"cache": "paged", "page_tokens": 8, "pages": 48, "keep_turns": True},
    },
    "experts": {"replay": "sampler"},  # with a folder of experts
    "two devices": {"mesh": Mesh(data=2, fsdp=1, tensor=1)},
}


def make_kept(setting: str, folder, score_folder, run_dir, **changes: Any) -> Config:
    """Return a run of a policy that samples nearly at random, 1 to 100 tokens."""
    changes = SETTINGS[setting] | changes
    sampler = {"slots": 8, "burst_tokens": 4, "max_response_tokens": 100, "temperature": 4.0}
    sampler = Sampler(**sampler | changes.pop("sampler", {}))
    algorithm = algorithms.preset(changes.pop("preset", "dapo"))
    algorithm.importance_cap = 2.0
    algorithm.router_replay = changes.pop("replay", "none")
    how = changes.pop("correct", "spread")
    return make_quick_config(
        folder,
        run_dir,
        **{
            "algorithm": algorithm,
            "total_steps": STEPS,
            "rollout": ROLLOUT,
            "sampler": sampler,
            "data": Data(min_terms=2, max_terms=3, max_prompt_tokens=12, heldout_problems=0),
            "reward": Reward(
                parts="model=1,repetition=0.1",
                model_folder=str(score_folder),
                correct=how,
                threshold=0.0 if how == "threshold" else 0.5,
            ),
            "checkpoint": Checkpoint(every_steps=0, keep_groups=True),
            "log": Log(0, tensorboard=False, report=False),
            "critic": Critic(pretrain_steps=0),
            "packing": Packing(row_tokens=128, rows_per_microbatch=4),
        }
        | changes,
    )


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
    """Return the paths of the arrays that differ in a bit."""
    arrays, others = final_arrays(run_dir), final_arrays(other)
    assert arrays.keys() == others.keys() and len(arrays) > 10
    return [path for path in arrays if arrays[path].tobytes() != others[path].tobytes()]
