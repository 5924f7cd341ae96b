"""Gemma 3 270M after some worked problems: where configs/gemma3_270m.py starts.

dapo-jax sft gemma3_270m_base    word problems
`dapo-jax train gemma3_270m` runs it first.
"""

from dapo_jax.config.experiment import Compute, Mesh, Optimizer, Packing
from dapo_jax.extras.sft.settings import OwnData, SftConfig


def get_config() -> SftConfig:
    return SftConfig(
        out="runs/gemma3_270m_base",
        start="dapo_jax:gemma3_270m",
        examples_per_step=16,
        compute=Compute(logprob_chunk_tokens=512),
        data=OwnData(
            "word_problems",
            template="{problem}\n",
            generated_examples=336,
            heldout_examples=16,
            passes=1.0,
        ),
        mesh=Mesh(data=-1, fsdp=1),
        optimizer=Optimizer(learning_rate=3e-5, schedule="linear", warmup_steps=2, weight_decay=0),
        packing=Packing(row_tokens=160, rows_per_microbatch=4),
    )
