"""Command line of a run: typed overrides of a config, checks, and errors of one line."""

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
    """Raises `ConfigError` for a flag that is no setting of `kind`, or a value of another type.

    absl answers those with a traceback.
    """
    known = {name: field.type for name, field, _ in leaves(kind())}
    sections = {name.rpartition(".")[0] for name in known} - {""}
    for argument, following in itertools.zip_longest(arguments, arguments[1:], fillvalue="--"):
        name, separator, value = argument.partition("=")
        name = name.lstrip("-")
        setting = name.removeprefix("config.")
        if not argument.startswith("-") or name[:1].isdigit():  # -1 is a value
            continue
        if name.startswith("config.") and setting in known:
            stands_alone = known[setting] is bool and not separator  # and means true
            if not separator and not following.startswith("--"):
                value = following
            if not stands_alone:
                _check_value(setting, value, known[setting])
            continue
        if setting in sections:
            raise ConfigError(f"config.{setting} is a section: see --help={setting}")
        problem = f"config.{setting}: there is no such setting" * name.startswith("config.")
        problem = problem or f"--{name}: there is no such flag"
        raise ConfigError(f"{problem}{nearest(setting, known)} (--help lists all)")


def _check_value(setting: str, value: str, kind: Any) -> None:
    """Raises `ConfigError` where the text of an override is no value of the type `kind`."""
    fits = kind is not bool or value.lower() in ("true", "t", "1", "false", "f", "0")
    try:
        kind(value)
    except ValueError:
        fits = False
    require(fits, setting, value, TYPE_NAMES[kind])


def spell_out(arguments: list[str], short_names: Mapping[str, str]) -> list[str]:
    """The command line with `--k=32` written as the setting that `k` is short for."""
    full = []
    for argument in arguments:
        name, separator, value = argument.partition("=")
        short = short_names.get(name.lstrip("-")) if name.startswith("-") else None
        full.append(f"--config.{short}{separator}{value}" if short else argument)
    return full


def join_repeated(arguments: list[str], names: Collection[str]) -> list[str]:
    """The command line with repeated flags as one, a line for each value."""
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
    """The config's name or file and the other arguments.

    It stands after `--config=` or `--config`, of which the last one counts; or, for a `kind` that
    configs make, alone: first, or after an argument with its value in it (`--seed 1` has not).
    """
    file, others, rest = "", [], iter(arguments)
    for argument in rest:
        name, separator, value = argument.partition("=")
        alone = not argument.startswith("-") and (not others or "=" in others[-1])
        if name in ("--config", "-config"):
            file = value if separator else next(rest, "")
        elif alone and not file and kind in (Config, SftConfig, DpoConfig):
            file = argument
        else:
            others.append(argument)
    return file, others


def spell_auto(arguments: list[str], kind: type) -> list[str]:
    """The command line with the number in place of 'auto' where a setting has one for it."""
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
    """`config`, changed as `--config.name=value` says. Raises `ConfigError`."""
    from absl import flags
    from ml_collections import config_flags

    arguments = spell_auto(arguments, type(config))
    _check_override_names(arguments, type(config))
    values, line = flags.FlagValues(), ["", *arguments]
    try:
        holder = config_flags.DEFINE_config_dataclass(
            "config", config, flag_values=values, sys_argv=line
        )
        extra = values(line)[1:]
    except (flags.Error, TypeError, ValueError) as error:
        raise ConfigError(str(error).strip().splitlines()[-1]) from None
    if extra:
        # Pages and word processors write a long dash in place of two hyphens.
        dash = "; a flag begins with two hyphens" * any(text[0] in "–—" for text in extra if text)
        raise ConfigError(f"unexpected arguments: {' '.join(extra)}{dash}")
    return holder.value


class FlagParser(argparse.ArgumentParser):
    """Parser of a command's own flags, whose error is one line."""

    def error(self, message: str) -> NoReturn:
        _print_error(message)
        raise SystemExit(2)


def _print_error(text: str) -> None:
    from dapo_jax.runtime.processes import printable

    line = " ".join(text.split())  # one line, whatever was quoted
    print(f"error: {printable(line)}", file=sys.stderr)


def load(
    kind: type,
    usage: str | None,
    short_names: Mapping[str, str] | None = None,
    *,
    needs_file: bool = True,
    several: Collection[str] = (),
    door: Callable[[Any], None] = lambda config: None,
) -> Any:
    """The checked config of the command line: `NAME[:PRESET]` or a file, `--config.x=y`.

    Prints help, or one line about a mistake, and exits where there is no config to return.

    Args:
        usage: beginning of the help; a module's docstring, which Python may have left out.
        short_names: settings by the flag that may stand for them.
        needs_file: without it, overrides of the defaults are enough.
        several: flags that may be repeated.
        door: raises `ConfigError` where the command must not write; called after the checks.
    """
    short_names = short_names or {}
    asked, arguments = take_help(spell_out(join_repeated(sys.argv[1:], several), short_names))
    file, arguments = take_file(arguments, kind)
    config: Any = None
    try:
        if file or asked or not needs_file:
            config = override(read_config(kind, file) if file else kind(), arguments)
        if asked:
            print(help_text(config, usage or "", asked, short_names))
            raise SystemExit(0)
        if config is None:
            names = ", ".join(shipped_configs(kind))
            raise ConfigError(
                f"a config is required: a file of yours, or one of {names}, "
                f"as in{example(usage or '')} (--help explains every setting)"
            )
        if not file and not arguments:
            raise ConfigError(f"arguments are missing, as in{example(usage or '')} (--help)")
        from dapo_jax.commands import checks

        checks.check(config)
        door(config)
    except ConfigError as error:
        flags = [argument.partition("=")[0] for argument in arguments]
        is_overridden = f"--config.{error.field}" in flags  # the file is not to blame
        _print_error(str(error) if is_overridden else locate(error, file))
        raise SystemExit(2) from None
    return config


def example(usage: str) -> str:
    """The first command that a usage shows, on one line."""
    shown = re.search(r"^    (?:.*\\\n)*.*$", usage, re.MULTILINE)
    return " " + " ".join(shown[0].replace("\\\n", " ").split()) if shown else ""


def run(
    kind: type,
    usage: str | None,
    work: Callable[[Any], int | None],
    short_names: Mapping[str, str] | None = None,
    *,
    alone: str = "",
    **options: Any,
) -> int:
    """Runs a command: reads and checks its config, then does its work, and ends all processes.

    Args:
        work: does what the command is for, and returns an exit code or None (0). It imports what
            is heavy, so that help and wrong settings are answered at once.
        alone: name of a command that only one process can do.
        short_names, options: arguments of `load`.
    """
    config = load(kind, usage, short_names, **options)
    from dapo_jax.commands.checks import guarded
    from dapo_jax.runtime import processes

    return processes.run(lambda: guarded(lambda: work(config)), alone=alone)
