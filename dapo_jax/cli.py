"""From a command line to a checked config: typed overrides, and errors that say what is allowed."""

import argparse
import difflib
import sys
from collections.abc import Callable, Mapping
from typing import Any

from absl import flags
from ml_collections import config_flags

from dapo_jax import processes
from dapo_jax.data.sources import parse_sources
from dapo_jax.data.turns import EXAMPLES, PAIRS, read_fields
from dapo_jax.experiment.config import Config, DpoConfig, SftConfig
from dapo_jax.experiment.hooks import resolve
from dapo_jax.experiment.settings import ConfigError, leaves, require
from dapo_jax.experiment.validation import validate
from dapo_jax.learner.advantages import ESTIMATORS
from dapo_jax.learner.losses import KL_ESTIMATORS, LOSS_WEIGHTS, RATIOS, TRAINED_RESPONSES
from dapo_jax.learner.optimizer import SCHEDULES
from dapo_jax.marks import RUN, check_free
from dapo_jax.prompts.templates import TEMPLATES, VERIFIERS_OF
from dapo_jax.rewards.functions import worker_parts
from dapo_jax.verifier.verifier import VERIFIERS

# Settings whose value is a key of a table that lives beside the code it names.
TABLES = {
    "algorithm.advantage": ESTIMATORS,
    "algorithm.ratio": RATIOS,
    "algorithm.aggregate": LOSS_WEIGHTS,
    "algorithm.trained_responses": TRAINED_RESPONSES,
    "algorithm.kl_estimator": KL_ESTIMATORS,
    "data.template": TEMPLATES,
    "optimizer.schedule": SCHEDULES,
    "critic.optimizer.schedule": SCHEDULES,
    "reward.verifier": VERIFIERS,
}


def check(config: Any) -> None:
    """Raises `ConfigError` for anything wrong that the settings alone can tell."""
    for name, _, value in leaves(config):
        if name in TABLES:
            require(value in TABLES[name], name, value, "one of " + ", ".join(TABLES[name]))
    validate(config)
    if isinstance(config, SftConfig | DpoConfig):
        read_fields(config.data, PAIRS if isinstance(config, DpoConfig) else EXAMPLES)
    if isinstance(config, Config):
        worker_parts(list(config.reward.weights()))
        if config.algorithm.token_weights:
            resolve("algorithm.token_weights", config.algorithm.token_weights)
        parse_sources("data.source", config.data.source)
        if config.data.heldout_source:
            parse_sources("data.heldout_source", config.data.heldout_source)
        readers = VERIFIERS_OF.get(config.data.template, (config.reward.verifier,))
        require(
            config.reward.verifier in readers,
            "reward.verifier",
            config.reward.verifier,
            f"{' or '.join(readers)}: what data.template = {config.data.template!r} asks for",
        )


def check_run_dir(config: Config) -> None:
    """Raises `ConfigError` where a run must not write."""
    check_free("run_dir", config.run_dir, RUN)


def describe_settings(kind: type) -> str:
    """Every setting with its type, default and explanation, a line each."""
    return "\n".join(
        f"  --config.{name}={value!r}  ({getattr(field.type, '__name__', field.type)})\n"
        f"      {field.metadata['explanation']}"
        for name, field, value in leaves(kind())
    )


def _check_override_names(arguments: list[str], kind: type) -> None:
    """ml_collections answers a mistyped key with a traceback; this names the nearest key."""
    known = {name: value for name, _, value in leaves(kind())}
    for argument in arguments:
        if not argument.lstrip("-").startswith("config."):
            continue
        name = argument.lstrip("-").removeprefix("config.").split("=", 1)[0]
        if name not in known:
            near = difflib.get_close_matches(name, known, n=3, cutoff=0.4)
            hint = f"; did you mean {' or '.join(near)}?" if near else ""
            raise ConfigError(f"config.{name}: there is no such setting{hint} (--help lists all)")


def spell_out(arguments: list[str], short_names: Mapping[str, str]) -> list[str]:
    """The command line with `--k=32` written as the setting that `k` is short for."""
    full = []
    for argument in arguments:
        name, separator, value = argument.partition("=")
        short = short_names.get(name.lstrip("-")) if name.startswith("-") else None
        full.append(f"--config.{short}{separator}{value}" if short else argument)
    return full


def load(
    kind: type,
    usage: str,
    short_names: Mapping[str, str] | None = None,
    *,
    needs_file: bool = True,
    door: Callable[[Any], None] = lambda config: None,
) -> Any:
    """The checked config that the command line describes: `--config=FILE[:PRESET] --config.x=y`.

    Prints help, or one line that says what is wrong, and exits where there is no config to return.

    Args:
        short_names: settings by the flag that may stand for them.
        needs_file: without it, overrides of the defaults are enough.
        door: raises `ConfigError` where the command must not write; asked once the settings are
            known to be good.
    """
    short_names = short_names or {}
    arguments = spell_out(sys.argv[1:], short_names)
    if not arguments or {"-h", "--help", "--helpshort", "--helpfull"} & set(arguments):
        print(usage.strip())
        for short, name in short_names.items():
            print(f"  --{short}=..".ljust(22) + f"is --config.{name}=..")
        print("\nSettings (defaults; a config file may differ):\n")
        print(describe_settings(kind))
        raise SystemExit(0)
    values = flags.FlagValues()
    line = [sys.argv[0], *arguments]
    try:
        _check_override_names(arguments, kind)
        if needs_file or any(argument.lstrip("-").startswith("config=") for argument in arguments):
            holder = config_flags.DEFINE_config_file("config", flag_values=values, sys_argv=line)
        else:
            holder = config_flags.DEFINE_config_dataclass(
                "config", kind(), flag_values=values, sys_argv=line
            )
        extra = values(line)[1:]
        if extra:
            raise ConfigError(f"unexpected arguments: {' '.join(extra)}")
        if holder.value is None:
            raise ConfigError("--config=FILE is required, e.g. --config=configs/arithmetic.py")
        require(
            isinstance(holder.value, kind),
            "(the file)",
            type(holder.value).__name__,
            f"a file whose get_config() returns {kind.__name__}",
        )
        check(holder.value)
        door(holder.value)
    except Exception as error:  # whatever a user's config file may raise
        # ml_collections puts the traceback of a config file's error into its message.
        print(f"error: {str(error).strip().splitlines()[-1]}", file=sys.stderr)
        raise SystemExit(2) from None
    return holder.value


def load_flags(kind: type, usage: str) -> Any:
    """The flat dataclass `kind` that the command line describes by `--name=value` alone.

    Prints help, or one line that says what is wrong, and exits where there is nothing to return.
    """
    parser = argparse.ArgumentParser(
        usage=argparse.SUPPRESS,
        description=usage,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    for name, field, default in leaves(kind()):
        explanation = f"{field.metadata['explanation']} ({default!r})"
        parser.add_argument(f"--{name}", type=type(default), default=default, help=explanation)
    return kind(**vars(parser.parse_args(sys.argv[1:] or ["--help"])))


def guarded(work: Callable[[], Any]) -> int:
    """The exit code of `work`; a `ConfigError` in it is a line for the user, not a traceback."""
    try:
        work()
    except ConfigError as error:
        processes.complain(f"error: {error}")
        return 2
    return 0


def main() -> None:
    """Checks a run's settings and folder, and prints the model folder that they name."""
    usage = "Checks the settings of a run; arguments as for dapo_jax.main."
    print(load(Config, usage, door=check_run_dir).model.folder)


if __name__ == "__main__":
    main()
