"""Base policy of configs/two_strategies.py: 0.15 M parameters, two ways to answer a sum.

    dapo-jax sft --config=configs/two_strategies_base.py:0.9
    dapo-jax sft --config=configs/two_strategies_base.py

The first learns to work step by step, in a share of 0.9 of its examples, from random parameters (3
CPU minutes); the second makes that rare: 0.05 (half a minute). Its result ships with the package:
`model.folder = "dapo_jax:two_strategies_base"`.
"""

from dapo_jax.config.experiment import Compute, Examples, Optimizer, Packing
from dapo_jax.extras.sft.settings import Architecture, SftConfig
from dapo_jax.types.errors import require

FIRST = 0.9  # learns both


def get_config(working_share: str = "0.05") -> SftConfig:
    share = float(working_share)
    require(
        0 < share <= FIRST, "configs/two_strategies_base.py", share, f"above 0, at most {FIRST}"
    )
    first = share == FIRST
    architecture = Architecture(
        layers=3, embed=64, heads=4, kv_heads=2, head_dim=16, mlp=192, rope_theta=100.0
    )
    return SftConfig(
        out=f"runs/two_strategies_base/{working_share}",
        start="" if first else f"runs/two_strategies_base/{FIRST}",
        seed=1000 + first,
        total_steps=1000 if first else 200,
        examples_per_step=64,
        architecture=architecture if first else Architecture(),
        compute=Compute(scan_unroll=3),
        examples=Examples(direct_share=1 - share, min_terms=2, max_terms=8),
        max_response_tokens=96,
        optimizer=Optimizer(
            learning_rate=3e-3 if first else 1e-3, schedule="linear", warmup_steps=20, beta2=0.99
        ),
        packing=Packing(row_tokens=128, rows_per_microbatch=8),
    )
