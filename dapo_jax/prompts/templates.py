"""Prompt templates by name: how a bare problem becomes the text that the policy sees."""

import dataclasses
from collections.abc import Callable

from dapo_jax.prompts.chat import ChatTemplate
from dapo_jax.structs import Problem

# The wording of DAPO's released data (arXiv 2503.14476).
DAPO = (
    "Solve the following math problem step by step. The last line of your response should be "
    "of the form Answer: $Answer (without quotes) where $Answer is the answer to the problem."
    '\n\n{problem}\n\nRemember to put your answer on its own line after "Answer:".'
)
# DeepSeek-R1-Zero (arXiv 2501.12948, table 1).
R1 = (
    "A conversation between User and Assistant. The user asks a question, and the Assistant solves "
    "it. The assistant first thinks about the reasoning process in the mind and then provides the "
    "user with the answer. The reasoning process and answer are enclosed within <think> </think> "
    "and <answer> </answer> tags, respectively, i.e., <think> reasoning process here </think> "
    "<answer> answer here </answer>.\nUser: {problem}\nAssistant:"
)
# Qwen2.5-Math's chat, with the system message that it was trained on (arXiv 2409.12122).
QWEN_MATH = (
    "<|im_start|>system\nPlease reason step by step, and put your final answer within \\boxed{}."
    "<|im_end|>\n<|im_start|>user\n{problem}<|im_end|>\n<|im_start|>assistant\n"
)


@dataclasses.dataclass(frozen=True)
class Beside:
    """What a template may show beside the problem.

    Attributes:
        examples: one more than `shots`, so that the asked problem can be left out.
    """

    chat: ChatTemplate | None = None
    system_prompt: str = ""
    examples: tuple[Problem, ...] = ()
    shots: int = 0


def _wording(text: str) -> Callable[[Problem, Beside], str]:
    """Braces inside the problem, or elsewhere in the wording, are left alone."""
    return lambda problem, _: text.replace("{problem}", problem.text)


def _worked(problem: Problem) -> str:
    """Its solution, ending in the answer in a box."""
    if "\\boxed" in problem.solution:
        return problem.solution
    return f"{problem.solution}\nThe answer is $\\boxed{{{problem.answer}}}$.".strip()


def few_shot(problem: Problem, beside: Beside) -> str:
    """Worked examples, then the problem in the same form."""
    others = [e for e in beside.examples if e.fingerprint != problem.fingerprint]
    shown = [f"Problem:\n{e.text}\n\nSolution:\n{_worked(e)}" for e in others[: beside.shots]]
    return "\n\n\n".join([*shown, f"Problem:\n{problem.text}\n\nSolution:"])


def chat(problem: Problem, beside: Beside) -> str:
    """The model's own template; a system message where the config has one."""
    system = [{"role": "system", "content": beside.system_prompt}] if beside.system_prompt else []
    return beside.chat.render([*system, {"role": "user", "content": problem.text}])


TEMPLATES: dict[str, Callable[[Problem, Beside], str]] = {
    "none": _wording("{problem}"),
    "dapo": _wording(DAPO),
    "r1": _wording(R1),
    "qwen_math": _wording(QWEN_MATH),
    "few_shot": few_shot,
    "chat": chat,
}

# A prompt that asks for one format and a verifier that reads another reward nothing: templates that
# ask for a format name the verifiers that read it.
VERIFIERS_OF = {
    "dapo": ("dapo", "math_label", "math"),
    "r1": ("math", "math_label"),
    "qwen_math": ("math", "math_box"),
    "few_shot": ("math", "math_label", "final_number"),
}
