"""The report of one run or several: one HTML file that needs nothing else, not even a network.

Whatever a model, a data file or a folder's name says reaches the page as JSON and is shown as text,
never as markup; the page's policy lets no script run but the two that it was written with.
"""

import base64
import hashlib
import html
import importlib.resources
import itertools
import json
import math
import string
from collections.abc import Sequence
from typing import Any

import numpy as np
from rich.markup import escape

from dapo_jax.config.experiment import ReportConfig
from dapo_jax.config.user_code import describe_error
from dapo_jax.reporting.alerts import alerts_of_run
from dapo_jax.reporting.console import Progress
from dapo_jax.reporting.page.comparison import (
    Experiment,
    apart,
    experiments,
    from_defaults,
    from_preset,
    headlines,
    spent,
)
from dapo_jax.reporting.page.curves import CURVES
from dapo_jax.reporting.page.recorded_run import (
    FILES_READ,
    SHOWN_CHARACTERS,
    Recorded,
    read_run,
    sample_groups,
    spread_out,
)
from dapo_jax.runtime.settings import require
from dapo_jax.runtime.storage.ownership import Folder

PAGE = "report.html"
MARK = '<meta name="generator" content="dapo-jax report">'
MOST_POINTS, FEWEST_POINTS = 1024, 16
DIGITS = 5  # significant ones of a point


def as_json(value: Any) -> str:
    """JSON that may stand inside a script element: ASCII, and nothing in it opens or ends one."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def finite(value: Any) -> Any:
    """The same without numbers that JSON lacks, which files of Python may hold."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {str(name): finite(one) for name, one in value.items()}
    return [finite(one) for one in value] if isinstance(value, list | tuple) else value


def _round(values: np.ndarray) -> list[float | None]:
    return [float(f"{x:.{DIGITS}g}") if np.isfinite(x) else None for x in values.tolist()]


def _table(experiment: Experiment, name: str, steps: list[int]) -> np.ndarray:
    """[runs, steps] of a metric; NaN where a run has none."""
    found = np.full((len(experiment.runs), len(steps)), np.nan)
    place = {step: i for i, step in enumerate(steps)}
    for run, line in zip(experiment.runs, found, strict=True):
        for row in run.rows:
            if isinstance(row.get(name), int | float):
                line[place[row["step"]]] = row[name]
    return found


def _mean(table: np.ndarray) -> np.ndarray:
    """Over the runs that say anything."""
    counts = np.isfinite(table).sum(0)
    return np.where(counts, np.nansum(table, 0) / np.maximum(counts, 1), np.nan)


def curves_of(experiment: Experiment, points: int) -> dict[str, Any]:
    """Every charted metric over steps, minutes and tokens: mean, and the range over seeds."""
    steps = sorted({row["step"] for run in experiment.runs for row in run.rows})
    shown = spread_out(len(steps), points)
    seconds = np.nan_to_num(_mean(_table(experiment, "seconds_step", steps)))
    speed = _mean(_table(experiment, "sampled_tokens_per_second", steps))
    rollout = _mean(_table(experiment, "seconds_rollout", steps))
    axes = {"minutes": seconds.cumsum() / 60, "tokens": np.nan_to_num(speed * rollout).cumsum()}
    lines: dict[str, Any] = {}
    for name in (metric for curve in CURVES for metric in curve.metrics):
        table = _table(experiment, name, steps)
        if not np.isfinite(table).any():
            continue
        # What is measured now and then keeps every point that it has.
        there = np.flatnonzero(np.isfinite(table).any(0))
        if len(there) > points:
            there = np.intersect1d(there, shown)
        part = table[:, there]
        lines[name] = {"at": there.tolist(), "mean": _round(_mean(part))}
        if len(experiment.runs) > 1:
            lines[name] |= {"low": _round(np.nanmin(part, 0)), "high": _round(np.nanmax(part, 0))}
    used = sorted({place for line in lines.values() for place in line["at"]} | set(shown))
    number = {place: i for i, place in enumerate(used)}
    for line in lines.values():
        line["at"] = [number[place] for place in line["at"]]
    x = {"step": [steps[i] for i in used]}
    x |= {name: _round(axis[used]) for name, axis in axes.items()}
    return {"x": x, "lines": lines, "steps": len(steps), "points": len(shown)}


