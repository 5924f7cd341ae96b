"""Base policy of the calculator task: it answers sums at once, and calls three times in ten.

dapo-jax sft --config=configs/calculator_base.py        (3 CPU minutes; then configs/calculator.py)
"""

from dapo_jax.config.experiment import Compute, Examples, Optimizer, Packing
from dapo_jax.extras.sft.settings import OwnData, SftConfig


def get_config() -> SftConfig:
    return SftConfig(
        out="runs/calculator_base",
        start="dapo_jax:arithmetic_base",
        total_steps=600,
        examples_per_step=64,
        compute=Compute(scan_unroll=3),
        data=OwnData(source="multi_digit_sums"),
        examples=Examples(direct_share=0.7),
        max_response_tokens=48,
        optimizer=Optimizer(learning_rate=2e-3, schedule="linear", warmup_steps=10),
        packing=Packing(row_tokens=160, rows_per_microbatch=16),
    )
