"""Command lines: a config's file, typed overrides `--config.name=value`, help, one-line errors."""

import operator
import re
import sys
from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType
from typing import Any, NoReturn

from dapo_jax.config.files import locate, read_config, shipped_configs
from dapo_jax.config.foreign_names import advice
from dapo_jax.config.help import help_text, take_help
from dapo_jax.config.settings import assign, defaults, rules
from dapo_jax.types.errors import ConfigError, nearest, require
from dapo_jax.types.rules import TYPE_NAMES

BOOLS = {"true": True, "t": True, "1": True, "false": False, "f": False, "0": False}
LONG_DASHES = ("–", "—")
NO_FLAGS: Mapping[str, str] = MappingProxyType({})


def name_positional(arguments: list[str], name: str, *, repeated: bool) -> list[str]:
    """Return the command line with `--name=` before the first positional argument, or before all.

    An argument after a flag without `=` may be its value, so it is not positional.
    """
    full: list[str] = []
    may_be_value = False
    is_taken = any(argument.partition("=")[0].lstrip("-") == name for argument in arguments)
    for argument in arguments:
        is_flag = argument.startswith(("-", *LONG_DASHES))
        if not (is_flag or may_be_value or is_taken and not repeated):
            is_taken = True
            argument = f"--{name}={argument}"
        may_be_value = is_flag and "=" not in argument
        full.append(argument)
    return full


def take_file(arguments: list[str]) -> tuple[str, list[str]]:
    """Return the value of `--config` and the other arguments. Raises `ConfigError` for two."""
    file, others, rest = "", [], iter(arguments)
    for argument in rest:
        name, separator, value = argument.partition("=")
        if name in ("--config", "-config"):
            value = value if separator else next(rest, "")
            _check_once(name, file or value, value)
            file = value
        else:
            others.append(argument)
    return file, others


def _check_once(flag: str, earlier: str, text: str) -> None:
    if earlier != text:
        raise ConfigError(f"--{flag.lstrip('-')} is given twice: {earlier!r} and {text!r}")


def _convert(setting: str, text: str, kind: type, auto: int | None) -> Any:
    """Return the value of an override. Raises `ConfigError` if it is of another type."""
    if auto and text == "auto":
        return auto
    if kind is bool:
        require(text.lower() in BOOLS, setting, text, TYPE_NAMES[bool])
        return BOOLS[text.lower()]
    try:
        return kind(text)
    except ValueError:
        require(False, setting, text, TYPE_NAMES[kind])


def _unknown(flag: str, known: Collection[str]) -> ConfigError:
    """Return the error about a flag that does not exist, with the setting that it may mean."""
    setting = flag.removeprefix("config.")
    sections = {name.rpartition(".")[0] for name in known} - {""}
    advised = "" if setting.startswith("extras.") else advice(setting)
    if setting in sections:
        hint = f"; {advised}" if advised else ""
        return ConfigError(f"config.{setting} is a section: see --help={setting}{hint}")
    problem = f"config.{setting}: there is no such setting"
    if setting == flag:
        problem = f"--{flag}: there is no such flag"
    hint = f"--config.{setting}" if setting in known else advised
    if settings := re.findall(r"--config\.([\w.]+)", hint):
        hint = f"did you mean {hint}?" if {*settings} <= {*known, *sections} else ""
    hint = f"; {hint}" if hint else nearest(setting, known)
    return ConfigError(f"{problem}{hint} (--help-all lists all)")


