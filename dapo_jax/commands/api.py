"""Python API for notebooks and scripts, public as `dapo_jax.train`, `dapo_jax.evaluate`, ...

Functions import heavy modules when they are called.
"""

import dataclasses
import functools
import json
import os
import pathlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from dapo_jax.commands.evaluate import SHORT_NAMES
from dapo_jax.config.experiment import Config, ExportConfig
from dapo_jax.config.files import read_config
from dapo_jax.config.settings import check_settings, with_values
from dapo_jax.run import checks
from dapo_jax.run.objects import Environment, File, Rewards, Tools, source_name, with_objects
from dapo_jax.run.policy import Policy
from dapo_jax.runtime import processes
from dapo_jax.runtime.registry import feature
from dapo_jax.types.errors import ConfigError, nearest, require

if TYPE_CHECKING:
    import pyarrow

T = TypeVar("T")


def load(config: Any, kind: type[T]) -> T:
    """Return a config, reading it if it is the name of a file. Raises `ConfigError`."""
    if isinstance(config, str | os.PathLike):
        return read_config(kind, os.fspath(config))
    require(isinstance(config, kind), "(config)", config, f"a {kind.__name__} or a file's name")
    return config


class _Trained(os.PathLike[str]):
    """Metrics and policy of a folder that training wrote."""

    @functools.cached_property
    def metrics(self) -> "pyarrow.Table":
        """Table with a row per step (docs/metrics.md); step 0 is the policy before training.

        None: not measured. `.to_pandas()` converts it if pandas is installed.
        """
        import pyarrow

        text = (pathlib.Path(self) / "metrics.jsonl").read_text()
        rows = [json.loads(line) for line in text.splitlines()]
        names = dict.fromkeys(name for row in rows for name in row)
        return pyarrow.table({name: [row.get(name) for row in rows] for name in names})

    @functools.cached_property
    def policy(self) -> Policy:
        """Policy of the folder, of a run that of the latest checkpoint, loaded at first use."""
        return Policy(self)


@dataclasses.dataclass(frozen=True)
class Result(_Trained):
    """Result of a training run.

    Attributes:
        run_dir: the folder with checkpoints, rollouts and metrics.
        summary: steps, held-out accuracy before and after, seconds; None if the run stopped
            early. Training again with the same config then resumes it.
        stopped: reason for an early stop: "on_step" or another method of a callback, or the name
            of a signal that a handler of the program received; empty if the run is complete.
    """

    run_dir: str
    summary: dict[str, Any] | None
    stopped: str = ""

    def __fspath__(self) -> str:
        return self.run_dir


@dataclasses.dataclass(frozen=True)
class ModelFolder(_Trained):
    """Model folder that `sft` or `dpo` wrote; `str` returns its path.

    Attributes:
        path: the folder, in the Hugging Face layout.
        stopped: name of a signal that stopped training and that a handler of the program
            received: nothing is written yet, and the same call resumes. Empty if complete.
    """

    path: str
    stopped: str = ""

    def __str__(self) -> str:
        return self.path

    def __fspath__(self) -> str:
        return self.path


