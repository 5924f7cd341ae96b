"""Train a policy by reinforcement learning from verifiable rewards.

    dapo-jax train arithmetic
    dapo-jax train arithmetic:grpo --config.seed=1
    dapo-jax train my_config.py
    dapo-jax train OLD_RUN --config.run_dir=runs/new
    dapo-jax train --config=FILE --dry-run
    dapo-jax train --config=FILE --check=v6e:64

A config is a Python file of yours, or the name of one that ships with the package (--config=FILE
does the same). The part after the colon selects a preset. The config.json of a run repeats that
run. Every setting below can be overridden. A run folder with a checkpoint is resumed. If a packaged
config starts from a model that a packaged `sft` config makes, that stage runs first. --check looks
at the settings alone, without devices, data or models; --check=GENERATION:CHIPS also at whether the
config is for that machine.
"""

import functools
import pathlib
import re
import subprocess
import sys
from dataclasses import fields

from dapo_jax.config import files
from dapo_jax.config.experiment import Config, OneMesh
from dapo_jax.run import command_line
from dapo_jax.types.errors import ConfigError


def make_base(config: Config) -> None:
    """Run the packaged supervised config that makes `model.folder`, if the folder is missing.

    Raises SystemExit with the exit code of a first stage that was stopped or failed.
    """
    from dapo_jax.config.files import config_for_folder
    from dapo_jax.runtime.registry import feature
    from dapo_jax.runtime.storage.files import is_remote

    folder = config.model.folder
    if not folder or is_remote(folder) or pathlib.Path(folder).exists():
        return
    base = config_for_folder(feature("supervised").SftConfig, folder)
    if not base:
        return
    print(f"model.folder = {folder!r} is missing: first stage, dapo-jax sft {base}", flush=True)
    if code := subprocess.call([sys.executable, "-m", "dapo_jax", "sft", base]):
        raise SystemExit(code)


def check_run(config: Config, makes_base: bool = True) -> None:
    """Raise `ConfigError` if the run can't start; may make a missing base model on the way."""
    from dapo_jax.run import checks

    checks.check_run(config, *[make_base] * makes_base)


def work(config: Config) -> int:
    """Train; return 0: done; 3: no signal left; 74: the end is unsaved; 130, 143, ...: stopped.

    A run that SIGINT (130), SIGTERM (143) or another signal (128 + its number) stopped has been
    saved, but is not complete.
    """
    from dapo_jax.run import checks
    from dapo_jax.runtime import processes
    from dapo_jax.runtime.storage.files import UNSAVED, NotSaved

    with checks.loading(config.log.console):
        from dapo_jax.run.loop import train
        from dapo_jax.runtime.signals import Signals
    signals = Signals(config.checkpoint.leave_seconds)
    try:
        summary = train(config, signals=signals)
    except NotSaved as error:
        processes.print_error(
            f"error: config.run_dir = {config.run_dir!r}: the last checkpoint could not be "
            f"written: {error}. Earlier checkpoints are complete; make room, and start it again"
        )
        return UNSAVED
    return signals.exit_code if summary is None else 0


def dry_run(config: Config) -> int:
    """Print what the run would see; return 0 if it can start."""
    from dapo_jax.run import checks

    with checks.loading():
        from dapo_jax.run.dry_run import dry_run
    return dry_run(config)


def check_machine(config: Config, file: str, machine: str) -> None:
    """Raise `ConfigError` if `config`, of `file`, is for other chips than `GENERATION:CHIPS`."""
    from dapo_jax.runtime.sharding import mesh_shape

    kind, _, chips = machine.partition(":")
    command_line.check_flag(bool(kind) and chips.isdecimal(), "check", machine, "as v6e:64")
    named = re.fullmatch(r"(v\d\w*|[tg]pu\w*)_(\d+)", name := files.variant(file))
    is_resized = any(argument.startswith("--config.mesh.") for argument in sys.argv)
    if named and (named[1] != kind or named[2] != chips and not is_resized):
        raise ConfigError(f"--config={file}: its variant {name} is not for {chips} chips of {kind}")
    if not config.mesh.sampler_share:
        sizes = {field.name: getattr(config.mesh, field.name) for field in fields(OneMesh)}
        # Each of an Ironwood chip's two cores is a device.
        mesh_shape(**sizes, devices=int(chips) * (2 if kind == "tpu7x" else 1))


def check(machine: str) -> int:
    """Check the settings, and the machine if one is named; return 0."""
    flags = command_line.split_flags(sys.argv[1:], command_line.flag_names(Config)[1])
    file = next((value for flag, value in flags if flag in ("", "config")), "")
    command_line.load(
        Config,
        __doc__,
        check_output=lambda config: check_machine(config, file, machine) if machine else None,
    )
    print("the settings are valid; devices, data and models were not looked at")
    return 0


def main() -> int:
    """Run the command; return the exit code of `work`, or 2: wrong settings.

    4: numbers are not finite; 75: another process died, restart all of them.
    """
    if checked := [a for a in sys.argv if a.partition("=")[0] == "--check"]:
        sys.argv = [argument for argument in sys.argv if argument not in checked]
        return check(checked[-1].partition("=")[2])
    dry_flags = {"--dry-run", "--dry_run"} & set(sys.argv[1:])
    if not dry_flags:
        return command_line.run(Config, __doc__, work, check_output=check_run)
    sys.argv = [argument for argument in sys.argv if argument not in dry_flags]
    name = "dapo-jax train --dry-run"
    check_only = functools.partial(check_run, makes_base=False)
    return command_line.run(Config, __doc__, dry_run, check_output=check_only, single_process=name)