def override(
    config: Any,
    arguments: list[str],
    short_names: Mapping[str, str] = NO_FLAGS,
    several: Collection[str] = (),
    others: list[str] | None = None,
) -> None:
    """Change `config` by the overrides `--config.name=value`. Raises `ConfigError`.

    Args:
        short_names: settings by their short flag, as `--k` of `--k=32`.
        several: settings that may be repeated: a line per value.
        others: takes the arguments that are no short flags, in place of an error.
    """
    usual, rule = defaults(type(config)), rules(type(config))
    given, rest = {}, [*arguments]
    extra = [] if others is None else others
    while rest:
        argument = rest.pop(0)
        flag, separator, text = argument.partition("=")
        flag = flag.lstrip("-")
        name = short_names.get(flag, flag.removeprefix("config."))
        if not argument.startswith("-") or flag[:1].isdigit():
            extra.append(argument)
            continue
        is_known = flag in short_names or flag.startswith("config.") and name in usual
        if others is not None and flag not in short_names:
            others.append(argument)
            continue
        if not is_known:
            raise _unknown(flag, usual)
        kind = type(usual[name])
        if not separator:
            has_value = kind is not bool and rest and not rest[0].startswith("--")
            text = rest.pop(0) if has_value else "true" * (kind is bool)
        if name in several:
            text = f"{operator.attrgetter(name)(config)}\n{text}".removeprefix("\n")
        else:
            _check_once(flag, given.setdefault(name, text), text)
        assign(config, name, _convert(name, text, kind, rule[name].auto))
    if extra and others is None:
        # Web pages and word processors turn two hyphens into a long dash.
        has_dash = any(text.startswith(LONG_DASHES) for text in extra)
        hint = "; a flag begins with two hyphens" if has_dash else ""
        raise ConfigError(f"unexpected arguments: {' '.join(extra)}{hint}")


def check_flag(fits: bool, flag: str, value: Any, allowed: str) -> None:
    """Raise `ConfigError` that names a flag of a command, not a setting of the config."""
    if not fits:
        raise ConfigError(f"--{flag} = {value!r}: must be {allowed}")


def exit_with_error(text: str) -> NoReturn:
    """Print an error as one line, and exit with code 2."""
    from dapo_jax.runtime.processes import printable

    line = " ".join(text.split())  # a quoted value may span lines
    print(f"error: {printable(line)}", file=sys.stderr)
    raise SystemExit(2)


def read_command_line(
    kind: type,
    usage: str,
    check: Callable[[Any], None],
    short_names: Mapping[str, str] = NO_FLAGS,
    *,
    several: Collection[str] = (),
    needs_arguments: bool = True,
) -> Any:
    """Return the checked config of the command line: `NAME[:PRESET]` or a file, `--config.x=y`.

    A positional argument is the file of a kind with `needs_file`, else the value of the first
    setting; kinds without files have short flags for settings outside sections.

    Prints the help (which begins with `usage`) or a one-line error and exits if there is none.

    Args:
        check: raises `ConfigError` for a wrong config.
        short_names: more settings by their short flag.
        several: flags that may be repeated.
        needs_arguments: the defaults alone are an error.
    """
    needs_file = getattr(kind, "needs_file", None)
    if needs_file is None:
        short_names = {name: name for name in defaults(kind) if "." not in name}
    first = next(iter(short_names)) if needs_file is None else "config"
    arguments = name_positional(sys.argv[1:], first, repeated=first in several)
    topic, arguments = take_help(arguments)
    file = ""
    try:
        file, arguments = take_file(arguments)
        config = read_config(kind, file) if file else kind()
        override(config, arguments, short_names, several)
        if topic:
            print(help_text(config, usage, topic, short_names))
            raise SystemExit(0)
        if not file and needs_file:
            names = ", ".join(shipped_configs(kind.__name__))
            raise ConfigError(
                f"a config is required: a file of yours, or one of {names}, "
                f"as in{example(usage)} (--help-all explains every setting)"
            )
        if not file and not arguments and needs_arguments:
            raise ConfigError(f"arguments are missing, as in{example(usage)} (--help)")
        check(config)
    except ConfigError as error:
        flags = {name for name, setting in short_names.items() if setting == error.field}
        flags.add(f"config.{error.field}")
        overridden = any(text.lstrip("-").partition("=")[0] in flags for text in arguments)
        exit_with_error(str(error) if overridden else locate(error, file))
    return config


def example(usage: str) -> str:
    """Return the first command that a usage shows, on one line."""
    command = re.search(r"^    (?:.*\\\n)*.*$", usage, re.MULTILINE)
    return " " + " ".join(command[0].replace("\\\n", " ").split()) if command else ""
