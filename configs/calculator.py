"""Tool use: sums that a small policy can't add by itself, and a calculator that it may call.

dapo-jax sft --config=configs/calculator_base.py
dapo-jax train --config=configs/calculator.py
dapo-jax train --config=configs/calculator.py:without      the same policy and sums, no calculator
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
    Rollout,
    Sampler,
)
from dapo_jax.types.errors import require

STEPS = 30


def get_config(tool: str = "calculator") -> Config:
    require(tool in ("calculator", "without"), "tool", tool, "calculator or without")
    environment = Environment()
    if tool == "calculator":
        environment = Environment(name="calculator", max_turns=3, max_observation_tokens=8)
    return Config(
        run_dir=f"runs/calculator_{tool}",
        total_steps=STEPS,
        algorithm=algorithms.preset("dapo"),
        model=Model(folder="runs/calculator_base"),
        compute=Compute(scan_unroll=3),
        data=Data(source="multi_digit_sums", max_prompt_tokens=16),
        rollout=Rollout(prompts_per_step=32, samples_per_prompt=16, updates_per_rollout=4),
        environment=environment,
        sampler=Sampler(slots=128, burst_tokens=4, max_response_tokens=48),
        optimizer=Optimizer(learning_rate=2e-4, schedule="linear", warmup_steps=2),
        packing=Packing(row_tokens=160, rows_per_microbatch=16),
        mesh=Mesh(data=-1, fsdp=1),
        evaluation=Evaluation(every_steps=STEPS // 3, samples_per_problem=4, top_p=1.0),
    )
