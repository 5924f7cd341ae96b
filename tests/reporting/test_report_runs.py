"""What a run stores for its report and its sinks, its report, and the curves of several runs."""

import json
import math

import jax
import numpy as np
import pytest
from conftest import check_documented, make_completion
from matplotlib.figure import Figure
from reports import data_of, row
from small_runs import make_config, make_quick_config, open_run, read_rollouts, read_rows

from dapo_jax.config.experiment import Log, Optimizer, Rollout
from dapo_jax.contracts import RunSink
from dapo_jax.data.prompts.tokenizer import Tokenizer
from dapo_jax.reporting.page import page
from dapo_jax.reporting.page.curves import PICTURE, draw_panel, plot_run, read_curves
from dapo_jax.reporting.sinks import token_fields
from dapo_jax.reporting.trackers import Sink
from dapo_jax.run.run import train
from dapo_jax.runtime.settings import ConfigError


@pytest.fixture(scope="module")
def traced(base, tmp_path_factory):
    """A run with ratios of all trained groups, whose updates are large enough to be clipped."""
    run_dir = tmp_path_factory.mktemp("traced") / "run"
    devices = jax.devices
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax, "devices", lambda *args: devices(*args)[:1])
        log = Log(0, console=False, tensorboard=False, token_groups=4, token_ratios=True)
        optimizer = Optimizer(learning_rate=3e-2, warmup_steps=0)
        train(make_quick_config(base, run_dir, total_steps=1, log=log, optimizer=optimizer))
    return run_dir


def test_stored_clips_are_those_that_the_update_made(traced):
    (row,) = read_rows(traced)
    lines = [json.loads(line) for line in read_rollouts(traced)["step_000001.jsonl"].splitlines()]
    trained = [line for line in lines if line["advantage"] is not None]
    ratios = [line for line in trained if "token_ratios" in line]
    # The first of two updates sees ratios of 1: what is clipped is clipped in the second.
    tokens = sum(line["tokens"] for line in trained)
    assert len(trained) == 16 and len(ratios) == 8
    assert all("token_texts" in line for line in trained)
    for number, name in (1, "low"), (2, "high"), (3, "dual"):
        cut = sum(line["token_clipped"].count(number) for line in ratios)
        logged = row[f"clip_fraction_{name}"]
        assert cut / tokens == pytest.approx(logged, abs=1.5 / tokens), name
    assert any(1 in line["token_clipped"] or 2 in line["token_clipped"] for line in ratios)
    for line in trained:
        assert "".join(line["token_texts"]) == line["response"]
        assert len(line["token_logprobs"]) == len(line["token_texts"]) == line["tokens"]
        assert all(x <= 0 for x in line["token_logprobs"])


def test_stored_advantages_are_the_algorithms(traced):
    text = read_rollouts(traced)["step_000001.jsonl"]
    groups: dict = {}
    for line in map(json.loads, text.splitlines()):
        groups.setdefault(line["index"], []).append(line)
    mixed = [g for g in groups.values() if g[0]["advantage"] is not None]
    assert len(mixed) == 4
    for group in mixed:
        rewards = np.array([line["reward"] for line in group])
        expected = (rewards - rewards.mean()) / rewards.std(ddof=1)
        result = [line["advantage"] for line in group]
        np.testing.assert_allclose(result, expected, rtol=1e-3)


def test_a_run_writes_its_page(traced):
    data = data_of((traced / page.PAGE).read_text())
    assert data["experiments"][0]["curves"]["steps"] == 1
    assert any("token_ratios" in r for group in data["rollouts"] for r in group["responses"])


def test_ratios_of_a_single_update_are_refused_as_nothing_reads_them(base, tmp_path):
    with pytest.raises(ConfigError, match="log.token_ratios = True"):
        make_config(base, tmp_path, rollout=Rollout(8, 8, 1), log=Log(token_ratios=True))


def test_every_curve_is_of_metrics_that_exist():
    names = [name for curve in read_curves() for name in curve.metrics]
    check_documented(names)
    assert len(names) == len(set(names))
    words = [word for curve in read_curves() for word in curve.metrics.values()]
    assert all(words) and not any("_" in word for word in words)
    assert all(curve.healthy and curve.ill for curve in read_curves())


def test_tokens_are_written_short(base, tmp_path):
    completion = make_completion([3, 4], logprob=-0.431)
    result = token_fields(completion, None, Tokenizer.from_folder(base))
    assert json.dumps(result["token_logprobs"]) == "[-0.431, -0.431]"
    assert list(result) == ["token_texts", "token_logprobs"]


# --- sinks ---------------------------------------------------------------------------------------


class Recorder(Sink):
    def __init__(self):
        self.rows = {}
        self.groups = []

    def on_row(self, step, values):
        self.rows[step] = values

    def on_rollouts(self, step, collected):
        self.groups += collected.groups


def test_a_tracker_receives_the_rows_and_groups_of_a_run(base, alone, tmp_path):
    recorder = Recorder()
    tracker: RunSink = recorder
    with open_run(make_quick_config(base, tmp_path, updates=1)) as run:
        run.files.sinks.append(tracker)
        run.step()
    (row,) = read_rows(tmp_path)
    assert row.items() <= (recorder.rows[1] | {"step": 1}).items()
    assert len(recorder.groups) == row["trained_groups"] > 0


# --- curves --------------------------------------------------------------------------------------

CURVES = {curve.title: curve for curve in read_curves()}


def draw(rows: list[dict], title: str):
    """Return the axis of a chart, laid out."""
    figure = Figure(layout="constrained")
    axis = figure.subplots()
    draw_panel(axis, CURVES[title], rows)
    figure.draw_without_rendering()
    return axis


@pytest.mark.parametrize("title", PICTURE)
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
    plot_run(rows, tmp_path / "curves.png", "$x_{</b>$" + "long/" * 99)
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
