"""Settings of the teacher of a distillation: `config.extras.teacher`."""

from typing import ClassVar, Literal

from dapo_jax.config.settings import Section, setting
from dapo_jax.types.rules import Unit


class TeacherSettings(Section):
    """Teacher of a distillation: a model folder of any shape, or the policy itself."""

    combinations: ClassVar = """
        algorithm.distillation!=none extras.teacher.prompt= -> extras.teacher.folder!=: a folder
        algorithm.distillation=none -> extras.teacher.
        algorithm.distillation=jsd -> extras.teacher.prompt=: the loss reads the policy's prompts
        extras.teacher.average>0 -> extras.teacher.folder=: the mean is the policy's
        extras.teacher.folder= -> extras.teacher.dtype
    """
    folder: str = setting(
        "", "Model folder; the tokenizer is the policy's. Empty: the policy itself, with `prompt`."
    )
    prompt: str = setting(
        "",
        "What it reads in place of the problem: text with {problem}, {answer}, {solution}, columns "
        "of the row, {sibling} (a correct response of the group) or {feedback} (of environments).",
    )
    average: Unit = setting(
        0.0, "Rate of the policy's exponential mean, per update, that teaches; 0: its first state."
    )
    dtype: Literal["auto", "float32", "bfloat16"] = setting("auto", "Type; 'auto': compute.dtype.")
