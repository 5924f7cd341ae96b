"""Show a run, or several, as one page that needs no network.

    dapo-jax report runs/arithmetic_dapo
    dapo-jax report runs/a 'runs/dapo_seed*' --out=compared.html
    dapo-jax report runs/a --share=a.json    # to send to others, on the run's machine

Curves of several runs lie over each other, a line per run. A run may still be in progress.
"""

import glob
import pathlib

from dapo_jax.config.settings import Section, setting
from dapo_jax.run import command_line
from dapo_jax.runtime.storage.files import folder_at
from dapo_jax.types.errors import require

MARK = b'<meta name="generator" content="dapo-jax report">'


class ReportConfig(Section):
    """One page that shows runs (`dapo-jax report`)."""

    run: str = setting("", "The run_dir of a run, or a glob of several; may be repeated.")
    out: str = setting("report.html", "The page to write; an earlier report is replaced.")
    share: str = setting("", "A new .json file instead, without texts, paths or names of yours.")


def output_path(config: ReportConfig) -> pathlib.Path:
    """Return the path to write. Raises `ConfigError` if it must not be written."""
    field, ending = ("share", ".json") if config.share else ("out", ".html")
    path = pathlib.Path(getattr(config, field))
    allowed = f"a new {ending} file in a folder that exists"
    require(path.suffix == ending and path.parent.is_dir(), field, str(path), allowed)
    if path.exists():
        is_ours = not config.share and path.is_file() and MARK in path.read_bytes()[:1000]
        require(is_ours, field, str(path), f"{allowed}; this one is not an earlier report")
    return path


def report(config: ReportConfig) -> None:
    """Write the page. Raises `ConfigError` if a run can't be read or the page can't be written."""
    from dapo_jax.extras.report.page import page
    from dapo_jax.extras.report.recorded_run import read_run
    from dapo_jax.extras.report.share import share
    from dapo_jax.runtime.storage.files import write_text

    path = output_path(config)
    names = [glob.glob(name) or [name] for name in config.run.splitlines()]
    folders = dict.fromkeys(str(folder_at(name)) for group in names for name in sorted(group))
    allowed = "the folder of a run: --run=FOLDER, one with --share"
    require(len(folders) == 1 or bool(folders) > bool(config.share), "run", config.run, allowed)
    runs = [read_run(folder) for folder in folders]
    text = share(runs[0]) if config.share else page(runs)
    try:
        write_text(path, text)
    except OSError as error:
        require(False, "out", str(path), f"a file that can be written; {error}")
    print(f"runs: {len(folders)}; {len(text) / 1e6:.1f} MB written to {path}")


def main() -> int:
    """Run the command. Exit code 0: done; 2: wrong settings."""
    name = "dapo-jax report"
    return command_line.run(ReportConfig, __doc__, report, several=["run"], single_process=name)
