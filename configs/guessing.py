"""Game of several turns: find a number below 10, told after each guess which way it lies.

dapo-jax train --config=configs/guessing.py
"""

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

STEPS = 32


def get_config() -> Config:
    return Config(
        run_dir="runs/guessing",
        total_steps=STEPS,
        algorithm=algorithms.preset("dapo"),
        model=Model(folder="dapo_jax:arithmetic_base"),
        compute=Compute(scan_unroll=3),
        data=Data(max_terms=8, max_prompt_tokens=16, heldout_problems=128),
        rollout=Rollout(prompts_per_step=24, samples_per_prompt=16, max_sample_rounds=2),
        environment=Environment(name="guessing", max_turns=4, max_observation_tokens=4),
        reward=Reward(parts="environment=1", correct="threshold", threshold=0.1),  # found
        sampler=Sampler(slots=128, burst_tokens=4, max_response_tokens=48),
        optimizer=Optimizer(learning_rate=7e-4, schedule="linear", warmup_steps=2),
        packing=Packing(row_tokens=160, rows_per_microbatch=16),
        mesh=Mesh(data=-1, fsdp=1),
        evaluation=Evaluation(every_steps=STEPS // 4, samples_per_problem=2, top_p=1.0),
    )
