"""Settings of the teacher of a distillation: `config.extras.teacher`."""

from typing import ClassVar, Literal

from dapo_jax.config.settings import section, setting


@section
class TeacherSettings:
    """Frozen teacher model of a distillation; its shape may differ from the policy's."""

    combinations: ClassVar = """
        algorithm.distillation!=none -> extras.teacher.folder!=: a model folder
        algorithm.distillation=none -> extras.teacher.
    """
    folder: str = setting("", "Model folder; the tokenizer is the policy's.")
    dtype: Literal["auto", "float32", "bfloat16"] = setting("auto", "Type; 'auto': compute.dtype.")
    weights_dtype: Literal["auto", "int8"] = setting(
        "auto", "Type of the layers' matrices: 'auto' (dtype), or 'int8' with a scale per channel."
    )
