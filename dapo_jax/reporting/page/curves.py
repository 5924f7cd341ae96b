"""Curves of a run: charts of its report with a reading aid, and the picture `curves.png`."""

import io
from typing import NamedTuple

from dapo_jax.runtime.storage.ownership import Folder


class Curve(NamedTuple):
    """A chart: metrics over steps, and how a healthy and an ill one look."""

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

PANELS = (
    ("Reward", ("reward",)),
    ("Accuracy (sampled)", ("accuracy", "heldout_accuracy")),
    ("Entropy (nats per token)", ("entropy",)),
    ("Response tokens", ("response_tokens_mean", "response_tokens_right", "response_tokens_wrong")),
    ("Share of groups", ("kept_fraction", "all_right_fraction", "all_wrong_fraction")),
    ("Truncated responses", ("truncated_fraction",)),
)


def plot_run(rows: list[dict[str, float]], path: Folder, title: str) -> None:
    """Writes a PNG of six panels over rollout steps."""
    from matplotlib.figure import Figure

    # Without pyplot, whose backend may be that of the notebook that called.
    figure = Figure(figsize=(12, 6), layout="constrained")
    axes = figure.subplots(2, 3, sharex=True)
    for axis, (name, metrics) in zip(axes.flat, PANELS, strict=True):
        for metric in metrics:
            points = [(row["step"], row[metric]) for row in rows if metric in row]
            if points:
                few = len(points) < len(rows)
                axis.plot(*zip(*points, strict=True), "o-" if few else "-", label=metric, ms=4)
        axis.set_title(name, fontsize=10)
        axis.grid(alpha=0.3)
        if len(metrics) > 1:
            axis.legend(fontsize=7)
    for axis in axes[-1]:
        axis.set_xlabel("rollout step")
    figure.suptitle(title)
    picture = io.BytesIO()
    figure.savefig(picture, dpi=110)
    path.write_bytes(picture.getvalue())