def train(
    config: Config | File,
    *,
    data: Any = None,
    on_step: Callable[[int, dict[str, float]], Any] | None = None,
    callbacks: Sequence[Any] = (),
    reward: Rewards | None = None,
    in_process: bool = False,
    environment: Environment | None = None,
    tools: Tools = (),
) -> Result:
    """Train as `dapo-jax train` does; resume from the latest checkpoint if there is one.

    >>> config = dapo_jax.Config(
    ...     run_dir=run_dir,
    ...     total_steps=2,
    ...     model=dapo_jax.Model(folder=base),
    ...     data=dapo_jax.Data(max_terms=3, max_prompt_tokens=8, heldout_problems=0),
    ...     rollout=dapo_jax.Rollout(prompts_per_step=4, samples_per_prompt=4),
    ...     sampler=dapo_jax.Sampler(slots=16, max_response_tokens=24),
    ...     packing=dapo_jax.Packing(row_tokens=64, rows_per_microbatch=8),
    ...     log=dapo_jax.Log(console=False),
    ... )
    >>> result = dapo_jax.train(config, on_step=lambda step, values: print(step))
    1
    2
    >>> result.metrics["accuracy"].null_count
    0

    Args:
        config: an experiment, or a file that holds one, such as `configs/arithmetic.py:grpo`.
        data: replaces `config.data.source`: a file, or rows: a list of dicts, a DataFrame, a
            `Dataset`, another iterable of dicts with a length. A resumed run needs the same.
        on_step: called in every process with each step's number and metrics; True stops the run.
        callbacks: objects with `on_step(step, values)`, `on_evaluation(step, responses)`,
            `on_checkpoint(step, folder)`; True stops the run (docs/api.md).
        reward: replaces `config.reward.parts`: a function `(prompt, response, answer) -> float`,
            or weights by function and by name (`{"rule": 1, score: 0.5}`). Other arguments are
            columns of the row (docs/rewards.md). Workers receive a copy, with its variables.
        in_process: run the functions in this process; one that hangs then hangs the run.
        environment, tools: replace those of `config.environment`: a class with `step(text)`, or
            functions that the policy may call (docs/environments.md).

    Raises:
        ConfigError: settings and folders don't fit together, or a function can't be copied.
        Starved, NotSaved, NotFinite: no signal is left, the end is not saved, NaN or infinity.
        Exception, KeyboardInterrupt: of a callback, or Ctrl-C, after the save.
    """
    config = with_objects(load(config, Config), data, reward, in_process, environment, tools)
    checks.check(config)
    checks.check_run(config)
    processes.prepare_jax()
    from dapo_jax.run.loop import train as run
    from dapo_jax.runtime.signals import Signals

    signals = Signals(config.checkpoint.leave_seconds)
    summary = run(config, signals, callbacks, on_step)
    return Result(config.run_dir, summary, "" if summary else signals.received)


def evaluate(
    config: Config | File,
    *,
    model: str = "",
    reward: Rewards | None = None,
    in_process: bool = False,
    environment: Environment | None = None,
    tools: Tools = (),
    **flags: Any,
) -> dict[str, Any] | None:
    """Evaluate on the held-out problems, writing the files of `dapo-jax evaluate`.

    >>> config = dapo_jax.Config(
    ...     run_dir=run_dir,
    ...     data=dapo_jax.Data(max_terms=3, max_prompt_tokens=8, heldout_problems=4),
    ...     sampler=dapo_jax.Sampler(slots=16, max_response_tokens=24),
    ...     packing=dapo_jax.Packing(row_tokens=64),
    ...     log=dapo_jax.Log(console=False),
    ... )
    >>> scores = dapo_jax.evaluate(config, model=base)
    >>> 0 <= scores["heldout_accuracy"] <= 1, scores["problems"]
    (True, 4)

    Args:
        config: an experiment, or a file that holds one.
        model: a model folder, or a run (its latest checkpoint, exported into it); empty: the latest
            checkpoint of `config.run_dir`.
        reward, in_process, environment, tools: as for `train`; if a run was given functions, its
            evaluation needs them again.
        flags: replace values of the config: `data`, `k`, `temperature`, `top_p`, `template`,
            `out`, as in `dapo-jax evaluate --help`. `data` may be rows, as for `train`; all of
            them are evaluated.

    Returns:
        the main scores (docs/metrics.md explains `heldout_...`); None if a signal stopped it and
        a handler of the program received that. The same call then resumes.

    Raises `ConfigError` if there is no such checkpoint, or settings and folders don't fit together.
    """
    config = with_objects(load(config, Config), None, reward, in_process, environment, tools)
    if model:
        flags["model"] = model
    if "data" in flags:
        flags["data"] = source_name(flags["data"], "heldout")
    for flag, value in flags.items():
        if flag not in SHORT_NAMES:
            raise ConfigError(f"evaluate has no argument {flag!r}{nearest(flag, SHORT_NAMES)}")
        section, _, name = SHORT_NAMES[flag].partition(".")
        config = with_values(config, section, **{name: value})
    checks.check(config)
    processes.prepare_jax()
    from dapo_jax.run.evaluate import evaluate as run

    return run(config, from_folder=bool(model))


