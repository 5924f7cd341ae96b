"""Settings of the mathematical verifiers: `config.extras.math`."""

from typing import ClassVar, Literal

from dapo_jax.config.settings import Section, setting


class MathSettings(Section):
    """Answers that the verifiers math, math_box and math_label accept."""

    combinations: ClassVar = "reward.verifier!=math|math_box|math_label -> extras.math."
    unfinished: Literal["wrong", "right"] = setting(
        "wrong", "A correct value that is not worked out, as 102^2-98^2 for 800."
    )
    percent: Literal["exact", "as_asked"] = setting(
        "exact", "'exact': 20% is 0.2; 'as_asked': 20 if the problem asks for %."
    )
