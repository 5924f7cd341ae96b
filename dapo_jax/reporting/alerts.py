"""Metrics that are watched while a run goes on: which went wrong, and what to try."""

import collections
from collections.abc import Iterable, Mapping

import numpy as np

from dapo_jax.config.alerts import Watch

STEPS_BEFORE = 10  # that a length is compared with
REPEATED_STEPS = 10  # a warning that stays true is given again after so many

# By setting of `Watch`: what is measured, and what to try where it is beyond.
ADVICE = {
    "min_entropy": (
        "entropy",
        "algorithm.clip_high=0.28 or more, a smaller optimizer.learning_rate, or "
        "algorithm.entropy_coefficient=0.001",
    ),
    "max_length_growth": (
        "growth of response_tokens_mean",
        "a smaller optimizer.learning_rate or algorithm.overlong_punishment=true; see repetition",
    ),
    "max_all_right": (
        "all_right_fraction",
        "harder problems, or rollout.when_starved=stop: little is left to learn",
    ),
    "max_all_wrong": (
        "all_wrong_fraction",
        "easier problems, a larger rollout.samples_per_prompt; see in rollouts/ whether the "
        "verdicts are right",
    ),
    "max_answer_not_found": (
        "answer_not_found_rate",
        "the pair of data.template and reward.verifier that belongs together, or a larger "
        "sampler.max_response_tokens",
    ),
    "max_verifier_failures": (
        "verifier_failures per verdict",
        "a larger reward.timeout_seconds or more reward.workers; rollouts/ says what failed",
    ),
}


def measure(values: Mapping[str, float], tokens_before: float) -> dict[str, float | None]:
    """What is watched of a step, by setting; None where there was nothing to measure.

    Args:
        values: the step's metrics.
        tokens_before: mean response length of the steps before it; 0 before the first.
    """
    verdicts = sum(count for name, count in values.items() if name.startswith("verdicts/"))
    return {
        "min_entropy": values.get("entropy"),
        "max_length_growth": values["response_tokens_mean"] / (tokens_before or np.inf),
        "max_all_right": values["all_right_fraction"],
        "max_all_wrong": values["all_wrong_fraction"],
        "max_answer_not_found": values["answer_not_found_rate"],
        "max_verifier_failures": values["verifier_failures"] / max(1.0, verdicts),
    }


class Watched:
    """The watched metrics of one run.

    Args:
        rows: of the steps before, where the run goes on from a checkpoint.
    """

    def __init__(self, watch: Watch, rows: Iterable[Mapping[str, float]] = ()):
        self._limits = {
            "min_entropy": watch.min_entropy,
            "max_length_growth": watch.max_length_growth,
            "max_all_right": watch.max_all_right,
            "max_all_wrong": watch.max_all_wrong,
            "max_answer_not_found": watch.max_answer_not_found,
            "max_verifier_failures": watch.max_verifier_failures,
        }
        tokens = (row["response_tokens_mean"] for row in rows if "response_tokens_mean" in row)
        self._tokens = collections.deque(tokens, STEPS_BEFORE)
        self._lasting = collections.Counter[str]()  # steps in a row

    def warnings(self, values: Mapping[str, float]) -> list[str]:
        """Of a step's metrics those that are beyond their threshold, each with what to try.

        One that stays so is named again after ten steps.
        """
        said, before = [], float(np.mean(self._tokens)) if self._tokens else 0.0
        for name, value in measure(values, before).items():
            limit, (metric, advice) = self._limits[name], ADVICE[name]
            beyond = value is not None and (
                value < limit if name.startswith("min_") else 0 < limit <= value
            )
            if beyond and self._lasting[name] % REPEATED_STEPS == 0:
                side = "below" if name.startswith("min_") else "at least"
                said.append(
                    f"{metric} is {value:.3g}, {side} config.watch.{name} = {limit:g}: try {advice}"
                )
            self._lasting[name] = self._lasting[name] + 1 if beyond else 0
        self._tokens.append(values["response_tokens_mean"])
        return said
