"""Report of one run or several: one HTML page without a script, which needs no network.

Texts from models, data files and folder names are escaped, and the content security policy of the
page allows nothing but its own style: what they say is never run.
"""

import importlib.resources
import json
import tomllib
from collections.abc import Iterator, Sequence
from typing import Any

import jinja2
from rich.markup import escape

from dapo_jax.config.experiment import Config
from dapo_jax.config.settings import leaves
from dapo_jax.extras.alerts import LAST, check_run, finite_values
from dapo_jax.extras.report.curves import draw, show_number
from dapo_jax.extras.report.recorded_run import RecordedRun, read_run, sample_groups
from dapo_jax.run.console import Progress
from dapo_jax.run.scores import reward_leads
from dapo_jax.runtime.storage.files import Folder, write_text
from dapo_jax.runtime.user_code import describe_error

PAGE = "report.html"
MAX_STEPS = 12  # of all runs, whose rollouts are shown
HEADLINES = "heldout_accuracy accuracy heldout_reward reward entropy response_tokens_mean"
Runs = Sequence[RecordedRun]


def headline(run: RecordedRun, metric: str) -> str:
    """Return the last mean of a metric, or the first and the last score; "" without a value."""
    rows = [row for row in run.rows if finite_values([row], metric).size]
    if rows and not metric.startswith("heldout_"):
        return show_number(float(finite_values(rows, metric)[-LAST:].mean()))

    def show(row: dict[str, Any]) -> str:
        low, high = (show_number(row.get(f"{metric}_{end}")) for end in ("low", "high"))
        return f"{show_number(row[metric])} ({low} to {high})"

    return " → ".join(map(show, rows[:1] + rows[1:][-1:]))


def charts() -> list[dict[str, Any]]:
    """Return the charts of the page, in order."""
    table = importlib.resources.files("dapo_jax.extras.report") / "page.charts.toml"
    return tomllib.loads(table.read_text("utf-8"))["chart"]


def cards(runs: Runs, leads: bool) -> Iterator[tuple[dict[str, Any], list[tuple[str, Any]]]]:
    """Yield charts and titled plots: a line per metric, or of several runs a plot per metric."""
    for chart in sorted(charts(), key=lambda chart: leads and "of_correctness" in chart):
        names = chart["metrics"].items()
        plots = [("", [(words, run.rows, name) for name, words in names]) for run in runs]
        if len(runs) > 1:
            plots = [(words, [(run.name, run.rows, name) for run in runs]) for name, words in names]
        drawn = [(title, plot) for title, lines in plots if (plot := draw(lines, chart["span"]))]
        if drawn:
            yield chart, drawn


def changed_settings(runs: Runs) -> Iterator[list[str]]:
    """Yield name, default and value in each run of settings that are not the default."""
    defaults = {name: value for name, _, value in leaves(Config())}
    for name in dict.fromkeys(name for run in runs for name in run.settings):
        default, *values = defaults.get(name), *(run.settings.get(name) for run in runs)
        if any(value != default for value in values):
            yield [name, *("" if x is None else json.dumps(x) for x in (default, *values))]


def page(runs: Runs) -> str:
    """Return the HTML of the report."""
    if len({run.name for run in runs}) < len(runs):
        runs = [run._replace(name=str(run.folder)) for run in runs]
    leads = all(reward_leads(run.settings) for run in runs)
    metrics = sorted(HEADLINES.split(), key=lambda metric: leads and "accuracy" in metric)
    numbers = ([metric, *(headline(run, metric) for run in runs)] for metric in metrics)
    loader = jinja2.PackageLoader("dapo_jax.extras", "report")
    environment = jinja2.Environment(loader=loader, autoescape=True, trim_blocks=True)
    environment.filters["number"] = show_number
    most = max(1, MAX_STEPS // len(runs))
    text = environment.get_template("page.html").render(
        names=[run.name for run in runs],
        headlines=[line for line in numbers if any(line[1:])],
        alerts=[(run.name, text) for run in runs for text in check_run(run.rows, run.settings)],
        cards=list(cards(runs, leads)),
        groups=[(run.name, group) for run in runs for group in sample_groups(run, most)],
        most=most,
        last=LAST,
        is_graded=not leads,
        settings=list(changed_settings(runs)),
    )
    return text.encode(errors="replace").decode()  # a text can hold half of a surrogate pair


def write_own_page(folder: Folder, progress: Progress) -> None:
    """Write the page into the folder of a run; only warn if that fails: the run is done."""
    try:
        with progress.working(f"writing {PAGE}"):
            write_text(folder / PAGE, page([read_run(str(folder))]))
    except Exception as error:  # of files, disk or a library
        progress.warn(f"{PAGE} was not written: {escape(describe_error(error))}")
