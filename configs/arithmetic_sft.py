"""Supervised training of the base policy on worked examples without mistakes.

    dapo-jax sft --config=configs/arithmetic_sft.py

A comparison for reinforcement learning, which only gets right and wrong.
"""

from dapo_jax.config.experiment import Compute, Examples, Optimizer, Packing
from dapo_jax.extras.sft.settings import SftConfig


def get_config() -> SftConfig:
    return SftConfig(
        out="runs/arithmetic_sft",
        start="dapo_jax:arithmetic_base",
        seed=1000,  # other sums than those of the base policy
        total_steps=120,
        examples_per_step=64,
        compute=Compute(scan_unroll=3),
        examples=Examples(errors=False, max_terms=8),
        max_response_tokens=64,
        optimizer=Optimizer(learning_rate=5e-4, schedule="linear", warmup_steps=2),
        packing=Packing(row_tokens=160, rows_per_microbatch=16),
    )
