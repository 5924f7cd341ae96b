"""A package of verifiers (`pip install verifiers`): two sums in turn; only last digits count.

dapo-jax train --config=configs/two_sums.py
"""

import os

from dapo_jax import algorithms
from dapo_jax.config.experiment import (
    Compute,
    Config,
    Data,
    Environment,
    Evaluation,
    Mesh,
    Model,
    Optimizer,
    Packing,
    Reward,
    Rollout,
    Sampler,
)

STEPS = 10
# Installed packages need no path. A relative one lets a moved checkout resume its runs.
PACKAGE = f"verifiers:{os.path.relpath(os.path.dirname(__file__))}/environments/two_sums"


def get_config() -> Config:
    return Config(
        run_dir="runs/two_sums",
        total_steps=STEPS,
        algorithm=algorithms.preset("dapo"),
        model=Model(folder="dapo_jax:arithmetic_base"),
        compute=Compute(scan_unroll=3),
        data=Data(source=PACKAGE, max_prompt_tokens=16, heldout_problems=64, train_problems=2000),
        rollout=Rollout(prompts_per_step=8, samples_per_prompt=8, max_sample_rounds=1),
        environment=Environment(
            name=PACKAGE, max_turns=3, max_observation_tokens=12, step_seconds=60, workers=1
        ),
        reward=Reward(parts="environment=1", correct="threshold", threshold=0.5),  # one is right
        sampler=Sampler(slots=64, burst_tokens=4, max_response_tokens=96),
        optimizer=Optimizer(learning_rate=7e-4, schedule="linear", warmup_steps=2),
        packing=Packing(row_tokens=160, rows_per_microbatch=16),
        mesh=Mesh(data=-1, fsdp=1),
        evaluation=Evaluation(every_steps=STEPS, samples_per_problem=2, top_p=1.0),
    )
