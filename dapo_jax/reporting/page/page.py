"""Report of one run or several: one HTML file that needs nothing else, not even a network.

Text of a model, a data file or a folder's name reaches the page as JSON and is shown as text, never
as markup. The page's content security policy lets no script run but the two written with it.
"""

import base64
import hashlib
import html
import importlib.resources
import itertools
import json
import string
from collections.abc import Iterator, Sequence
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
    differences,
    experiments,
    from_defaults,
    from_preset,
    headlines,
    spent,
)
from dapo_jax.reporting.page.curves import CURVES, value_at
from dapo_jax.reporting.page.recorded_run import (
    FILES_READ,
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
MAX_POINTS, FEWEST_POINTS = 1024, 16
DIGITS = 5  # significant ones of a point
NAMED = 3  # experiments in the heading

Group = dict[str, Any]  # as `sample_groups` yields it


def as_json(value: Any) -> str:
    """JSON for a script element: ASCII that opens and ends no tag; null for NaN and infinity."""
    finite = json.loads(json.dumps(value), parse_constant=lambda constant: None)
    text = json.dumps(finite, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _round(values: np.ndarray) -> list[float | None]:
    return [float(f"{x:.{DIGITS}g}") if np.isfinite(x) else None for x in values.tolist()]


def _table(experiment: Experiment, name: str, steps: list[int]) -> np.ndarray:
    """Values of a metric, [runs, steps]; NaN where a run has none."""
    values = np.full((len(experiment.runs), len(steps)), np.nan)
    place = {step: i for i, step in enumerate(steps)}
    for run, line in zip(experiment.runs, values, strict=True):
        for row in run.rows:
            line[place[row["step"]]] = value_at(row, name)
    return values


def _mean(table: np.ndarray) -> np.ndarray:
    """Mean over the runs that have a value, [steps]."""
    counts = np.isfinite(table).sum(0)
    return np.where(counts, np.nansum(table, 0) / np.maximum(counts, 1), np.nan)


def curves_of(experiment: Experiment, points: int) -> dict[str, Any]:
    """Charted metrics over steps, minutes and tokens: mean, and range over seeds.

    Args:
        points: most steps that a curve is drawn at.
    """
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
        # Evaluations keep all their points; between other steps a missing value is a gap.
        measured = np.isfinite(table).any(0) | (not name.startswith("heldout_"))
        at = np.flatnonzero(measured)
        if len(at) > points:
            at = np.intersect1d(at, shown)
        part = table[:, at]
        lines[name] = {"at": at.tolist(), "mean": _round(_mean(part))}
        if len(experiment.runs) > 1:
            lines[name] |= {
                "low": _round(np.fmin.reduce(part)),
                "high": _round(np.fmax.reduce(part)),
            }
    used = sorted({place for line in lines.values() for place in line["at"]} | set(shown))
    number = {place: i for i, place in enumerate(used)}
    for line in lines.values():
        line["at"] = [number[place] for place in line["at"]]
    x = {"step": [steps[i] for i in used]}
    x |= {name: _round(axis[used]) for name, axis in axes.items()}
    return {"x": x, "lines": lines, "steps": len(steps), "points": len(shown)}


def describe(experiment: Experiment, first: Experiment, preset: str) -> dict[str, Any]:
    """Data of an experiment without its curves, compared with the first one's.

    Raises `ConfigError` for an unknown preset.
    """
    nearest, changed = from_preset(experiment.settings, preset)
    planned = experiment.settings.get("total_steps", 0)
    return {
        "name": experiment.name,
        "runs": [
            {"name": r.name, "warnings": alerts_of_run(r.rows, planned, r.settings)}
            for r in experiment.runs
        ],
        "headlines": headlines(experiment),
        "differences": differences(experiment, first) if experiment is not first else {},
        "spent": spent(experiment),
        "preset": nearest,
        "fromPreset": changed,
        "fromDefaults": from_defaults(experiment.settings),
        "settings": sorted(experiment.settings.items()),
    }


def _fill(groups: Sequence[Iterator[Group]], room: int) -> tuple[list[Group], int]:
    """Groups of each run in turn that fit into `room` bytes, and the number of all groups."""
    taken: list[Group] = []
    everything = [group for turn in itertools.zip_longest(*groups) for group in turn if group]
    for group in everything:
        size = len(as_json(group)) + 1
        if size <= room:
            taken.append(group)
            room -= size
    return sorted(taken, key=lambda group: (group["run"], group["step"])), len(everything)


def _sample(shown: list[Experiment], room: int) -> tuple[list[Group], str]:
    """Rollouts that fit into `room` bytes, and the sentence about the sample."""
    runs = [run for experiment in shown for run in experiment.runs]

    def of_run(number: int, run: RecordedRun) -> Iterator[Group]:
        return (group | {"run": number} for group in sample_groups(run))

    taken, count = _fill([of_run(number, run) for number, run in enumerate(runs)], room)
    left_out = f", {count - len(taken)} more did not fit" * (len(taken) < count)
    return taken, (
        f"{len(taken)} groups from at most {FILES_READ} evenly spaced steps of each run{left_out}. "
        f"Texts above {SHOWN_CHARACTERS:,} characters are cut in the middle. All of them lie in "
        "rollouts/ of the run's folder."
    )


def asset(name: str) -> str:
    """Text of a file beside this one."""
    return (importlib.resources.files("dapo_jax.reporting.page") / name).read_text(encoding="utf-8")


def own_script() -> str:
    """The page's own code. Functions of page.curves.js are there before page.js runs."""
    return asset("page.curves.js") + asset("page.js")


def _hash(script: str) -> str:
    return "'sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() + "'"


def page(runs: Sequence[RecordedRun], settings: ReportConfig) -> str:
    """HTML of the report, as detailed as `max_mb` of the settings allows.

    Raises:
        ConfigError: there is no such preset, or no room even for the fewest points.
    """
    from plotly.offline import get_plotlyjs

    shown = experiments(runs)
    data: dict[str, Any] = {
        "experiments": [describe(one, shown[0], settings.preset) for one in shown],
        "apart": apart(shown),
        "curves": [curve._asdict() for curve in CURVES],
    }
    names = ", ".join(experiment.name for experiment in shown[:NAMED])
    names += f" and {len(shown) - NAMED} more" if len(shown) > NAMED else ""
    # Browsers parse a page, and so hash its scripts, with one kind of line end.
    plotly, code = (text.replace("\r\n", "\n") for text in (get_plotlyjs(), own_script()))
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
    points = MAX_POINTS
    while True:
        for experiment, description in zip(shown, data["experiments"], strict=True):
            description["curves"] = curves_of(experiment, points)
        size = len(as_json(data))
        if size <= room / 2 or size <= room and points == FEWEST_POINTS:
            break
        needed = f"at least {settings.max_mb + (size - room) / 1e6:.1f}"
        require(points > FEWEST_POINTS, "max_mb", settings.max_mb, needed)
        points = max(FEWEST_POINTS, points // 2)
    rollouts, data["sample"] = _sample(shown, room - size)
    template = string.Template(asset("page.html"))
    return template.substitute(parts, data=as_json(data), rollouts=as_json(rollouts))


def write_own_page(folder: Folder, progress: Progress) -> None:
    """Writes `report.html` into the folder of a run; warns where it can't.

    A run that has learned for days must not fail at its report.
    """
    try:
        with progress.working(f"writing {PAGE}"):
            write_text(folder / PAGE, page([read_run(str(folder))], ReportConfig()))
    except Exception as error:  # whatever is wrong with files, disk or library
        progress.warn(f"{PAGE} was not written: {escape(describe_error(error))}")
