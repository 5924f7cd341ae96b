"""Blackjack of Gymnasium (`pip install gymnasium`): an odd number takes a card, an even one stops.

dapo-jax train --config=configs/blackjack.py
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

STEPS = 24
GAME = "gymnasium:Blackjack-v1?wrap=true&formatter=dapo_jax.extras.environments.gymnasium:blackjack"


def get_config() -> Config:
    return Config(
        run_dir="runs/blackjack",
        total_steps=STEPS,
        algorithm=algorithms.preset("dapo"),
        model=Model(folder="dapo_jax:arithmetic_base"),
        compute=Compute(scan_unroll=3),
        data=Data(max_terms=8, max_prompt_tokens=16, heldout_problems=256),
        rollout=Rollout(prompts_per_step=24, samples_per_prompt=16, max_sample_rounds=2),
        environment=Environment(name=GAME, max_turns=4, max_observation_tokens=8),
        reward=Reward(parts="environment=1", correct="threshold", threshold=0.5),  # won
        sampler=Sampler(slots=128, burst_tokens=4, max_response_tokens=64),
        optimizer=Optimizer(learning_rate=7e-4, schedule="linear", warmup_steps=2),
        packing=Packing(row_tokens=160, rows_per_microbatch=16),
        mesh=Mesh(data=-1, fsdp=1),
        evaluation=Evaluation(every_steps=STEPS // 4, samples_per_problem=2, top_p=1.0),
    )