def describe(experiment: Experiment, preset: str) -> dict[str, Any]:
    """What the page says of an experiment beside its curves. Raises `ConfigError` (the preset)."""
    nearest, changed = from_preset(experiment.settings, preset)
    planned = experiment.settings.get("total_steps", 0)
    return {
        "name": experiment.name,
        "runs": [
            {"name": r.name, "warnings": alerts_of_run(r.rows, planned)} for r in experiment.runs
        ],
        "headlines": headlines(experiment),
        "spent": spent(experiment),
        "preset": nearest,
        "fromPreset": changed,
        "fromDefaults": from_defaults(experiment.settings),
        "settings": sorted(experiment.settings.items()),
    }


def _fill(groups: Sequence[Any], room: int) -> tuple[list[dict[str, Any]], int]:
    """Of each run in turn, the groups that fit into so many bytes; and how many there were."""
    taken: list[dict[str, Any]] = []
    count = 0
    for number_and_group in itertools.chain(*itertools.zip_longest(*groups)):
        if number_and_group is None:
            continue
        count += 1
        size = len(as_json(number_and_group)) + 1
        if size <= room:
            taken.append(number_and_group)
            room -= size
    return sorted(taken, key=lambda group: (group["run"], group["step"])), count


def _sample(found: list[Experiment], room: int) -> tuple[list[dict[str, Any]], str]:
    """Rollouts that fit, and the sentence that says what they are a sample of."""
    runs = [run for experiment in found for run in experiment.runs]

    def of_run(number: int, run: Recorded) -> Any:
        return (finite(group) | {"run": number} for group in sample_groups(run))

    taken, count = _fill([of_run(number, run) for number, run in enumerate(runs)], room)
    left_out = f", {count - len(taken)} more did not fit" * (len(taken) < count)
    return taken, (
        f"{len(taken)} groups from at most {FILES_READ} evenly spaced steps of each run{left_out}. "
        f"Texts above {SHOWN_CHARACTERS:,} characters are cut in the middle. All of them lie in "
        "rollouts/ of the run's folder."
    )


def asset(name: str) -> str:
    """A file beside this one."""
    return (importlib.resources.files("dapo_jax.reporting.page") / name).read_text(encoding="utf-8")


def plotting_code() -> str:
    """The plotting library as one script."""
    from plotly.offline import get_plotlyjs

    return get_plotlyjs()


def _hash(script: str) -> str:
    return "'sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() + "'"


def page(runs: Sequence[Recorded], settings: ReportConfig) -> str:
    """The whole page, as large as the settings allow.

    Raises:
        ConfigError: there is no such preset, or no room even for the fewest points.
    """
    found = experiments(runs)
    data: dict[str, Any] = {
        "experiments": [describe(one, settings.preset) for one in found],
        "apart": apart(found),
        "curves": [curve._asdict() for curve in CURVES],
    }
    plotly, code = plotting_code(), asset("page.js")
    names = ", ".join(one.name for one in found)
    # As the page is parsed, so are its scripts hashed: with one kind of line end.
    plotly, code = (text.replace("\r\n", "\n") for text in (plotly, code))
    parts = {
        "title": html.escape(f"Report: {names}"),
        "heading": html.escape(names),
        "mark": MARK,
        "style": asset("page.css"),
        "hashes": f"{_hash(plotly)} {_hash(code)}",
        "plotly": plotly,
        "code": code,
    }
    room = int(settings.max_mb * 1e6) - sum(len(text.encode()) for text in parts.values()) - 10_000
    points = MOST_POINTS
    while True:
        for one, said in zip(found, data["experiments"], strict=True):
            said["curves"] = curves_of(one, points)
        size = len(as_json(finite(data)))
        if size <= room / 2 or size <= room and points == FEWEST_POINTS:
            break
        needed = f"at least {settings.max_mb + (size - room) / 1e6:.1f}"
        require(points > FEWEST_POINTS, "max_mb", settings.max_mb, needed)
        points = max(FEWEST_POINTS, points // 2)
    rollouts, data["sample"] = _sample(found, room - size)
    template = string.Template(asset("page.html"))
    return template.substitute(parts, data=as_json(finite(data)), rollouts=as_json(rollouts))


def write_page(path: Folder, text: str) -> None:
    """The file, complete or absent."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


def write_own_page(folder: Folder, progress: Progress) -> None:
    """Writes a run's own page into its folder, or warns that it can't.

    A run that has learned for days must not fail at a picture of itself.
    """
    try:
        with progress.working(f"writing {PAGE}"):
            write_page(folder / PAGE, page([read_run(str(folder))], ReportConfig()))
    except Exception as error:  # whatever is wrong with files, disk or library
        progress.warn(f"{PAGE} was not written: {escape(describe_error(error))}")
