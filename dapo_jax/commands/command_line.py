"""Command line of a run: typed overrides of a config, checks, and one-line errors."""

import argparse
import itertools
import re
import sys
from collections.abc import Callable, Collection, Mapping
from typing import Any, NoReturn

from dapo_jax.config.experiment import Config, DpoConfig, SftConfig
from dapo_jax.config.files import locate, read_config, shipped_configs
from dapo_jax.config.help import help_text, take_help
from dapo_jax.runtime.settings import TYPE_NAMES, ConfigError, leaves, nearest, require, rules


def _check_override_names(arguments: list[str], kind: type) -> None:
    """Raise `ConfigError` for an unknown flag or a value of another type.

    absl reports those with a traceback.
    """
    types = {name: field.type for name, field, _ in leaves(kind())}
    sections = {name.rpartition(".")[0] for name in types} - {""}
    for argument, following in itertools.zip_longest(arguments, arguments[1:], fillvalue="--"):
        name, separator, value = argument.partition("=")
        name = name.lstrip("-")
        setting = name.removeprefix("config.")
        if not argument.startswith("-") or name[:1].isdigit():  # -1 is a value
            continue
        if name.startswith("config.") and setting in types:
            if not separator and not following.startswith("--"):
                value = following
            if separator or types[setting] is not bool:  # a bool without a value means true
                _check_value(setting, value, types[setting])
            continue
        if setting in sections:
            raise ConfigError(f"config.{setting} is a section: see --help={setting}")
        problem = f"--{name}: there is no such flag"
        if name.startswith("config."):
            problem = f"config.{setting}: there is no such setting"
        raise ConfigError(f"{problem}{nearest(setting, types)} (--help lists all)")


def _check_value(setting: str, value: str, kind: Any) -> None:
    """Raise `ConfigError` if the text of an override is not a value of type `kind`."""
    fits = kind is not bool or value.lower() in ("true", "t", "1", "false", "f", "0")
    try:
        kind(value)
    except ValueError:
        fits = False
    require(fits, setting, value, TYPE_NAMES[kind])


def spell_out(arguments: list[str], short_names: Mapping[str, str]) -> list[str]:
    """Return the command line with short flags such as `--k=32` replaced by their settings."""
    full = []
    for argument in arguments:
        name, separator, value = argument.partition("=")
        setting = short_names.get(name.lstrip("-")) if name.startswith("-") else None
        full.append(f"--config.{setting}{separator}{value}" if setting else argument)
    return full


def join_repeated(arguments: list[str], names: Collection[str]) -> list[str]:
    """Return the command line with repeated flags joined into one, a line per value."""
    values: dict[str, list[str]] = {name: [] for name in names}
    others, rest = [], iter(arguments)
    for argument in rest:
        name, separator, value = argument.partition("=")
        flag = name.lstrip("-")
        if name.startswith("-") and flag in values:
            values[flag].append(value if separator else next(rest, ""))
        else:
            others.append(argument)
    return [f"--{name}=" + "\n".join(texts) for name, texts in values.items() if texts] + others


def take_file(arguments: list[str], kind: type = Config) -> tuple[str, list[str]]:
    """Return the name or file of the config, and the other arguments.

    The last `--config=` or `--config` counts. For a `kind` that config files make, it may also be
    an argument of its own: the first, or after one that contains its value (`--seed 1` does not).
    """
    file, others, rest = "", [], iter(arguments)
    for argument in rest:
        name, separator, value = argument.partition("=")
        positional = not argument.startswith("-") and (not others or "=" in others[-1])
        if name in ("--config", "-config"):
            file = value if separator else next(rest, "")
        elif positional and not file and kind in (Config, SftConfig, DpoConfig):
            file = argument
        else:
            others.append(argument)
    return file, others


def spell_auto(arguments: list[str], kind: type) -> list[str]:
    """Return the command line with 'auto' replaced by the number that a setting has for it."""
    auto = {f"--config.{n}": str(rule.auto) for n, rule in rules(kind).items() if rule.auto}
    spelled, flag = [], ""
    for argument in arguments:
        if flag in auto and argument == "auto":
            argument = auto[flag]
        flag, _, value = argument.partition("=")
        if flag in auto and value == "auto":
            argument = f"{flag}={auto[flag]}"
        spelled.append(argument)
    return spelled


