"""The picture curves.png: legends beside the lines, axes from 0, gaps, hostile titles."""

import math

import numpy as np
import pytest
from matplotlib.figure import Figure
from reports import row

from dapo_jax.reporting.page.curves import PANELS, Panel, draw_panel, plot_run


def drawn(rows: list[dict], title: str):
    """The axis of a panel, laid out."""
    figure = Figure(layout="constrained")
    axis = figure.subplots()
    draw_panel(axis, next(panel for panel in PANELS if panel.title == title), rows)
    figure.draw_without_rendering()
    return axis


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel.title)
def test_a_legend_is_beside_the_lines_in_words(panel: Panel):
    rows = [row(step, **dict.fromkeys(panel.metrics, 1.0)) for step in range(5)]
    axis = drawn(rows, panel.title)
    legend = axis.get_legend()
    assert (legend is not None) == (len(panel.metrics) > 1)
    if legend:
        assert not legend.get_window_extent().overlaps(axis.bbox)
        assert not legend.get_window_extent().overlaps(axis.title.get_window_extent())
        assert not any("_" in text.get_text() for text in legend.get_texts())


def test_held_out_problems_have_a_colour_and_a_name_of_their_own():
    result = [(m, *label) for panel in PANELS for m, label in panel.metrics.items()]
    (colour,) = {colour for metric, _, colour in result if metric == "heldout_accuracy"}
    assert [metric for metric, _, other in result if other == colour] == ["heldout_accuracy"]


@pytest.mark.parametrize(
    "title, least", [("Accuracy", 1), ("Response tokens", 60), ("Share of groups", 1)]
)
def test_axes_reach_from_0(title, least):
    metrics = next(panel for panel in PANELS if panel.title == title).metrics
    value = 0.9 if least == 1 else 60
    low, high = drawn([row(s, **dict.fromkeys(metrics, value)) for s in range(3)], title).get_ylim()
    assert -0.1 * high < low < 0 and least < high < 1.2 * least


def test_rounding_noise_of_a_reward_looks_flat():
    rows = [row(step, reward=0.5 + 1e-7 * (-1) ** step) for step in range(9)]
    low, high = drawn(rows, "Reward").get_ylim()
    assert high - low > 0.0009 and low < 0.5 < high


def test_lengths_of_no_responses_are_gaps_and_what_is_alone_is_a_dot():
    wrong = [40 if step in (3, 50, 51) else 0 for step in range(100)]
    rows = [row(step, response_tokens_wrong=x) for step, x in enumerate(wrong)]
    lines = {line.get_label(): line for line in drawn(rows, "Response tokens").get_lines()}
    values = lines["wrong"].get_ydata()
    assert np.flatnonzero(np.isfinite(values)).tolist() == [3, 50, 51]
    assert 3 in lines["wrong"].get_markevery() and 50 not in lines["wrong"].get_markevery()


@pytest.mark.parametrize("rows", [[], [{"step": 0}], [row(0, reward=math.nan, entropy=None)]])
def test_a_run_of_nothing_and_a_strange_name_are_drawn(rows, tmp_path):
    plot_run(rows, tmp_path / "curves.png", "$x_{</b>$" + "long/" * 99)
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
