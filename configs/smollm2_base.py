"""SmolLM2-135M after a few worked word problems: where configs/smollm2.py starts.

dapo-jax sft smollm2_base      some 3 minutes on two cores; `dapo-jax train smollm2` runs it first
"""

from dapo_jax.config.experiment import Mesh, Optimizer, OwnData, Packing, SftConfig


def get_config() -> SftConfig:
    return SftConfig(
        out="runs/smollm2_base",
        start="dapo_jax:smollm2",
        examples_per_step=16,
        data=OwnData(
            source="word_problems",
            template="{problem}\n",
            generated_examples=256,
            heldout_examples=16,
            passes=1.0,
        ),
        mesh=Mesh(data=-1, fsdp=1),
        optimizer=Optimizer(learning_rate=5e-5, schedule="linear", warmup_steps=2, weight_decay=0),
        packing=Packing(row_tokens=144, rows_per_microbatch=8),
    )
