"""Report of one run or several: an HTML page that needs no network.

The plotting library is part of the page. Texts from models, data files and folder names are
embedded as JSON and shown as text, never as markup. The content security policy allows these two
scripts.
"""

import base64
import hashlib
import importlib.util
import json
from collections.abc import Iterator, Sequence
from typing import Any

import jinja2
import numpy as np
from rich.markup import escape

from dapo_jax.config.experiment import ReportConfig
from dapo_jax.config.user_code import describe_error
from dapo_jax.extras.alerts import check_run, reward_leads
from dapo_jax.extras.report import comparison, recorded_run
from dapo_jax.extras.report.curves import asset, read_curves, value_at
from dapo_jax.reporting.console import Progress
from dapo_jax.runtime.storage.paths import Folder
from dapo_jax.runtime.storage.retries import write_text

PAGE = "report.html"
MARK = '<meta name="generator" content="dapo-jax report">'
MAX_POINTS = 1024  # of a curve
DIGITS = 5  # significant digits of a point
NAMED = 3  # experiments in the heading


def as_json(value: Any) -> str:
    """Return JSON for a script element: ASCII without tags; null for NaN and infinity."""
    finite = json.loads(json.dumps(value), parse_constant=lambda constant: None)
    text = json.dumps(finite, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


# --- curves ---------------------------------------------------------------------------------


def _round(values: np.ndarray) -> list[float | None]:
    return [float(f"{x:.{DIGITS}g}") if np.isfinite(x) else None for x in values.tolist()]


def _table(experiment: comparison.Experiment, name: str, steps: list[int]) -> np.ndarray:
    """Return the values of a metric, [runs, steps]; NaN if a run has none."""
    values = np.full((len(experiment.runs), len(steps)), np.nan)
    place = {step: i for i, step in enumerate(steps)}
    for run, line in zip(experiment.runs, values, strict=True):
        for row in run.rows:
            line[place[row["step"]]] = value_at(row, name)
    return values


def _mean(table: np.ndarray) -> np.ndarray:
    """Return the mean over the runs that have a value, [steps]."""
    counts = np.isfinite(table).sum(0)
    return np.where(counts, np.nansum(table, 0) / np.maximum(counts, 1), np.nan)


def _curves_of(experiment: comparison.Experiment) -> dict[str, Any]:
    """Return the charted metrics over steps, minutes and tokens: mean, and range over seeds.

    At most a quarter of the points are those of evaluations.
    """
    steps = sorted({row["step"] for run in experiment.runs for row in run.rows})
    evaluated = np.flatnonzero(np.isfinite(_mean(_table(experiment, "heldout_accuracy", steps))))
    rare = evaluated[recorded_run.spread_out(len(evaluated), MAX_POINTS // 4)]
    even = recorded_run.spread_out(len(steps), MAX_POINTS - len(rare))
    places = np.union1d(even, rare).astype(int)
    lines: dict[str, Any] = {}
    for name in (metric for curve in read_curves() for metric in curve.metrics):
        table = _table(experiment, name, steps)[:, places]
        if np.isfinite(table).any():
            lines[name] = {"mean": _round(_mean(table))}
            if len(experiment.runs) > 1:
                lines[name]["low"] = _round(np.fmin.reduce(table))
                lines[name]["high"] = _round(np.fmax.reduce(table))
    seconds, speed, rollout = (
        np.nan_to_num(_mean(_table(experiment, name, steps)))
        for name in ("seconds_step", "sampled_tokens_per_second", "seconds_rollout")
    )
    x = {
        "step": [steps[i] for i in places],
        "minutes": _round((seconds.cumsum() / 60)[places]),
        "tokens": _round((speed * rollout).cumsum()[places]),
    }
    return {"x": x, "lines": lines, "steps": len(steps), "points": len(places)}


def _cards(described: list[dict[str, Any]], leads: bool) -> Iterator[dict[str, Any]]:
    """Yield the charts that have a value, with their plots as lists of metrics.

    Args:
        leads: True if the reward leads: charts of correctness come last.
    """
    charts = sorted(enumerate(read_curves()), key=lambda chart: leads and chart[1].of_correctness)
    for number, curve in charts:
        lines = [experiment["curves"]["lines"] for experiment in described]
        metrics = [name for name in curve.metrics if any(name in known for known in lines)]
        # A comparison has a plot per metric, with a line per experiment.
        plots = [[metric] for metric in metrics] if len(described) > 1 else [metrics]
        if metrics:
            yield {"number": number, "curve": curve, "plots": plots}


# --- texts ----------------------------------------------------------------------------------


def show_number(value: float | None, form: str = "number") -> str:
    """Return a number as text; form: "number", "share" as percent, or "points" of percent."""
    if value is None:
        return "–"
    if form == "share":
        return f"{100 * value:.1f}\u00a0%"
    if form == "points":
        return f"{100 * value:.1f}"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.1e}" if 0 < abs(value) < 1e-4 else f"{value:.3g}"


def _show_interval(interval: Sequence[float | None], form: str = "number") -> str:
    """Return the bounds of [mean, low, high] as text; empty if there are none."""
    low, high = interval[1:]
    return "" if low is None else f"{show_number(low, form)} to {show_number(high, form)}"


# --- the page -------------------------------------------------------------------------------


def _sample(shown: list[comparison.Experiment]) -> tuple[list[dict[str, Any]], str]:
    """Return groups of the rollouts, fewer of each run if there are several, and a text on them."""
    runs = [run for experiment in shown for run in experiment.runs]
    files = max(1, recorded_run.MAX_FILES // len(runs))
    groups = [
        group | {"run": number}
        for number, run in enumerate(runs)
        for step in recorded_run.sample_groups(run, files)
        for group in step
    ]
    if not groups:
        return [], "No rollouts are stored (config.log.rollouts)."
    return groups, (
        f"{len(groups)} groups from at most {files} evenly spaced steps of each run. Texts above "
        f"{recorded_run.SHOWN_CHARACTERS:,} characters are cut in the middle. All groups are in "
        "rollouts/ of the run's folder."
    )


def _describe(
    experiment: comparison.Experiment, first: comparison.Experiment, preset: str
) -> dict[str, Any]:
    """Return the texts and numbers of an experiment, compared with the first experiment."""
    nearest, changed = comparison.from_preset(experiment.settings, preset)
    return {
        "name": experiment.name,
        "runs": [run.name for run in experiment.runs],
        "headlines": comparison.headlines(experiment),
        "differences": comparison.differences(experiment, first) if experiment is not first else {},
        "preset": nearest,
        "from_preset": changed,
        "from_defaults": comparison.from_defaults(experiment.settings),
        "settings": sorted(experiment.settings.items()),
        "curves": _curves_of(experiment),
    }


def _hash(script: str) -> str:
    return "'sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() + "'"


def _plotly() -> str:
    """Return the text of the plotting library; empty if it is not installed."""
    if not importlib.util.find_spec("plotly"):
        return ""
    from plotly.offline import get_plotlyjs

    return get_plotlyjs().replace("\r\n", "\n")  # browsers normalise it before they hash it


def _values(shown: list[comparison.Experiment], described: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the values of the template except the data."""
    names = ", ".join(experiment.name for experiment in shown[:NAMED])
    names += f" and {len(shown) - NAMED} more" if len(shown) > NAMED else ""
    plotly, code = _plotly(), asset("page.js").replace("\r\n", "\n")
    runs = [run for experiment in shown for run in experiment.runs]
    lines = [line for experiment in described for line in experiment["headlines"]]
    return {
        "heading": names,
        "mark": MARK,
        "style": asset("page.css"),
        "allowed": f"{_hash(plotly)} {_hash(code)}",
        "plotly": plotly,
        "code": code,
        "experiments": described,
        "headline_names": list(dict.fromkeys(line["name"] for line in lines)),
        "differing": comparison.differing_settings(shown),
        "warnings": [
            f"{run.name}: {text}" if len(runs) > 1 else text
            for run in runs
            for text in check_run(run.rows, run.settings.get("total_steps", 0), run.settings)
        ],
    }


def _render(values: dict[str, Any]) -> str:
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {
        "number": show_number,
        "interval": _show_interval,
        "setting": lambda value: "missing" if value is None else json.dumps(value),
    }
    return environment.from_string(asset("page.html")).render(values)


def page(runs: Sequence[recorded_run.RecordedRun], settings: ReportConfig) -> str:
    """Return the HTML of the report. Raises `ConfigError` if there is no such preset."""
    shown = comparison.experiments(runs)
    described = [_describe(experiment, shown[0], settings.preset) for experiment in shown]
    leads = all(reward_leads(experiment.settings) for experiment in shown)
    values = _values(shown, described)
    groups, sample = _sample(shown)
    data = {
        "experiments": [
            {name: experiment[name] for name in ("name", "runs", "curves")}
            for experiment in described
        ],
        "curves": [curve._asdict() for curve in read_curves()],
        "reward_leads": leads,
    }
    values |= {"cards": list(_cards(described, leads)), "data": as_json(data)}
    return _render(values | {"rollouts": as_json(groups), "sample": sample})


def write_own_page(folder: Folder, progress: Progress) -> None:
    """Write `report.html` into the folder of a run; warn if that fails.

    A long run must not fail at its report.
    """
    try:
        with progress.working(f"writing {PAGE}"):
            text = page([recorded_run.read_run(str(folder))], ReportConfig())
            write_text(folder / PAGE, text)
    except Exception as error:  # of files, disk or a library
        progress.warn(f"{PAGE} was not written: {escape(describe_error(error))}")
