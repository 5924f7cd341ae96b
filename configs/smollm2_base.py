"""SmolLM2-135M after some worked problems: where configs/smollm2.py starts.

dapo-jax sft smollm2_base              word problems, some 3 minutes on two cores
dapo-jax sft smollm2_base:calculator   larger numbers, and calls of a calculator, in chat form
dapo-jax sft smollm2_base:countdown    answers of reasoning-gym's countdown with three numbers
dapo-jax sft smollm2_base:gsm8k        the training solutions of GSM8K; hours
`dapo-jax train smollm2` runs the one that it needs first.
"""

from dapo_jax.config.experiment import Mesh, Optimizer, Packing
from dapo_jax.extras.sft.settings import OwnData, SftConfig
from dapo_jax.types.errors import require

COUNTDOWN = "gym:countdown?min_numbers=3&max_numbers=3&max_value=20&min_target=10&max_target=99"
TASKS = {
    "words": OwnData("word_problems", template="{problem}\n", generated_examples=176),
    "calculator": OwnData("calculator_problems", template="chat", generated_examples=336),
    "countdown": OwnData(COUNTDOWN, template="{problem}\n", generated_examples=256),
    "gsm8k": OwnData("openai/gsm8k", template="{problem}\n"),
}
# Tokens of a row, and rows of a microbatch.
ROWS = {"words": (144, 8), "calculator": (256, 8), "countdown": (256, 8), "gsm8k": (512, 2)}


def get_config(task: str = "words") -> SftConfig:
    require(task in TASKS, "task", task, f"one of {', '.join(TASKS)}")
    data = TASKS[task]
    row_tokens, rows = ROWS[task]
    data.heldout_examples, data.passes = 16, 1.0
    return SftConfig(
        out="runs/smollm2_base" if task == "words" else f"runs/smollm2_base_{task}",
        start="dapo_jax:smollm2",
        examples_per_step=16,
        data=data,
        mesh=Mesh(data=-1, fsdp=1),
        optimizer=Optimizer(learning_rate=1e-4, schedule="linear", warmup_steps=2, weight_decay=0),
        packing=Packing(row_tokens=row_tokens, rows_per_microbatch=rows),
    )
