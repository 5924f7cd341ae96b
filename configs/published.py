"""Tasks whose scores or times others published, a variant per row of docs/expected_scores.md.

dapo-jax train published:gsm8k_1p5b

Hardware: any number of chips that holds the model; all of them share weights and rows.

Expected: the scores in docs/expected_scores.md. Not yet run here. The rank and lengths of the
tasks with adapters, and lengths, batch and updates of the 7B for AIME, follow the sources. All
else is ours (samples and steps of GSM8K, batch and lengths of Qwen3-1.7B and of NeMo-RL's tasks,
learning rates, prompt templates), so a score may differ for that reason alone.

The folders are those of the hub:

hf download Qwen/Qwen2.5-1.5B-Instruct --local-dir models/Qwen2.5-1.5B-Instruct
hf download openai/gsm8k --repo-type dataset --local-dir data/gsm8k
"""

import dataclasses

from dapo_jax import algorithms
from dapo_jax.config.algorithm import Algorithm
from dapo_jax.config.experiment import (
    Checkpoint,
    Compute,
    Config,
    Data,
    Evaluation,
    Lora,
    Model,
    Optimizer,
    Packing,
    Reward,
    Rollout,
    Sampler,
)
from dapo_jax.types.errors import require


@dataclasses.dataclass(frozen=True)
class Variant:
    """A published task; a rank of 0 trains all weights."""

    model: str
    prompts: int
    samples: int
    prompt_tokens: int
    response_tokens: int
    steps: int
    rank: int = 0
    algorithm: Algorithm = dataclasses.field(default_factory=algorithms.grpo)
    source: str = "openai/gsm8k"
    heldout: str = "openai/gsm8k"
    template: str = "qwen_math"
    updates: int = 1


def _adapters(model: str) -> Variant:
    """Return verl's task with adapters, as the name of its log describes it."""
    return Variant(model, 64, 8, 512, 1_024, 200, rank=32)


VARIANTS = {
    "gsm8k_0p5b": _adapters("Qwen2.5-0.5B-Instruct"),
    "gsm8k_1p5b": _adapters("Qwen2.5-1.5B-Instruct"),
    "gsm8k_3b": _adapters("Qwen2.5-3B-Instruct"),
    "gsm8k_7b": _adapters("Qwen2.5-7B-Instruct"),
    "gsm8k_qwen3_1p7b": Variant("Qwen3-1.7B", 32, 16, 512, 1_024, 100, template="chat"),
    "aime_math_7b": Variant(  # max_position_embeddings of its config.json must be 32768
        "Qwen2.5-Math-7B",
        *(512, 16, 2_048, 28_672, 400),
        algorithm=dataclasses.replace(algorithms.dapo(), dynamic_sampling=False),
        source="dapo-math-17k",
        heldout="aime24",
        template="dapo",
        updates=16,
    ),
    "nemo_llama3p1_8b": Variant("Llama-3.1-8B-Instruct", 64, 32, 1_024, 3_072, 100),
    "nemo_qwen3_30b": Variant("Qwen3-30B-A3B", 64, 32, 1_024, 3_072, 100, template="chat"),
}


def get_config(variant: str = "gsm8k_1p5b") -> Config:
    require(variant in VARIANTS, "variant", variant, f"one of {', '.join(VARIANTS)}")
    task = VARIANTS[variant]
    tokens = task.prompt_tokens + task.response_tokens
    return Config(
        run_dir=f"runs/{variant}",
        total_steps=task.steps,
        algorithm=task.algorithm,
        model=Model(folder=f"models/{task.model}"),
        lora=Lora(rank=task.rank),
        compute=Compute(dtype="bfloat16", remat="full", logprob_chunk_tokens=1_024),
        data=Data(
            source=task.source,
            heldout_source=task.heldout,
            template=task.template,
            max_prompt_tokens=task.prompt_tokens,
            overlong_prompts="drop",
        ),
        rollout=Rollout(
            prompts_per_step=task.prompts,
            samples_per_prompt=task.samples,
            updates_per_rollout=task.updates,
        ),
        sampler=Sampler(slots=512, burst_tokens=16, max_response_tokens=task.response_tokens),
        reward=Reward(verifier="math", workers=8),
        optimizer=Optimizer(
            learning_rate=2e-5 if task.rank else 1e-6, warmup_steps=5, weight_decay=0.0
        ),
        packing=Packing(row_tokens=max(4_096, tokens), rows_per_microbatch=16),
        checkpoint=Checkpoint(every_steps=20, keep=2, keep_groups=True),
        evaluation=Evaluation(every_steps=20, samples_per_problem=1, temperature=1.0, top_p=0.7),
    )
