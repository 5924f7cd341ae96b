"""Report of one run or several: one HTML file that needs nothing else, not even a network.

Texts from models, data files and folder names are embedded as JSON and shown as text, never as
markup. The content security policy allows only the two scripts of the page.
"""

import base64
import hashlib
import itertools
import json
from collections.abc import Iterator, Sequence
from typing import Any

import jinja2
import numpy as np
from rich.markup import escape

from dapo_jax.config.experiment import ReportConfig
from dapo_jax.config.user_code import describe_error
from dapo_jax.reporting.alerts import check_run
from dapo_jax.reporting.console import Progress
from dapo_jax.reporting.page.comparison import (
    Experiment,
    differences,
    differing_settings,
    experiments,
    from_defaults,
    from_preset,
    headlines,
    spent,
)
from dapo_jax.reporting.page.curves import Curve, asset, read_curves, value_at
from dapo_jax.reporting.page.recorded_run import (
    MAX_FILES,
    SHOWN_CHARACTERS,
    RecordedRun,
    read_run,
    sample_groups,
    spread_out,
)
from dapo_jax.runtime.settings import require
from dapo_jax.runtime.storage.paths import Folder
from dapo_jax.runtime.storage.retries import write_text

PAGE = "report.html"
MARK = '<meta name="generator" content="dapo-jax report">'
MAX_POINTS = 1024  # of a curve
MIN_POINTS = 16
DIGITS = 5  # significant digits of a point
NAMED = 3  # experiments in the heading
TABLE_ROWS = 11  # of a curve in numbers
RESERVED_BYTES = 10_000
SPENT = (
    (
        "seconds",
        "Time",
        "Over all runs of an experiment. Time that a lag hides behind an update is included.",
    ),
    ("tokens", "Tokens", "Sampled tokens of all runs: trained on, or paid for and lost."),
)

Group = dict[str, Any]  # as `sample_groups` yields it


