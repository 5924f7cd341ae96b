"""Qwen2.5-1.5B on GSM8K by DAPO: the first real model, on one host.

dapo-jax train qwen2p5_1p5b_gsm8k:v5e_8

Hardware: 8 chips of v5e (the default) or v6e, 4 or 16 of them, or one GPU of 80 GB (gpu_80gb), or 4
or 8: a name of VARIANTS behind the colon. docs/pods.md has the plan's estimate of a step for the
default.

Expected: not yet run, and we know of no published number of this recipe at this size.

The model folder and the data set are those of the hub:

hf download Qwen/Qwen2.5-1.5B --local-dir models/Qwen2.5-1.5B
hf download openai/gsm8k --repo-type dataset --local-dir data/gsm8k

Responses take a few hundred tokens; 1,024 are allowed.
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
    Model,
    Optimizer,
    Packing,
    Reward,
    Rollout,
    Sampler,
)
from dapo_jax.types.errors import require

PROMPT_TOKENS, RESPONSE_TOKENS = 512, 1_024


@dataclasses.dataclass(frozen=True)
class Variant:
    """How the run lies on its devices; all of them share weights and rows (mesh.fsdp)."""

    rows: int  # a microbatch's, all devices
    slots: int  # of all devices
    remat: Literal["full", "attention"] = "attention"


VARIANTS = {
    "v5e_4": Variant(8, 256, "full"),
    "v5e_8": Variant(8, 512, "full"),
    "v5e_16": Variant(16, 1_024, "full"),  # a step's responses are 1,024
    "v6e_4": Variant(16, 512),
    "v6e_8": Variant(16, 1_024),
    "v6e_16": Variant(16, 1_024),
    "gpu_80gb": Variant(2, 256),
    "gpu_80gb_4": Variant(8, 1_024),
    "gpu_80gb_8": Variant(16, 1_024),
}


def get_config(variant: str = "v5e_8") -> Config:
    require(variant in VARIANTS, "variant", variant, f"one of {', '.join(VARIANTS)}")
    lies = VARIANTS[variant]
    return Config(
        run_dir="runs/qwen2p5_1p5b_gsm8k",
        total_steps=200,
        algorithm=algorithms.dapo(),
        model=Model(folder="models/Qwen2.5-1.5B"),
        compute=Compute(dtype="bfloat16", remat=lies.remat, logprob_chunk_tokens=1_024),
        data=Data(
            source="openai/gsm8k",
            heldout_source="openai/gsm8k",
            template="qwen_math",
            max_prompt_tokens=PROMPT_TOKENS,
            overlong_prompts="drop",
        ),
        rollout=Rollout(prompts_per_step=128, samples_per_prompt=8, updates_per_rollout=2),
        sampler=Sampler(
            slots=lies.slots,
            burst_tokens=16,
            max_response_tokens=RESPONSE_TOKENS,
        ),
        reward=Reward(verifier="math", workers=8),
        optimizer=Optimizer(learning_rate=1e-6, warmup_steps=5, weight_decay=0.1),
        packing=Packing(row_tokens=4_096, rows_per_microbatch=lies.rows),
        checkpoint=Checkpoint(every_steps=20, keep=2, keep_groups=True),
        evaluation=Evaluation(every_steps=20, samples_per_problem=1, temperature=1.0, top_p=0.7),
    )
