"""Settings under which correctness matters to a run, by the settings' dotted names."""

from collections.abc import Callable, Mapping
from typing import Any

from dapo_jax.config.experiment import OF_THE_ANSWER, Config
from dapo_jax.config.settings import leaves

Settings = Mapping[str, Any]  # by dotted name
Condition = Callable[[Settings], Any]


def settings_of(config: Config) -> dict[str, Any]:
    """Return the settings of a config by dotted name."""
    return {name: value for name, _, value in leaves(config)}


def does_apply(condition: Condition | None, settings: Settings) -> bool:
    """Return True if the condition holds; also if a run is older than one of its settings."""
    try:
        return condition is None or bool(condition(settings))
    except KeyError:
        return True


def _parts(settings: Settings) -> set[str]:
    return {entry.partition("=")[0].strip() for entry in settings["reward.parts"].split(",")}


def _trains_on_correctness(settings: Settings) -> bool:
    is_needed = (
        settings["algorithm.dynamic_sampling"]
        or settings["algorithm.trained_responses"] != "all"
        or settings["algorithm.positive_nll_coefficient"] > 0
    )
    is_rewarded = not _parts(settings).isdisjoint(OF_THE_ANSWER)
    return is_rewarded or is_needed and settings["reward.correct"] == "verifier"


def uses_correctness(settings: Settings) -> bool:
    """Return True if correctness, by the verifier or a threshold, affects training."""
    return settings["reward.correct"] == "threshold" or _trains_on_correctness(settings)


def reward_leads(settings: Settings) -> bool:
    """Return True if no response counts as correct, so that reports lead with the reward.

    False if a run is older than one of the settings that decide it.
    """
    return not does_apply(uses_correctness, settings)


def reads_answers(settings: Settings) -> bool:
    """Return True if training reads the verifier's answers, rather than only logs them."""
    return "format" in _parts(settings) or _trains_on_correctness(settings)
