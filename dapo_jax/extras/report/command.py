"""Show a run, or several side by side, as one page that needs no network.

    dapo-jax report runs/arithmetic_dapo
    dapo-jax report runs/a runs/b --out=compared.html
    dapo-jax report 'runs/dapo_seed*' runs/grpo

Runs that differ only in their seed are one experiment, shown as a curve with a band. A run may
still be in progress.
"""

import glob
import pathlib
from typing import TYPE_CHECKING

from dapo_jax.commands import command_line
from dapo_jax.config.experiment import ReportConfig
from dapo_jax.runtime.settings import require

if TYPE_CHECKING:
    from dapo_jax.extras.report.recorded_run import RecordedRun

MARK_CHARACTERS = 1000  # a page has its mark in its first characters


def read_runs(config: ReportConfig) -> "list[RecordedRun]":
    """Return the named runs, each once, in order. Raises `ConfigError`."""
    from dapo_jax.extras.report.recorded_run import read_run
    from dapo_jax.runtime.storage.paths import is_remote

    runs: dict[str, RecordedRun] = {}
    for name in config.run.splitlines():
        matches = sorted(glob.glob(name)) if glob.has_magic(name) and not is_remote(name) else []
        for folder in matches or [name]:
            key = folder if is_remote(folder) else str(pathlib.Path(folder).resolve())
            if key not in runs:
                runs[key] = read_run(folder)
    require(bool(runs), "run", config.run, "the folder of a run: --run=FOLDER")
    return list(runs.values())


def check_out(out: str) -> pathlib.Path:
    """Return the path of the page. Raises `ConfigError` if it can't be or must not be written."""
    from dapo_jax.extras.report.page import MARK

    allowed = "a new .html file in a folder that exists, or an earlier report"
    path = pathlib.Path(out)
    try:
        require(path.suffix == ".html" and path.parent.is_dir(), "out", out, allowed)
        if path.exists():
            with path.open(encoding="utf-8", errors="replace") as file:
                is_report = MARK in file.read(MARK_CHARACTERS)
            require(is_report, "out", out, f"{allowed}; this is another one")
    except OSError as error:
        require(False, "out", out, f"{allowed}; {error}")
    return path


def report(config: ReportConfig) -> None:
    """Write the page. Raises `ConfigError` if a run can't be read or the page can't be written."""
    from dapo_jax.extras.report.page import page
    from dapo_jax.runtime.storage.retries import write_text

    path = check_out(config.out)
    runs = read_runs(config)
    text = page(runs, config)
    try:
        write_text(path, text)
    except OSError as error:
        require(False, "out", config.out, f"a file that can be written; {error}")
    print(f"{len(runs)} run{'s' * (len(runs) > 1)}, {len(text) / 1e6:.1f} MB written to {path}")


def main() -> int:
    """Run the command. Exit code 0: done; 2: wrong settings."""
    name = "dapo-jax report"
    return command_line.run(ReportConfig, __doc__, report, several=["run"], single_process=name)
