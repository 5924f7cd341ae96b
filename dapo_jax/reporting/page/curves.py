"""How to read a run: for every curve, what is healthy and what is ill; and what to warn of."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

LAST = 10  # rows that stand for the end of a run


class Curve(NamedTuple):
    """One chart: metrics over steps, and two sentences on what to see in them."""

    title: str
    metrics: tuple[str, ...]
    unit: str
    healthy: str
    ill: str


CURVES = (
    Curve(
        "Held-out accuracy",
        ("heldout_accuracy", "heldout_majority"),
        "share right",
        "rises, and levels off later than the sampled accuracy.",
        "flat while the reward rises: the reward is earned some other way than by being right.",
    ),
    Curve(
        "Reward",
        ("reward",),
        "mean reward",
        "rises, fast at first.",
        "rises while held-out accuracy falls: read the rollouts below, something is exploited.",
    ),
    Curve(
        "Accuracy of sampled responses",
        ("accuracy",),
        "share right",
        "rises with noise of a few points: every step asks other problems.",
        "falls for many steps together: a smaller learning rate, or look at entropy and length.",
    ),
    Curve(
        "Entropy",
        ("entropy",),
        "nats per token",
        "falls slowly and stays above zero.",
        "falls to zero in a few steps (collapse: nothing is explored), or grows without end.",
    ),
    Curve(
        "Groups by outcome",
        ("all_right_fraction", "all_wrong_fraction", "kept_fraction"),
        "share of groups",
        "all wrong shrinks and all right grows as the task is learned.",
        "nearly all wrong (too hard, or a wrong verifier) or nearly all right (nothing to learn).",
    ),
    Curve(
        "Length of right and wrong responses",
        ("response_tokens_right", "response_tokens_wrong"),
        "tokens",
        "both move together, and wrong ones are not much longer.",
        "wrong ones grow towards the budget: rambling is not punished.",
    ),
    Curve(
        "Responses cut off",
        ("truncated_fraction", "answer_not_found_rate"),
        "share of responses",
        "low, and falling.",
        "cut off grows: the budget is too small or rambling pays. No answer near 1: template and "
        "verifier disagree.",
    ),
    Curve(
        "Clipped tokens",
        ("clip_fraction_low", "clip_fraction_high", "clip_fraction_dual"),
        "share of tokens",
        "some thousandths to some hundredths.",
        "above a tenth: updates are too large or too many per rollout batch. All 0 with several "
        "updates: nothing moves.",
    ),
    Curve(
        "Probability of up-clipped tokens",
        ("up_clipped_probability",),
        "mean old probability",
        "low: the upper clip stops unlikely tokens from growing, which clip-higher loosens.",
        "near 1: likely tokens are clipped, so ratios are wild.",
    ),
    Curve(
        "Sampler against trainer",
        ("kl_sampler_trainer",),
        "nats per token",
        "within some thousandths of 0.",
        "away from 0: they compute different policies (int8, bfloat16, lag, carry-over): the "
        "ratio is off.",
    ),
    Curve(
        "KL to the reference",
        ("kl_reference",),
        "nats per token",
        "grows slowly.",
        "jumps: the policy has left the reference, often at the cost of everything else.",
    ),
    Curve(
        "Gradient norm",
        ("gradient_norm",),
        "norm before clipping",
        "of one order of magnitude throughout.",
        "peaks of many times the usual: a smaller learning rate, and look at those steps.",
    ),
    Curve(
        "Repetition and reflection",
        ("repetition", "reflection_fraction"),
        "share",
        "repetition stays low; reflection may grow.",
        "repetition grows: responses go in circles.",
    ),
    Curve(
        "What the critic explains",
        ("explained_variance",),
        "share of variance",
        "rises towards 1.",
        "at or below 0: advantages are noise of the critic's own.",
    ),
    Curve(
        "Sampled per trained token",
        ("sampled_to_kept_tokens",),
        "tokens",
        "near 1, growing as the task is learned: the price of dynamic sampling.",
        "above 5: most of the sampling is thrown away; harder data, or stop here.",
    ),
    Curve(
        "Speed",
        ("sampled_tokens_per_second", "trained_tokens_per_second"),
        "tokens per second",
        "flat after the first steps, which compile.",
        "falls: responses grow, or the machine is shared.",
    ),
)

Rows = Sequence[dict[str, Any]]


def values(rows: Rows, name: str) -> np.ndarray:
    """That metric of the rows that have it as a finite number."""
    found = [row[name] for row in rows if isinstance(row.get(name), int | float)]
    return np.asarray([x for x in found if np.isfinite(x)], float)


def _steps(name: str, text: str) -> Callable[[Rows, int], str]:
    """Warns of the steps in which a metric is above 0."""

    def read(rows: Rows, total: int) -> str:
        bad = [row["step"] for row in rows if values([row], name).sum() > 0]
        where = ", ".join(map(str, bad[:8])) + ", ..." * (len(bad) > 8)
        return f"{text} in {len(bad)} of {len(rows)} rows (step {where})" if bad else ""

    return read


def _end(name: str, limit: float, text: str) -> Callable[[Rows, int], str]:
    """Warns where a metric ends above a limit."""

    def read(rows: Rows, total: int) -> str:
        end = values(rows, name)[-LAST:]
        over = end.size > 0 and abs(end.mean()) > limit
        return f"{text}: {name} is {end.mean():.3g} at the end" if over else ""

    return read


def _collapse(rows: Rows, total: int) -> str:
    entropy = values(rows, "entropy")
    if entropy.size < 2 * LAST or entropy[-LAST:].mean() > 0.1 * entropy[:LAST].mean():
        return ""
    first, last = entropy[:LAST].mean(), entropy[-LAST:].mean()
    return f"entropy fell from {first:.3g} to {last:.3g} nats: little is explored any more"


def _unfinished(rows: Rows, total: int) -> str:
    last = rows[-1]["step"]
    return f"ends at step {last} of {total}: still running, or stopped" if last < total else ""


def _forgot(rows: Rows, total: int) -> str:
    scores = values(rows, "heldout_accuracy")
    if scores.size < 2 or scores[-1] >= scores[0]:
        return ""
    return f"held-out accuracy fell from {scores[0]:.3f} to {scores[-1]:.3f}"


# Each says what is wrong with a run of so many planned steps, or nothing.
WARNINGS: tuple[Callable[[Rows, int], str], ...] = (
    _unfinished,
    _forgot,
    _collapse,
    _end("truncated_fraction", 0.3, "many responses are cut off by the budget"),
    _end("answer_not_found_rate", 0.3, "many responses have no answer the verifier can find"),
    _end("all_wrong_fraction", 0.8, "most groups are all wrong"),
    _end("all_right_fraction", 0.8, "most groups are all right: little is left to learn"),
    _end("kl_sampler_trainer", 0.05, "sampler and trainer disagree"),
    _end("clip_fraction_high", 0.1, "the upper clip cuts many tokens"),
    _steps("starved", "too few groups carried signal"),
    _steps("empty_updates", "updates had no trained token"),
    _steps("skipped_updates", "updates were skipped, their gradient was not finite,"),
    _steps("broken_groups", "groups were dropped because their reward failed"),
    _steps("verifier_failures", "the verifier failed on responses"),
)


def warnings(rows: Rows, total_steps: int) -> list[str]:
    """All that is wrong with a run, a sentence each."""
    return [said for warn in WARNINGS if (said := warn(rows, total_steps))]
