"""Qwen2.5-Math-7B on the problems of MATH, by Dr. GRPO with DAPO's filter and upper clip.

dapo-jax train --config=configs/qwen2p5_7b_math.py:v6e_8 \
    --config.run_dir=gs://BUCKET/math_7b --config.data.folder=gs://BUCKET/data

Hardware: 8 chips of v6e (the default: one host) or 16; 4, 8 or 16 of v5p; 16 of v5e; or 4 of tpu7x:
a name of VARIANTS behind the colon. docs/pods.md has the plan's estimate of a step.

Expected: not yet run here. The nearest published number is MATH-500 77.2 and AIME 2024 33.3 from
52.4 and 16.7, of reinforcement learning on 8,000 problems of MATH by PPO from the same model
(github.com/hkust-nlp/simpleRL-reason, table of January 2025; pass@1).

`data` holds math.jsonl (the training problems of MATH with `problem` and `solution`) and
math500.jsonl. The model's context is 4,096 tokens: 1,024 of prompt and 3,072 of response, as in
Dr. GRPO (arXiv 2503.20783), from which also come 128 prompts, 8 responses, and the budget's token
sum. DAPO's soft punishment and filter stay on.
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
from dapo_jax.types.errors import require

PROMPT_TOKENS, RESPONSE_TOKENS = 1_024, 3_072


@dataclasses.dataclass(frozen=True)
class Variant:
    """How the run lies on a pod; slots are those of a replica of the sampler."""

    mesh: Mesh
    rows: int  # a microbatch's, all devices
    slots: int
    remat: Literal["full", "attention"] = "full"
    load_layers: int = 0


VARIANTS = {
    "v6e_8": Variant(Mesh(fsdp=2, tensor=4), 4, 64),
    "v6e_16": Variant(Mesh(fsdp=4, tensor=4), 8, 64),
    "v5p_4": Variant(Mesh(fsdp=2, decode_tensor=2), 4, 64),
    "v5p_16": Variant(Mesh(fsdp=8, decode_tensor=2), 16, 64, "attention"),
    "v5p_8": Variant(Mesh(fsdp=4, decode_tensor=2), 8, 64, "attention"),
    "tpu7x_4": Variant(Mesh(fsdp=4, decode_tensor=2), 8, 64, "attention"),  # two devices a chip
    "v5e_16": Variant(Mesh(fsdp=4, tensor=4), 4, 32, load_layers=7),
}


def get_config(variant: str = "v6e_8") -> Config:
    require(variant in VARIANTS, "variant", variant, f"one of {', '.join(VARIANTS)}")
    lies = VARIANTS[variant]
    replicas = lies.mesh.data * lies.mesh.fsdp
    return Config(
        run_dir="runs/qwen2p5_7b_math",
        total_steps=300,
        algorithm=dataclasses.replace(
            algorithms.dr_grpo(), clip_high=0.28, dynamic_sampling=True, overlong_punishment=True
        ),
        model=Model(folder="models/Qwen2.5-Math-7B"),
        compute=Compute(dtype="bfloat16", remat=lies.remat, logprob_chunk_tokens=1_024),
        data=Data(
            source="math",
            heldout_source="math500",
            template="qwen_math",
            max_prompt_tokens=PROMPT_TOKENS,
            overlong_prompts="drop",
        ),
        rollout=Rollout(prompts_per_step=128, samples_per_prompt=8, updates_per_rollout=1),
        sampler=Sampler(
            slots=lies.slots * replicas,
            burst_tokens=16,
            max_response_tokens=RESPONSE_TOKENS,
            load_layers=lies.load_layers,
        ),
        reward=Reward(verifier="math", workers=8),
        optimizer=Optimizer(learning_rate=1e-6, warmup_steps=5, weight_decay=0.0),
        mesh=lies.mesh,
        packing=Packing(
            row_tokens=2 * (PROMPT_TOKENS + RESPONSE_TOKENS), rows_per_microbatch=lies.rows
        ),
        checkpoint=Checkpoint(every_steps=20, keep=2, keep_groups=True, leave_seconds=240.0),
        evaluation=Evaluation(every_steps=20, samples_per_problem=4, temperature=1.0, top_p=0.7),
    )
