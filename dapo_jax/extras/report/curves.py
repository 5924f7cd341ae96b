"""Lines of a chart as paths of an SVG picture."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

Line = tuple[str, Sequence[Mapping[str, Any]], str]  # name, rows of the run, metric
# Means over a subset of responses or tokens, and the metric that is 0 if that is empty.
SUBSETS = {name: name for name in ("response_tokens_right", "response_tokens_wrong")}
SUBSETS["up_clipped_probability"] = "clip_fraction_high"
STRETCHES = 300  # of a long curve; each shows its lowest and its highest value, so peaks stay
LEFT, RIGHT, TOP, BOTTOM = 52, 344, 8, 162  # of the axes, in a picture of 360 x 190


def show_number(value: Any) -> str:
    """Return a number as short text; a dash for None."""
    if not isinstance(value, int | float):
        return "–" if value is None else str(value)
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.1e}" if 0 < abs(value) < 1e-4 else f"{value:.3g}"


def _points(rows: Sequence[Mapping[str, Any]], metric: str) -> np.ndarray:
    """Return steps and values, [points, 2]; NaN is a gap: no value, or of an empty subset."""
    subset = SUBSETS.get(metric)
    found = [row.get(metric) if subset is None or row.get(subset) != 0 else None for row in rows]
    values = [x if isinstance(x, int | float) and abs(x) < 1e300 else math.nan for x in found]
    points = np.column_stack([[row["step"] for row in rows], np.array(values, float)])
    is_known = np.isfinite(points[:, 1])
    if metric.startswith("heldout_") or not is_known.any():  # rare: a line joins them
        points = points[is_known]
    if len(points) <= 2 * STRETCHES:
        return points
    y = np.nan_to_num(points[:, 1], nan=float(np.nanmean(points[:, 1])))
    parts = np.array_split(np.arange(len(y)), STRETCHES)
    kept = {part[pick(y[part])] for part in parts for pick in (np.argmin, np.argmax)}
    return points[sorted(kept)]


def _path(points: np.ndarray) -> str:
    """Return the SVG path of points, with a gap at each NaN; a lone point is a short dash."""
    pieces = []
    for part in np.ma.clump_unmasked(np.ma.masked_invalid(points[:, 1])):
        texts = [f"{x:.1f},{y:.1f}" for x, y in points[part]]
        pieces.append("M" + ("L".join(texts) if len(texts) > 1 else f"{texts[0]}m-2,0h4"))
    return "".join(pieces)


def ticks(low: float, high: float, least: float = 0.0) -> list[tuple[float, str]]:
    """Return some round numbers from `low` to `high`, at least `least` apart, with their texts."""
    rough = (high - low) / 5
    unit = 10.0 ** math.floor(math.log10(rough))
    step = max(least, unit * next((factor for factor in (1, 2, 5) if unit * factor >= rough), 10))
    values = [step * i for i in range(math.ceil(low / step), math.floor(high / step) + 1)]
    form = ",.10g" if 1e-4 <= max(map(abs, values)) < 1e6 else ".3g"
    return [(value, format(value, form)) for value in values]


def draw(lines: Iterable[Line], span: float) -> dict[str, Any]:
    """Return the paths and ticks of a plot; {} if there is no value.

    The y axis covers at least `span`, so that rounding errors look flat. A line without a value
    still counts: colours of lines are the same in all plots.
    """
    points = {(i, name): _points(rows, key) for i, (name, rows, key) in enumerate(lines)}
    points = {line: rows for line, rows in points.items() if len(rows)}
    if not points:
        return {}
    steps, values = np.concatenate([*points.values()]).T
    first, last = steps.min(), max(steps.max(), steps.min() + 1)
    low, high = np.nanmin(values), np.nanmax(values)
    missing = max(0.0, max(span, 0.01 * max(abs(low), abs(high))) - (high - low))
    below = min(missing / 2, low) if low >= 0 else missing / 2  # no room for impossible values
    margin = 0.05 * (high - low + missing)
    low, high = low - below - margin, high + missing - below + margin

    def place(at: Any) -> np.ndarray:
        share = (np.array(at) - (first, low)) / (last - first, high - low)
        return np.array((LEFT, BOTTOM)) + share * (RIGHT - LEFT, TOP - BOTTOM)

    return {
        "x": [(f"{place((x, low))[0]:.1f}", text) for x, text in ticks(first, last, 1.0)],
        "y": [(f"{place((first, y))[1]:.1f}", text) for y, text in ticks(low, high)],
        "lines": [(*line, _path(place(rows))) for line, rows in points.items()],
    }
