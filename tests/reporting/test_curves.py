"""The picture curves.png: legends beside the lines, axes from 0, gaps, hostile titles."""

import math

import numpy as np
import pytest
from matplotlib.figure import Figure
from reports import row

from dapo_jax.reporting.page.curves import (
    PICTURE,
    REWARD_PICTURE,
    draw_panel,
    plot_run,
    read_curves,
)

CURVES = {curve.title: curve for curve in read_curves()}


def draw(rows: list[dict], title: str):
    """Return the axis of a chart, laid out."""
    figure = Figure(layout="constrained")
    axis = figure.subplots()
    draw_panel(axis, CURVES[title], rows)
    figure.draw_without_rendering()
    return axis


@pytest.mark.parametrize("title", sorted({*PICTURE, *REWARD_PICTURE}))
def test_axes_begin_at_0_and_legends_are_beside_the_lines(title):
    curve = CURVES[title]
    value = 0.9 if curve.unit.startswith("share") else 60
    axis = draw([row(s, **dict.fromkeys(curve.metrics, value)) for s in range(3)], title)
    low, high = axis.get_ylim()
    top = max(1, value)
    assert title == "Reward" or -0.1 * high < low < 0 and top < high < 1.2 * top
    legend = axis.get_legend()
    assert (legend is not None) == (len(curve.metrics) > 1)
    if legend:
        assert not legend.get_window_extent().overlaps(axis.bbox)
        assert not legend.get_window_extent().overlaps(axis.title.get_window_extent())


def test_rounding_noise_of_a_reward_looks_flat():
    rows = [row(step, reward=0.5 + 1e-7 * (-1) ** step) for step in range(9)]
    low, high = draw(rows, "Reward").get_ylim()
    assert high - low > 0.0009 and low < 0.5 < high


def test_lengths_of_no_responses_are_gaps_and_isolated_points_are_dots():
    wrong = [40 if step in (3, 50, 51) else 0 for step in range(100)]
    rows = [row(step, response_tokens_wrong=x) for step, x in enumerate(wrong)]
    axis = draw(rows, "Length of right and wrong responses")
    (line,) = [line for line in axis.get_lines() if line.get_label() == "wrong responses"]
    assert np.flatnonzero(np.isfinite(line.get_ydata())).tolist() == [3, 50, 51]
    assert 3 in line.get_markevery() and 50 not in line.get_markevery()


@pytest.mark.parametrize("rows", [[], [{"step": 0}], [row(0, reward=math.nan, entropy=None)]])
def test_an_empty_run_with_a_hostile_title_is_drawn(rows, tmp_path):
    for leads in False, True:
        plot_run(rows, tmp_path / f"{leads}.png", "$x_{</b>$" + "long/" * 99, leads)
        assert (tmp_path / f"{leads}.png").read_bytes().startswith(b"\x89PNG")
    assert not any(CURVES[title].of_correctness for title in REWARD_PICTURE)
