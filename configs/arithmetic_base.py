"""Base policy of the embedded task: 0.6 M parameters, trained from random ones.

    dapo-jax sft --config=configs/arithmetic_base.py

takes 5 CPU minutes. Its result ships with the package: `model.folder = "dapo_jax:arithmetic_base"`.
"""

from dapo_jax.config.experiment import Compute, Examples, Optimizer, Packing
from dapo_jax.extras.sft.settings import Architecture, SftConfig


def get_config() -> SftConfig:
    return SftConfig(
        out="runs/arithmetic_base",
        total_steps=800,
        examples_per_step=64,
        architecture=Architecture(
            layers=3, embed=128, heads=4, kv_heads=2, head_dim=32, mlp=384, rope_theta=100.0
        ),
        compute=Compute(scan_unroll=3),
        examples=Examples(max_terms=8),
        max_response_tokens=72,
        optimizer=Optimizer(learning_rate=3e-3, schedule="linear", warmup_steps=50, beta2=0.99),
        packing=Packing(row_tokens=88, rows_per_microbatch=16),
    )
