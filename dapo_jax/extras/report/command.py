"""Show a run, or several, as one page that needs no network.

    dapo-jax report runs/arithmetic_dapo
    dapo-jax report runs/a 'runs/dapo_seed*' --out=compared.html

Curves of several runs lie over each other, a line per run. A run may still be in progress.
"""

import glob
import pathlib

from dapo_jax.config.settings import Section, setting
from dapo_jax.run import command_line
from dapo_jax.runtime.storage.files import folder_at, write_text
from dapo_jax.types.errors import require

MARK = b'<meta name="generator" content="dapo-jax report">'


class ReportConfig(Section):
    """One page that shows runs (`dapo-jax report`)."""

    run: str = setting("", "The run_dir of a run, or a glob of several; may be repeated.")
    out: str = setting("report.html", "The page to write; an earlier report is replaced.")


def report(config: ReportConfig) -> None:
    """Write the page. Raises `ConfigError` if a run can't be read or the page can't be written."""
    from dapo_jax.extras.report.page import page
    from dapo_jax.extras.report.recorded_run import read_run

    path = pathlib.Path(config.out)
    fits = path.suffix == ".html" and path.parent.is_dir()
    if fits and path.exists():
        fits = path.is_file() and MARK in path.read_bytes()[:1000]
    allowed = "a new .html file in a folder that exists, or an earlier report"
    require(fits, "out", config.out, allowed)
    names = [glob.glob(name) or [name] for name in config.run.splitlines()]
    folders = dict.fromkeys(str(folder_at(name)) for group in names for name in sorted(group))
    require(bool(folders), "run", config.run, "the folder of a run: --run=FOLDER")
    text = page([read_run(folder) for folder in folders])
    try:
        write_text(path, text)
    except OSError as error:
        require(False, "out", config.out, f"a file that can be written; {error}")
    print(f"runs: {len(folders)}; {len(text) / 1e6:.1f} MB written to {path}")


def main() -> int:
    """Run the command. Exit code 0: done; 2: wrong settings."""
    name = "dapo-jax report"
    return command_line.run(ReportConfig, __doc__, report, several=["run"], single_process=name)
