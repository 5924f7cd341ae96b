"""Charts of the report of a run, listed in page.charts.toml."""

import functools
import importlib.resources
import math
import tomllib
from collections.abc import Mapping
from typing import Any, NamedTuple

# Metrics that are means over a subset, and the metric that is 0 if the subset is empty.
SUBSET_MEANS = {
    "up_clipped_probability": "clip_fraction_high",
    "response_tokens_right": "response_tokens_right",
    "response_tokens_wrong": "response_tokens_wrong",
}


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
    return (importlib.resources.files("dapo_jax.extras.report") / name).read_text(encoding="utf-8")


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
