"""The settings of what a run is watched for."""

from dapo_jax.runtime.settings import section, setting


@section
class Watch:
    """Metrics that a step warns about by name; the run goes on. 0: not watched."""

    min_entropy: float = setting(0.005, "`entropy` below it, in nats, has collapsed.")
    max_length_growth: float = setting(
        2.0, "`response_tokens_mean` from here on, over its mean in the ten steps before."
    )
    max_all_right: float = setting(0.9, "`all_right_fraction` from here on.")
    max_all_wrong: float = setting(0.9, "`all_wrong_fraction` from here on.")
    max_answer_not_found: float = setting(0.5, "`answer_not_found_rate` from here on.")
    max_verifier_failures: float = setting(0.05, "`verifier_failures` per verdict from here on.")
