"""Python API around a run: policies to begin with, exports, a plan before it, a page after it.

Public as `dapo_jax.sft`, ... Heavy modules are imported when a function is called.
"""

import dataclasses
import functools
import importlib
import json
import os
import pathlib
import signal
from typing import TYPE_CHECKING, Any, TypeVar

from dapo_jax.commands import checks
from dapo_jax.commands.model_folders import check_folder
from dapo_jax.config.experiment import Config, DpoConfig, ExportConfig, ReportConfig, SftConfig
from dapo_jax.config.files import read_config
from dapo_jax.runtime import processes
from dapo_jax.runtime.settings import check_types, check_values, require

if TYPE_CHECKING:
    import pyarrow

    from dapo_jax.commands.api_policy import Policy

T = TypeVar("T")
File = str | os.PathLike


def load(config: Any, kind: type[T]) -> T:
    """A config as it is given, or of the file of that name. Raises `ConfigError`."""
    if isinstance(config, str | os.PathLike):
        return read_config(kind, os.fspath(config))
    require(isinstance(config, kind), "(config)", config, f"a {kind.__name__} or a file's name")
    return config


def read_metrics(folder: File) -> "pyarrow.Table":
    """Table of a folder's metrics.jsonl, a row per step; None: not measured."""
    import pyarrow

    text = (pathlib.Path(folder) / "metrics.jsonl").read_text()
    rows = [json.loads(line) for line in text.splitlines()]
    names = dict.fromkeys(name for row in rows for name in row)
    return pyarrow.table({name: [row.get(name) for row in rows] for name in names})


@dataclasses.dataclass(frozen=True)
class ModelFolder:
    """A model folder that `sft` or `dpo` wrote; `str` of it is the path.

    Attributes:
        path: the folder, in the Hugging Face layout.
        stopped: name of a signal that stopped it early and that the program's own handler took:
            nothing is written yet, and the same call goes on. Empty for a folder that is there.
    """

    path: str
    stopped: str = ""

    def __str__(self) -> str:
        return self.path

    def __fspath__(self) -> str:
        return self.path

    @functools.cached_property
    def metrics(self) -> "pyarrow.Table":
        """Table with a row per step; `.to_pandas()` where pandas is installed."""
        return read_metrics(self.path)

    @functools.cached_property
    def policy(self) -> "Policy":
        """Policy of the folder, read at first use."""
        from dapo_jax.commands.api_policy import Policy

        return Policy(self.path)


def _supervised(config: Any, module: str, function: str) -> ModelFolder:
    checks.check(config)
    check_folder(config)
    processes.set_compilation_cache()
    train = getattr(importlib.import_module(f"dapo_jax.run.supervised.{module}"), function)
    from dapo_jax.run.supervised.resume import Stopped

    received = ""
    try:
        train(config)
    except Stopped as stopped:
        (received,) = stopped.args
    if received:
        signal.raise_signal(signal.Signals[received])  # now that the work is saved
    return ModelFolder(config.out, received)


def sft(config: SftConfig | File) -> ModelFolder:
    """Trains a policy on examples, as `dapo-jax sft` does; goes on where it was stopped.

    >>> folder = dapo_jax.sft(
    ...     dapo_jax.SftConfig(
    ...         out=run_dir + "_sft",
    ...         total_steps=2,
    ...         architecture=dapo_jax.Architecture(layers=1, embed=32, head_dim=8, mlp=64),
    ...         examples=dapo_jax.Examples(max_terms=3),
    ...         max_response_tokens=32,
    ...         packing=dapo_jax.Packing(row_tokens=64, rows_per_microbatch=16),
    ...     )
    ... )
    sft step     1/2  nll ...
    sft step     2/2  nll ...
    policy written to ..._sft
    >>> folder.metrics["step"].to_pylist()
    [1, 2]

    Args:
        config: an experiment, or the file that holds one: `configs/arithmetic_base.py`.

    Raises:
        ConfigError: settings, files and folders don't fit together.
        NotFinite (runtime.nonfinite): too many updates in a row were skipped.
        KeyboardInterrupt: Ctrl-C, once the steps so far are saved beside the folder.
    """
    return _supervised(load(config, SftConfig), "sft", "make_base")


def dpo(config: DpoConfig | File) -> ModelFolder:
    """Trains a policy on pairs of a chosen and a rejected answer, as `dapo-jax dpo` does.

    Args:
        config: a `DpoConfig`, or the file that holds one.

    Raises: as `sft`.
    """
    return _supervised(load(config, DpoConfig), "dpo", "prefer")


def export(run: File, out: File, **settings: Any) -> pathlib.Path:
    """Writes the policy of a run as a model folder in the Hugging Face layout.

    Args:
        run: the run_dir of the run.
        out: the folder to write; new, empty, or an earlier export, which is replaced.
        settings: `step`, `model`, `weights`, `dtype`, ... of `dapo_jax.ExportConfig`.

    Returns:
        the folder.

    Raises:
        ConfigError: wrong settings, no such checkpoint, or a model of other shapes.
    """
    config = ExportConfig(run=os.fspath(run), out=os.fspath(out), **settings)
    check_types(config)
    from dapo_jax.run.export import export as write

    return write(config)


def plan(config: Config | File, *, topology: str, **flags: Any) -> dict[str, Any]:
    """Plans a run on devices that are not here: whether it fits, and what a step takes.

    Compiling takes minutes the first time; what it says goes to standard error.

    Args:
        config: an experiment, or the file that holds one.
        topology: as v5p:4x4x4, v5e:2x4, v6e:16x16 or h100:8; cpu:8 are this machine's devices.
        flags: others of `dapo-jax plan --help`, such as `model` (a folder, or a published name),
            `price`, `accuracy`, `kept`.

    Returns:
        what `dapo-jax plan --json` prints: `fits`, `programs` with bytes and seconds, `step` (None
        where not everything fits), `changes` that would make it fit.

    Raises:
        ConfigError: settings that don't fit together, an unknown topology, no compiler for it.
    """
    from dapo_jax.commands.plan.flags import PlanSettings

    config, settings = load(config, Config), PlanSettings(topology=topology, **flags)
    if settings.model:
        model = dataclasses.replace(config.model, folder=settings.model)
        config = dataclasses.replace(config, model=model)
    checks.check(config)
    check_types(settings)
    settings.check()
    asked = settings.search or settings.simulate or settings.json
    require(not asked, "(flags)", flags, "without search, simulate and json: those print")
    from dapo_jax.commands.plan import tables
    from dapo_jax.commands.plan.plan import make

    return tables.record(make(config, settings), settings)


def report(*runs: File, out: File = "report.html", **settings: Any) -> pathlib.Path:
    """Writes a run, or several side by side, as one page to look at.

    Args:
        runs: run_dirs, or globs of several.
        out: the page to write; an earlier report is replaced.
        settings: `preset`, `max_mb` of `dapo_jax.ReportConfig`.

    Returns:
        the page.

    Raises:
        ConfigError: a run can't be read, or the page not be written.
    """
    from dapo_jax.commands.report import report as write

    names = "\n".join(os.fspath(run) for run in runs)
    config = ReportConfig(run=names, out=os.fspath(out), **settings)
    check_types(config)
    check_values(config)
    write(config)
    return pathlib.Path(config.out)