def as_json(value: Any) -> str:
    """Return JSON for a script element: ASCII without tags; null for NaN and infinity."""
    finite = json.loads(json.dumps(value), parse_constant=lambda constant: None)
    text = json.dumps(finite, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _round(values: np.ndarray) -> list[float | None]:
    return [float(f"{x:.{DIGITS}g}") if np.isfinite(x) else None for x in values.tolist()]


def _table(experiment: Experiment, name: str, steps: list[int]) -> np.ndarray:
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


def curves_of(experiment: Experiment, points: int) -> dict[str, Any]:
    """Return the charted metrics over steps, minutes and tokens: mean, and range over seeds.

    Args:
        points: maximum number of points of a curve.
    """
    steps = sorted({row["step"] for run in experiment.runs for row in run.rows})
    shown = spread_out(len(steps), points)
    lines: dict[str, Any] = {}
    for name in (metric for curve in read_curves() for metric in curve.metrics):
        table = _table(experiment, name, steps)
        if not np.isfinite(table).any():
            continue
        # Evaluations are rare, so all their points are shown; elsewhere a missing value is a gap.
        is_measured = np.isfinite(table).any(0) | (not name.startswith("heldout_"))
        at = np.flatnonzero(is_measured)
        if len(at) > points:
            at = np.intersect1d(at, shown)
        part = table[:, at]
        lines[name] = {"at": at.tolist(), "mean": _round(_mean(part))}
        if len(experiment.runs) > 1:
            lines[name]["low"] = _round(np.fmin.reduce(part))
            lines[name]["high"] = _round(np.fmax.reduce(part))
    used = sorted({place for line in lines.values() for place in line["at"]} | set(shown))
    number = {place: i for i, place in enumerate(used)}
    for line in lines.values():
        line["at"] = [number[place] for place in line["at"]]
    seconds = np.nan_to_num(_mean(_table(experiment, "seconds_step", steps)))
    speed = _mean(_table(experiment, "sampled_tokens_per_second", steps))
    rollout = _mean(_table(experiment, "seconds_rollout", steps))
    x = {
        "step": [steps[i] for i in used],
        "minutes": _round((seconds.cumsum() / 60)[used]),
        "tokens": _round(np.nan_to_num(speed * rollout).cumsum()[used]),
    }
    return {"x": x, "lines": lines, "steps": len(steps), "points": len(shown)}


def describe(experiment: Experiment, first: Experiment, preset: str) -> dict[str, Any]:
    """Return the texts and numbers of an experiment, compared with the first experiment.

    Raises:
        ConfigError: there is no such preset.
    """
    nearest, changed = from_preset(experiment.settings, preset)
    planned = experiment.settings.get("total_steps", 0)
    return {
        "name": experiment.name,
        "runs": [
            {"name": run.name, "warnings": check_run(run.rows, planned, run.settings)}
            for run in experiment.runs
        ],
        "headlines": headlines(experiment),
        "differences": differences(experiment, first) if experiment is not first else {},
        "spent": spent(experiment),
        "preset": nearest,
        "from_preset": changed,
        "from_defaults": from_defaults(experiment.settings),
        "settings": sorted(experiment.settings.items()),
    }


def _cards(described: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the charts that have a value: their plots as lists of metrics, and some numbers."""
    for number, curve in enumerate(read_curves()):
        metrics = [
            metric
            for metric in curve.metrics
            if any(metric in experiment["curves"]["lines"] for experiment in described)
        ]
        if metrics:
            # A comparison has a plot per metric, with a line per experiment.
            plots = [[metric] for metric in metrics] if len(described) > 1 else [metrics]
            numbers = [line for metric in metrics for line in _numbers(described, curve, metric)]
            yield {"number": number, "curve": curve, "plots": plots, "numbers": numbers}


def _numbers(described: list[dict[str, Any]], curve: Curve, metric: str) -> Iterator[list[str]]:
    """Yield [line, step, mean, range over seeds] at some steps of a metric."""
    for experiment in described:
        line = experiment["curves"]["lines"].get(metric)
        if line is None:
            continue
        prefix = f"{experiment['name']}: " if len(described) > 1 else ""
        for i in spread_out(len(line["at"]), TABLE_ROWS):
            step = experiment["curves"]["x"]["step"][line["at"][i]]
            bounds = [line[end][i] for end in ("low", "high") if end in line]
            row = [prefix + curve.metrics[metric], str(step), show_number(line["mean"][i])]
            yield [*row, show_interval([None, *bounds]) if bounds else ""]


def _spent_parts(described: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the tables of seconds and tokens by their use."""
    for unit, title, note in SPENT:
        tables = [experiment["spent"][unit] for experiment in described]
        kinds = list(dict.fromkeys(kind for table in tables for kind in table))
        cells = [[_with_share(table, kind) for kind in kinds] for table in tables]
        heads = ["used for", unit]
        rows = [list(row) for row in zip(kinds, cells[0], strict=True)]
        if len(described) > 1:
            heads = ["run", *kinds]
            rows = [[run["name"], *row] for run, row in zip(described, cells, strict=True)]
        if kinds:
            yield {"unit": unit, "title": title, "note": note, "heads": heads, "rows": rows}


def _with_share(table: dict[str, float], kind: str) -> str:
    if kind not in table:
        return "–"
    return f"{show_number(table[kind])} ({show_number(table[kind] / sum(table.values()), 'share')})"


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


def show_interval(interval: Sequence[float | None], form: str = "number") -> str:
    """Return the bounds of [mean, low, high] as text; empty if there are none."""
    _, low, high = interval
    return "" if low is None else f"{show_number(low, form)} to {show_number(high, form)}"


def _sample(shown: list[Experiment], capacity: int) -> tuple[list[Group], str]:
    """Return rollouts that fit into `capacity` bytes, and a sentence about the sample."""
    runs = [run for experiment in shown for run in experiment.runs]
    samples = [list(sample_groups(run)) for run in runs]
    taken: list[Group] = []
    for turn in itertools.zip_longest(*samples):
        for number, group in enumerate(turn):
            if group is None:
                continue
            group["run"] = number
            size = len(as_json(group)) + 1
            if size <= capacity:
                taken.append(group)
                capacity -= size
    missing = sum(map(len, samples)) - len(taken)
    left_out = f", {missing} more did not fit" * (missing > 0)
    return sorted(taken, key=lambda group: (group["run"], group["step"])), (
        f"{len(taken)} groups from at most {MAX_FILES} evenly spaced steps of each run{left_out}. "
        f"Texts above {SHOWN_CHARACTERS:,} characters are cut in the middle. All groups are in "
        "rollouts/ of the run's folder."
    )


def _hash(script: str) -> str:
    return "'sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() + "'"


def page(runs: Sequence[RecordedRun], settings: ReportConfig) -> str:
    """Return the HTML of the report, as detailed as `max_mb` of the settings allows.

    Raises:
        ConfigError: there is no such preset, or the fewest points exceed `max_mb`.
    """
    shown = experiments(runs)
    described = [describe(experiment, shown[0], settings.preset) for experiment in shown]
    static = _static_parts(shown, described)
    points = MAX_POINTS
    while True:
        for experiment, description in zip(shown, described, strict=True):
            description["curves"] = curves_of(experiment, points)
        static["cards"] = list(_cards(described))
        data = as_json(_script_data(described))
        frame = _render(static, data="", rollouts="", sample="", has_rollouts=True)
        capacity = int(settings.max_mb * 1e6) - len(frame.encode()) - RESERVED_BYTES
        if len(data) <= capacity / 2 or len(data) <= capacity and points == MIN_POINTS:
            break
        needed = f"at least {settings.max_mb + (len(data) - capacity) / 1e6:.1f}"
        require(points > MIN_POINTS, "max_mb", settings.max_mb, needed)
        points = max(MIN_POINTS, points // 2)
    rollouts, sample = _sample(shown, capacity - len(data))
    sample = sample if rollouts else "No rollouts are stored (config.log.rollouts)."
    texts = {"data": data, "rollouts": as_json(rollouts), "sample": sample}
    return _render(static, **texts, has_rollouts=bool(rollouts))


def _script_data(described: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the data that the page's script draws."""
    return {
        "experiments": [
            {name: experiment[name] for name in ("name", "spent", "curves")}
            | {"runs": [run["name"] for run in experiment["runs"]]}
            for experiment in described
        ],
        "curves": [curve._asdict() for curve in read_curves()],
    }


def _static_parts(shown: list[Experiment], described: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the values of the template that do not depend on the detail of the curves."""
    from plotly.offline import get_plotlyjs

    names = ", ".join(experiment.name for experiment in shown[:NAMED])
    names += f" and {len(shown) - NAMED} more" if len(shown) > NAMED else ""
    # Browsers normalise line ends before they hash a script.
    plotly = get_plotlyjs().replace("\r\n", "\n")
    code = asset("page.js").replace("\r\n", "\n")
    runs = [run for experiment in described for run in experiment["runs"]]
    lines = [line for experiment in described for line in experiment["headlines"]]
    return {
        "heading": names,
        "mark": MARK,
        "style": asset("page.css"),
        "hashes": f"{_hash(plotly)} {_hash(code)}",
        "plotly": plotly,
        "code": code,
        "experiments": described,
        "headline_names": list(dict.fromkeys(line["name"] for line in lines)),
        "differing": differing_settings(shown),
        "spent": list(_spent_parts(described)),
        "warnings": [
            f"{run['name']}: {text}" if len(runs) > 1 else text
            for run in runs
            for text in run["warnings"]
        ],
    }


def _render(static: dict[str, Any], **values: Any) -> str:
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {
        "number": show_number,
        "interval": show_interval,
        "setting": lambda value: "missing" if value is None else json.dumps(value),
    }
    return environment.from_string(asset("page.html")).render(static, **values)


def write_own_page(folder: Folder, progress: Progress) -> None:
    """Write `report.html` into the folder of a run; warn if that fails.

    A long run must not fail at its report.
    """
    try:
        with progress.working(f"writing {PAGE}"):
            write_text(folder / PAGE, page([read_run(str(folder))], ReportConfig()))
    except Exception as error:  # of files, disk or a library
        progress.warn(f"{PAGE} was not written: {escape(describe_error(error))}")
