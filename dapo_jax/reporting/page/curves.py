"""Curves of a run: charts of its report with a reading aid, and the picture `curves.png`."""

import io
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from dapo_jax.runtime.storage.paths import Folder


class Curve(NamedTuple):
    """A chart: metrics over steps, and how a healthy and an ill one look.

    Attributes:
        metrics: words of a legend by metric.
        span: smallest height of the axis, so that rounding looks flat.
    """

    title: str
    metrics: dict[str, str]
    unit: str
    span: float
    healthy: str
    ill: str


CURVES = (
    Curve(
        "Held-out accuracy",
        {
            "heldout_accuracy": "mean of all samples (avg@k)",
            "heldout_majority": "majority vote (maj@k)",
        },
        "share right",
        0.05,
        "rises, and levels off later than the sampled accuracy.",
        "flat while the reward rises: the reward is earned some other way than by being right.",
    ),
    Curve(
        "Reward",
        {"reward": "reward"},
        "mean reward",
        0.001,
        "rises, fast at first.",
        "rises while held-out accuracy falls: read the rollouts below, something is exploited.",
    ),
    Curve(
        "Accuracy of sampled responses",
        {"accuracy": "sampled accuracy"},
        "share right",
        0.05,
        "rises with noise of a few points: every step asks other problems.",
        "falls for many steps together: a smaller learning rate, or look at entropy and length.",
    ),
    Curve(
        "Entropy",
        {"entropy": "entropy"},
        "nats per token",
        0.01,
        "falls slowly and stays above zero.",
        "falls to zero in a few steps (collapse: nothing is explored), or grows without end.",
    ),
    Curve(
        "Groups by outcome",
        {
            "all_right_fraction": "all right",
            "all_wrong_fraction": "all wrong",
            "kept_fraction": "kept, with signal",
        },
        "share of groups",
        0.05,
        "all wrong shrinks and all right grows as the task is learned.",
        "nearly all wrong (too hard, or a wrong verifier) or nearly all right (nothing to learn).",
    ),
    Curve(
        "Length of right and wrong responses",
        {"response_tokens_right": "right responses", "response_tokens_wrong": "wrong responses"},
        "tokens",
        1,
        "both move together, and wrong ones are not much longer.",
        "wrong ones grow towards the budget: rambling is not punished.",
    ),
    Curve(
        "Responses cut off",
        {"truncated_fraction": "cut off by the budget", "answer_not_found_rate": "no answer found"},
        "share of responses",
        0.01,
        "low, and falling.",
        "cut off grows: the budget is too small or rambling pays. No answer near 1: template and "
        "verifier disagree.",
    ),
    Curve(
        "Clipped tokens",
        {
            "clip_fraction_low": "by the lower clip",
            "clip_fraction_high": "by the upper clip",
            "clip_fraction_dual": "by the dual clip",
        },
        "share of tokens",
        0.001,
        "some thousandths to some hundredths.",
        "above a tenth: updates are too large or too many per rollout batch. All 0 with several "
        "updates: nothing moves.",
    ),
    Curve(
        "Probability of up-clipped tokens",
        {"up_clipped_probability": "up-clipped tokens"},
        "mean old probability",
        0.05,
        "low: the upper clip stops unlikely tokens from growing, which clip-higher loosens.",
        "near 1: likely tokens are clipped, so ratios are wild.",
    ),
    Curve(
        "Sampler against trainer",
        {"kl_sampler_trainer": "sampler minus trainer"},
        "nats per token",
        0.001,
        "within some thousandths of 0.",
        "away from 0: they compute different policies (int8, bfloat16, lag, carry-over): the "
        "ratio is off.",
    ),
    Curve(
        "KL to the reference",
        {"kl_reference": "KL to the reference"},
        "nats per token",
        0.001,
        "grows slowly.",
        "jumps: the policy has left the reference, often at the cost of everything else.",
    ),
    Curve(
        "Gradient norm",
        {"gradient_norm": "gradient norm"},
        "norm before clipping",
        0.001,
        "of one order of magnitude throughout.",
        "peaks of many times the usual: a smaller learning rate, and look at those steps.",
    ),
    Curve(
        "Repetition and reflection",
        {
            "repetition": "windows of 8 tokens seen before",
            "reflection_fraction": "responses with a reflection word",
        },
        "share",
        0.01,
        "repetition stays low; reflection may grow.",
        "repetition grows: responses go in circles.",
    ),
    Curve(
        "What the critic explains",
        {"explained_variance": "explained variance"},
        "share of variance",
        0.01,
        "rises towards 1.",
        "at or below 0: advantages are noise of the critic's own.",
    ),
    Curve(
        "Sampled per trained token",
        {"sampled_to_kept_tokens": "sampled per trained token"},
        "tokens",
        0.1,
        "near 1, growing as the task is learned: the price of dynamic sampling.",
        "above 5: most of the sampling is thrown away; harder data, or stop here.",
    ),
    Curve(
        "Speed",
        {"sampled_tokens_per_second": "sampled", "trained_tokens_per_second": "trained on"},
        "tokens per second",
        1,
        "flat after the first steps, which compile.",
        "falls: responses grow, or the machine is shared.",
    ),
)

