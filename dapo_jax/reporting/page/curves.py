"""Charts of a run: those of its report, listed in page.charts.toml, and the picture curves.png."""

import functools
import importlib.resources
import io
import math
import tomllib
from collections.abc import Mapping
from typing import Any, NamedTuple

from dapo_jax.runtime.storage.paths import Folder

# Metrics that are means over a subset, and the metric that is 0 if the subset is empty.
SUBSET_MEANS = {
    "up_clipped_probability": "clip_fraction_high",
    "response_tokens_right": "response_tokens_right",
    "response_tokens_wrong": "response_tokens_wrong",
}
# Charts of curves.png, in its order.
PICTURE = (
    "Reward",
    "Accuracy of sampled responses",
    "Held-out accuracy",
    "Entropy",
    "Length of right and wrong responses",
    "Groups by outcome",
)
REWARD_PICTURE = (
    "Reward",
    "Groups without a spread",
    "Entropy",
    "Response length",
    "Responses cut off",
    "Repetition and reflection",
)
MAX_MARKED = 40  # longer lines have dots only at points between two gaps
TITLE_CHARACTERS = 120


class Curve(NamedTuple):
    """A chart of the report: metrics over steps, and the looks of a healthy and an ill run.

    Attributes:
        metrics: legend by metric.
        span: smallest height of the axis, so that rounding errors look flat.
        of_correctness: True for a chart that says little if no response counts as correct.
    """

    title: str
    metrics: dict[str, str]
    unit: str
    span: float
    healthy: str
    ill: str
    of_correctness: bool = False


def asset(name: str) -> str:
    """Return the text of a file of this folder."""
    return (importlib.resources.files("dapo_jax.reporting.page") / name).read_text(encoding="utf-8")


@functools.cache
def read_curves() -> tuple[Curve, ...]:
    """Return the charts of the report, in their order on the page."""
    return tuple(Curve(**chart) for chart in tomllib.loads(asset("page.charts.toml"))["chart"])


def value_at(row: Mapping[str, Any], metric: str) -> float:
    """Return the value of a metric in a row; NaN if missing or the mean of an empty subset."""
    value = row.get(metric)
    is_empty = metric in SUBSET_MEANS and row.get(SUBSET_MEANS[metric]) == 0
    if is_empty or not isinstance(value, int | float) or not math.isfinite(value):
        return math.nan
    return float(value)


def draw_panel(axis: Any, curve: Curve, rows: list[dict[str, float]]) -> None:
    """Draw a chart of curves.png, with its legend above the lines."""
    for metric, label in curve.metrics.items():
        measured = [row for row in rows if metric in row]
        steps = [row["step"] for row in measured]
        values = [value_at(row, metric) for row in measured]
        gaps = [True, *map(math.isnan, values), True]
        isolated = [i for i in range(len(values)) if gaps[i] and gaps[i + 2]]
        marked = isolated if len(values) > MAX_MARKED else None
        axis.plot(steps, values, "o-", label=label, ms=4, markevery=marked)
    if curve.title == "Reward":
        low, high = axis.get_ylim()
        missing = max(0.0, curve.span - (high - low)) / 2
        axis.set_ylim(low - missing, high + missing)
    else:
        top = 1.0 if curve.unit.startswith("share") else curve.span
        axis.update_datalim([(0, 0), (1, top)])
        axis.autoscale_view()
    axis.grid(alpha=0.3)
    axis.set_title(f"{curve.title} ({curve.unit})", fontsize=10, pad=22)
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.ticklabel_format(useOffset=False)
    if len(curve.metrics) > 1:
        axis.legend(loc="lower center", bbox_to_anchor=(0.5, 1), ncols=3, fontsize=8, frameon=False)


def plot_run(
    rows: list[dict[str, float]], path: Folder, title: str, reward_leads: bool = False
) -> None:
    """Write a PNG of six charts over rollout steps."""
    from matplotlib.figure import Figure

    # Not pyplot: its backend may be that of the calling notebook.
    figure = Figure(figsize=(12, 6.5), layout="constrained")
    axes = figure.subplots(2, 3, sharex=True)
    curves = {curve.title: curve for curve in read_curves()}
    for axis, name in zip(axes.flat, REWARD_PICTURE if reward_leads else PICTURE, strict=True):
        draw_panel(axis, curves[name], rows)
    for axis in axes[-1]:
        axis.set_xlabel("rollout step")
    figure.suptitle(title[-TITLE_CHARACTERS:], parse_math=False)
    picture = io.BytesIO()
    figure.savefig(picture, dpi=110)
    path.write_bytes(picture.getvalue())