def override(config: Any, arguments: list[str]) -> Any:
    """Return `config` with the overrides `--config.name=value`. Raises `ConfigError`."""
    from absl import flags
    from ml_collections import config_flags

    arguments = spell_auto(arguments, type(config))
    _check_override_names(arguments, type(config))
    values = flags.FlagValues()
    line = ["", *arguments]
    try:
        holder = config_flags.DEFINE_config_dataclass(
            "config", config, flag_values=values, sys_argv=line
        )
        extra = values(line)[1:]
    except (flags.Error, TypeError, ValueError) as error:
        raise ConfigError(str(error).strip().splitlines()[-1]) from None
    if extra:
        # Web pages and word processors turn two hyphens into a long dash.
        has_dash = any(text.startswith(("–", "—")) for text in extra)
        hint = "; a flag begins with two hyphens" if has_dash else ""
        raise ConfigError(f"unexpected arguments: {' '.join(extra)}{hint}")
    return holder.value


class FlagParser(argparse.ArgumentParser):
    """Parser of a command's flags that prints errors as one line."""

    def error(self, message: str) -> NoReturn:
        _exit_with_error(message)


def _exit_with_error(text: str) -> NoReturn:
    from dapo_jax.runtime.processes import printable

    line = " ".join(text.split())  # a quoted value may span lines
    print(f"error: {printable(line)}", file=sys.stderr)
    raise SystemExit(2)


def load(
    kind: type,
    usage: str | None,
    short_names: Mapping[str, str] | None = None,
    *,
    needs_file: bool = True,
    several: Collection[str] = (),
    check_output: Callable[[Any], None] = lambda config: None,
) -> Any:
    """Return the checked config of the command line: `NAME[:PRESET]` or a file, `--config.x=y`.

    Prints the help or a one-line error and exits if there is no config to return.

    Args:
        usage: beginning of the help; a module's docstring, which `python -OO` removes.
        short_names: settings by their short flag.
        needs_file: if False, overrides of the defaults are enough.
        several: flags that may be repeated.
        check_output: raises `ConfigError` if the command must not write; called last.
    """
    usage, short_names = usage or "", short_names or {}
    help_topic, arguments = take_help(spell_out(join_repeated(sys.argv[1:], several), short_names))
    file, arguments = take_file(arguments, kind)
    config: Any = None
    try:
        if file or help_topic or not needs_file:
            config = override(read_config(kind, file) if file else kind(), arguments)
        if help_topic:
            print(help_text(config, usage, help_topic, short_names))
            raise SystemExit(0)
        if config is None:
            names = ", ".join(shipped_configs(kind))
            raise ConfigError(
                f"a config is required: a file of yours, or one of {names}, "
                f"as in{example(usage)} (--help explains every setting)"
            )
        if not file and not arguments:
            raise ConfigError(f"arguments are missing, as in{example(usage)} (--help)")
        from dapo_jax.commands import checks

        checks.check(config)
        check_output(config)
    except ConfigError as error:
        overridden = any(text.startswith(f"--config.{error.field}=") for text in arguments)
        _exit_with_error(str(error) if overridden else locate(error, file))
    return config


def example(usage: str) -> str:
    """Return the first command that a usage shows, on one line."""
    command = re.search(r"^    (?:.*\\\n)*.*$", usage, re.MULTILINE)
    return " " + " ".join(command[0].replace("\\\n", " ").split()) if command else ""


def run(
    kind: type,
    usage: str | None,
    work: Callable[[Any], int | None],
    short_names: Mapping[str, str] | None = None,
    *,
    single_process: str = "",
    **options: Any,
) -> int:
    """Run a command: load and check its config, call `work`, and end all processes.

    Args:
        work: executes the command and returns an exit code or None (0). It imports heavy modules
            itself, so that help and wrong settings are answered at once.
        single_process: name of a command that only one process may run.
        short_names, options: arguments of `load`.
    """
    config = load(kind, usage, short_names, **options)
    from dapo_jax.commands.checks import guarded
    from dapo_jax.runtime import processes

    return processes.run(lambda: guarded(lambda: work(config)), alone=single_process)
