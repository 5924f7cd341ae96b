"""Qwen2.5-0.5B on GSM8K by DAPO with low-rank adapters: one small accelerator.

dapo-jax train qwen2p5_0p5b_gsm8k:v5e_1

Hardware: one chip of v5e (the default), 4, 8 or 16 (v5e_4, v5e_8, v5e_16), or a T4 of a free Colab
(colab_t4: 16 GB, and float16 is the only fast number it has, so float32); see VARIANTS.
docs/pods.md has the plan's estimate of a step for the default.

Expected: not yet run, and we know of no published number of this recipe at this size.

The model folder and the data set are those of the hub:

hf download Qwen/Qwen2.5-0.5B --local-dir models/Qwen2.5-0.5B
hf download openai/gsm8k --repo-type dataset --local-dir data/gsm8k

Adapters of rank 32 on every matrix need a learning rate ten or more times that of all parameters.
"""

import dataclasses
from typing import Literal

from dapo_jax import algorithms
from dapo_jax.config.experiment import (
    Checkpoint,
    Compute,
    Config,
    Data,
    Evaluation,
    Lora,
    Mesh,
    Model,
    Optimizer,
    Packing,
    Reward,
    Rollout,
    Sampler,
)
from dapo_jax.types.errors import require

PROMPT_TOKENS, RESPONSE_TOKENS = 512, 768


@dataclasses.dataclass(frozen=True)
class Variant:
    """How the run lies on its devices, each of which has all weights."""

    dtype: Literal["float32", "bfloat16"]
    rows: int  # a microbatch's, all devices
    slots: int  # of all devices


VARIANTS = {
    "v5e_1": Variant("bfloat16", 4, 64),
    "v5e_4": Variant("bfloat16", 4, 256),  # more than a step's 256 responses would be idle
    "v5e_8": Variant("bfloat16", 8, 256),
    "v5e_16": Variant("bfloat16", 16, 256),
    "colab_t4": Variant("float32", 1, 32),
}


def get_config(variant: str = "v5e_1") -> Config:
    require(variant in VARIANTS, "variant", variant, f"one of {', '.join(VARIANTS)}")
    lies = VARIANTS[variant]
    return Config(
        run_dir="runs/qwen2p5_0p5b_gsm8k",
        total_steps=150,
        algorithm=algorithms.dapo(),
        model=Model(folder="models/Qwen2.5-0.5B"),
        lora=Lora(rank=32),
        compute=Compute(dtype=lies.dtype, remat="full", logprob_chunk_tokens=512),
        data=Data(
            source="openai/gsm8k",
            heldout_source="openai/gsm8k",
            template="qwen_math",
            max_prompt_tokens=PROMPT_TOKENS,
            overlong_prompts="drop",
        ),
        rollout=Rollout(prompts_per_step=32, samples_per_prompt=8, updates_per_rollout=2),
        sampler=Sampler(
            slots=lies.slots,
            burst_tokens=16,
            max_response_tokens=RESPONSE_TOKENS,
        ),
        reward=Reward(verifier="math", workers=2),
        optimizer=Optimizer(learning_rate=2e-5, warmup_steps=5, weight_decay=0.0),
        mesh=Mesh(data=-1, fsdp=1),  # adapters are small: to gather weights would cost more
        packing=Packing(row_tokens=2_048, rows_per_microbatch=lies.rows),
        checkpoint=Checkpoint(every_steps=20, keep=2, keep_groups=True),
        evaluation=Evaluation(every_steps=50, samples_per_problem=1, temperature=1.0, top_p=0.7),
    )