# Means by a metric whose 0 says that there was nothing to take the mean of.
MEANS_OVER = {
    "up_clipped_probability": "clip_fraction_high",
    "response_tokens_right": "response_tokens_right",
    "response_tokens_wrong": "response_tokens_wrong",
}


def value_at(row: Mapping[str, Any], metric: str) -> float:
    """Value of a metric in a row of metrics.jsonl; NaN for none, and for the mean of nothing."""
    found = row.get(metric)
    is_mean_of_nothing = metric in MEANS_OVER and row.get(MEANS_OVER[metric]) == 0
    if is_mean_of_nothing or not isinstance(found, int | float) or not math.isfinite(found):
        return math.nan
    return float(found)


class Panel(NamedTuple):
    """A part of `curves.png`.

    Attributes:
        metrics: label and colour by metric.
        top: value that an axis from 0 reaches at least; None for an axis that follows the values.
    """

    title: str
    metrics: dict[str, tuple[str, str]]
    top: float | None


# Orange is the colour of held-out problems alone.
PANELS = (
    Panel("Reward", {"reward": ("reward", "C0")}, None),
    Panel(
        "Accuracy",
        {"accuracy": ("sampled responses", "C0"), "heldout_accuracy": ("held-out problems", "C1")},
        1.0,
    ),
    Panel("Entropy (nats per token)", {"entropy": ("entropy", "C0")}, 0.01),
    Panel(
        "Response tokens",
        {
            "response_tokens_mean": ("all", "C0"),
            "response_tokens_right": ("right", "C2"),
            "response_tokens_wrong": ("wrong", "C3"),
        },
        1.0,
    ),
    Panel(
        "Share of groups",
        {
            "kept_fraction": ("kept", "C0"),
            "all_right_fraction": ("all right", "C2"),
            "all_wrong_fraction": ("all wrong", "C3"),
        },
        1.0,
    ),
    Panel("Share of responses cut off", {"truncated_fraction": ("cut off", "C0")}, 0.1),
)
MARKED = 40  # points of a line that are drawn as dots too; of more, those alone between gaps
REWARD_SPAN = 0.001
TITLE_CHARACTERS = 120


def _draw(axis: Any, panel: Panel, rows: list[dict[str, float]]) -> None:
    """Draws the lines of a panel, and its legend above them."""
    for metric, (label, colour) in panel.metrics.items():
        measured = [row for row in rows if metric in row]
        values = [value_at(row, metric) for row in measured]
        around = [math.nan, *values, math.nan]
        alone = [
            i for i in range(len(values)) if math.isnan(around[i]) and math.isnan(around[i + 2])
        ]
        marked = alone if len(values) > MARKED else None
        steps = [row["step"] for row in measured]
        axis.plot(steps, values, "o-", color=colour, label=label, ms=4, markevery=marked)
    axis.update_datalim([(0, 0), (1, panel.top or 0)], updatey=panel.top is not None)
    axis.autoscale_view()
    if panel.top is None:
        low, high = axis.get_ylim()
        missing = max(0.0, REWARD_SPAN - (high - low)) / 2
        axis.set_ylim(low - missing, high + missing)
    axis.grid(alpha=0.3)
    axis.set_title(panel.title, fontsize=10, pad=22)
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.ticklabel_format(useOffset=False)
    if len(panel.metrics) > 1:
        axis.legend(loc="lower center", bbox_to_anchor=(0.5, 1), ncols=3, fontsize=8, frameon=False)


def plot_run(rows: list[dict[str, float]], path: Folder, title: str) -> None:
    """Writes a PNG of six panels over rollout steps."""
    from matplotlib.figure import Figure

    # Without pyplot, whose backend may be that of the notebook that called.
    figure = Figure(figsize=(12, 6.5), layout="constrained")
    axes = figure.subplots(2, 3, sharex=True)
    for axis, panel in zip(axes.flat, PANELS, strict=True):
        _draw(axis, panel, rows)
    for axis in axes[-1]:
        axis.set_xlabel("rollout step")
    figure.suptitle(title[-TITLE_CHARACTERS:], parse_math=False)
    picture = io.BytesIO()
    figure.savefig(picture, dpi=110)
    path.write_bytes(picture.getvalue())