def _train_folder(config: Any) -> ModelFolder:
    checks.check(config)
    supervised = feature("supervised")
    supervised.check_folder(config)
    processes.prepare_jax()
    from dapo_jax.runtime.signals import Signals

    signals = Signals()
    folder = supervised.train(config, signals)
    return ModelFolder(config.out, "" if folder else signals.received)


def sft(config: Any) -> ModelFolder:
    """Train a policy on examples, as `dapo-jax sft` does; `config` may be a file.

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
    data: 32 generated examples of arithmetic a step
    optimizer.learning_rate = 0.003 (auto: 10,400 parameters)
    optimizer.warmup_steps = 0 (auto: 2 steps)
    ...
    step 2/2  policy nll ...
    policy written to ..._sft
    >>> folder.metrics["step"].to_pylist()
    [1, 2]

    Raises:
        ConfigError: settings, files and folders don't fit together.
        NotFinite (runtime.nonfinite): too many updates in a row were skipped.
        KeyboardInterrupt: Ctrl-C, once the steps so far are saved beside the folder.
    """
    return _train_folder(load(config, feature("supervised").SftConfig))


def dpo(config: Any) -> ModelFolder:
    """Train a policy on pairs of a chosen and a rejected answer, as `dapo-jax dpo` does.

    `config` is a `dapo_jax.DpoConfig` or the name of a file. Raises as `sft`.
    """
    return _train_folder(load(config, feature("supervised").DpoConfig))


def export(run: File, out: File, **settings: Any) -> pathlib.Path:
    """Write the policy of a run as a model folder in the Hugging Face layout; return its path.

    Args:
        run: the run_dir of the run.
        out: the folder to write; new, empty, or an earlier export, which is replaced.
        settings: `step`, `model`, `weights`, `dtype`, ... of `dapo_jax.ExportConfig`.

    Raises `ConfigError` for wrong settings, a missing checkpoint, or a model of other shapes.
    """
    config = ExportConfig(run=os.fspath(run), out=os.fspath(out), **settings)
    from dapo_jax.run.export import export as write

    return write(config)


def plan(config: Config | File, *, topology: str, **flags: Any) -> dict[str, Any]:
    """Plan a run on other devices: memory, and the time of a step.

    Compiling takes minutes the first time; progress is printed to standard error.

    Args:
        config: an experiment, or a file that holds one.
        topology: such as v5p:4x4x4, v5e:2x4 or v6e:16x16; cpu:8 is this machine.
        flags: others of `dapo-jax plan --help`, such as `model` (a folder, or a published name),
            `price`, `tokens`, `kept`.

    Returns:
        the output of `dapo-jax plan --json`: `fits`, `programs` with bytes, `step` with
        seconds (None if the run does not fit), `changes` that would make it fit.

    Raises `ConfigError` for settings that don't fit together, or a topology without a compiler.
    """
    planning = feature("plan")
    config = load(config, Config)
    settings = planning.PlanSettings(topology=topology, **flags)
    if settings.model:
        config = with_values(config, "model", folder=settings.model)
    checks.check(config)
    check_settings(settings)
    require(not settings.json, "(flags)", flags, "without json: it prints")
    return planning.make(config, settings)


def report(*runs: File, out: File = "report.html") -> pathlib.Path:
    """Write one run, or the curves of several, as an HTML page; return its path.

    Args:
        runs: run_dirs, or globs of several.
        out: the page to write; an earlier report is replaced.

    Raises `ConfigError` if a run can't be read, or the page can't be written.
    """
    names = "\n".join(os.fspath(run) for run in runs)
    reporting = feature("report_command")
    config = reporting.ReportConfig(run=names, out=os.fspath(out))
    check_settings(config)
    reporting.report(config)
    return pathlib.Path(config.out)
