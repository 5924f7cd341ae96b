"""Qwen2.5-1.5B on GSM8K by DAPO: the first real model, on one host.

dapo-jax train --config=configs/qwen2p5_1p5b_gsm8k.py:v5e_8

Hardware: 8 chips of v5e (the default) or v6e, or one GPU of 80 GB (gpu_80gb); see VARIANTS. The
plan's estimate of a step: 18 s on v5e, 9 s on v6e, 25 s on one H100, by dapo-jax plan
--config=configs/qwen2p5_1p5b_gsm8k.py:v5e_8 --topology=v5e:2x4 (v6e_8, v6e:2x4; gpu_80gb, h100:1).

Expected: not yet run, and we know of no published number of this recipe at this size.

`models/Qwen2.5-1.5B` is the folder as published, `data` holds gsm8k.jsonl (its training problems)
and gsm8k_test.jsonl. Responses of a few hundred tokens; 1,024 are allowed.
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
    Mesh,
    Model,
    Optimizer,
    Packing,
    Reward,
    Rollout,
    Sampler,
)
from dapo_jax.runtime.settings import require

PROMPT_TOKENS, RESPONSE_TOKENS = 512, 1_024


@dataclasses.dataclass(frozen=True)
class Variant:
    """How the run lies on its devices; slots are those of a replica of the sampler."""

    mesh: Mesh
    rows: int  # a microbatch's, all devices
    slots: int
    remat: Literal["full", "attention"] = "attention"


VARIANTS = {
    "v5e_8": Variant(Mesh(fsdp=8), 8, 64, "full"),
    "v6e_8": Variant(Mesh(fsdp=8), 16, 128),
    "gpu_80gb": Variant(Mesh(fsdp=1), 2, 256),
}


def get_config(variant: str = "v5e_8") -> Config:
    require(variant in VARIANTS, "variant", variant, f"one of {', '.join(VARIANTS)}")
    lies = VARIANTS[variant]
    replicas = lies.mesh.data * lies.mesh.fsdp
    return Config(
        run_dir="runs/qwen2p5_1p5b_gsm8k",
        total_steps=200,
        algorithm=algorithms.dapo(),
        model=Model(folder="models/Qwen2.5-1.5B"),
        compute=Compute(dtype="bfloat16", remat=lies.remat, logprob_chunk_tokens=1_024),
        data=Data(
            source="gsm8k",
            heldout_source="gsm8k_test",
            template="qwen_math",
            max_prompt_tokens=PROMPT_TOKENS,
            overlong_prompts="drop",
        ),
        rollout=Rollout(prompts_per_step=128, samples_per_prompt=8, updates_per_rollout=2),
        sampler=Sampler(
            slots=lies.slots * replicas,
            burst_tokens=16,
            max_response_tokens=RESPONSE_TOKENS,
            first_window_tokens=512,
            prefill_prompts=4 * replicas,
        ),
        reward=Reward(verifier="math", workers=8),
        optimizer=Optimizer(learning_rate=1e-6, warmup_steps=5, weight_decay=0.1),
        mesh=lies.mesh,
        packing=Packing(row_tokens=4_096, rows_per_microbatch=lies.rows),
        checkpoint=Checkpoint(every_steps=20, keep=2, keep_groups=True),
        evaluation=Evaluation(every_steps=20, samples_per_problem=1, temperature=1.0, top_p=0.7),
    )
