"""Command line of a run: typed overrides of a config, checks, and one-line errors."""

import argparse
import operator
import re
import sys
from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType
from typing import Any, NoReturn

from dapo_jax.config.experiment import Config, DoctorConfig, DpoConfig, SftConfig
from dapo_jax.config.files import locate, read_config, shipped_configs
from dapo_jax.config.foreign_names import advice
from dapo_jax.config.help import help_text, take_help
from dapo_jax.config.settings import TYPE_NAMES, leaves, rules
from dapo_jax.types.errors import ConfigError, check_unique, nearest, require

BOOLS = {"true": True, "t": True, "1": True, "false": False, "f": False, "0": False}
LONG_DASHES = ("–", "—")
WITH_FILES = (Config, SftConfig, DpoConfig)  # kinds that config files make


def find_preset(name: str) -> Any:
    """Return the algorithm of a preset; the table is loaded at first use."""
    from dapo_jax.algorithms import preset

    return preset(name)


def name_positional(arguments: list[str], name: str, *, repeated: bool) -> list[str]:
    """Return the command line with `--name=` before the first positional argument, or before all.

    An argument after a flag without `=` may be its value, so it is not positional.
    """
    full: list[str] = []
    is_taken = may_be_value = False
    for argument in arguments:
        is_flag = argument.startswith(("-", *LONG_DASHES))
        if not (is_flag or may_be_value or is_taken):
            is_taken = not repeated
            argument = f"--{name}={argument}"
        may_be_value = is_flag and "=" not in argument
        full.append(argument)
    return full


def take_file(arguments: list[str], kind: type = Config) -> tuple[str, list[str]]:
    """Return the name or file of the config, and the other arguments.

    For a `kind` that config files make, the name may also be an argument of its own: the first, or
    after one that contains its value (`--seed 1` does not). Raises `ConfigError` for two names.
    """
    file, others, rest = "", [], iter(arguments)
    for argument in rest:
        name, separator, value = argument.partition("=")
        positional = not argument.startswith("-") and (not others or "=" in others[-1])
        if name in ("--config", "-config"):
            file, earlier = value if separator else next(rest, ""), file
            _check_once(name, earlier or file, file)
        elif positional and not file and kind in WITH_FILES:
            file = argument
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


def _unknown(flag: str, known: Collection[str], sections: Collection[str]) -> str:
    """Return the error about a flag that does not exist, with the setting that it may mean."""
    setting = flag.removeprefix("config.")
    problem = f"--{flag}: there is no such flag"
    if flag.startswith("config."):
        problem = f"config.{setting}: there is no such setting"
    hint = f"--config.{setting}" if setting in known else advice(setting)
    settings = re.findall(r"--config\.([\w.]+)", hint)
    if settings:
        hint = f"did you mean {hint}?" if {*settings} <= {*known, *sections} else ""
    hint = f"; {hint}" if hint else nearest(setting, known)
    return f"{problem}{hint} (--help-all lists all)"


def override(
    config: Any,
    arguments: list[str],
    short_names: Mapping[str, str] = MappingProxyType({}),
    several: Collection[str] = (),
) -> Any:
    """Change `config` by the overrides `--config.name=value`. Raises `ConfigError`.

    Args:
        short_names: settings by their short flag, as `--k` of `--k=32`.
        several: settings that may be repeated: a line per value.
    """
    types: dict[str, Any] = {name: field.type for name, field, _ in leaves(config)}
    sections = {name.rpartition(".")[0] for name in types} - {""}
    extra, rest = [], [*arguments]
    given: dict[str, str] = {}
    while rest:
        argument = rest.pop(0)
        flag, separator, text = argument.partition("=")
        flag = flag.lstrip("-")
        setting = short_names.get(flag, flag.removeprefix("config."))
        if not argument.startswith("-") or flag[:1].isdigit():
            extra.append(argument)
        elif setting in types and (flag in short_names or flag.startswith("config.")):
            if not separator:
                is_flag = types[setting] is bool or not rest or rest[0].startswith("--")
                text = ("true" if types[setting] is bool else "") if is_flag else rest.pop(0)
            owner, _, name = setting.rpartition(".")
            section = operator.attrgetter(owner)(config) if owner else config
            auto = rules(type(config))[setting].auto
            if setting in several:
                text = f"{getattr(section, name)}\n{text}".removeprefix("\n")
            else:
                _check_once(flag, given.setdefault(setting, text), text)
            setattr(section, name, _convert(setting, text, types[setting], auto))
        elif setting in sections:
            hint = advice(setting)
            hint = f"; {hint}" * bool(hint)
            raise ConfigError(f"config.{setting} is a section: see --help={setting}{hint}")
        else:
            raise ConfigError(_unknown(flag, types, sections))
    if extra:
        # Web pages and word processors turn two hyphens into a long dash.
        has_dash = any(text.startswith(LONG_DASHES) for text in extra)
        hint = "; a flag begins with two hyphens" if has_dash else ""
        raise ConfigError(f"unexpected arguments: {' '.join(extra)}{hint}")
    return config


def check_flag(fits: bool, flag: str, value: Any, allowed: str) -> None:
    """Raise `ConfigError` that names a flag of a command, not a setting of the config."""
    if not fits:
        raise ConfigError(f"--{flag} = {value!r}: must be {allowed}")


class FlagParser(argparse.ArgumentParser):
    """Parser of a command's flags that takes each once and prints errors as one line."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        names = [argument.partition("=")[0] for argument in sys.argv[1:]]
        try:
            check_unique([name for name in names if name in self._option_string_actions], "flag")
        except ValueError as error:
            self.error(str(error))
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        exit_with_error(message)


def exit_with_error(text: str) -> NoReturn:
    from dapo_jax.runtime.processes import printable

    line = " ".join(text.split())  # a quoted value may span lines
    print(f"error: {printable(line)}", file=sys.stderr)
    raise SystemExit(2)


def load(
    kind: type,
    usage: str | None,
    short_names: Mapping[str, str] | None = None,
    *,
    several: Collection[str] = (),
    check_output: Callable[[Any], None] = lambda config: None,
) -> Any:
    """Return the checked config of the command line: `NAME[:PRESET]` or a file, `--config.x=y`.

    A `Config` needs a file; for other kinds, overrides of the defaults are enough. For a kind that
    no config file makes, settings outside sections are short flags, and a positional argument is
    the value of the first setting.

    Prints the help (which begins with `usage`) or a one-line error and exits if there is none.

    Args:
        short_names: more settings by their short flag.
        several: flags that may be repeated.
        check_output: raises `ConfigError` if the command must not write; called last.
    """
    usage, short_names = usage or "", short_names or {}
    arguments = sys.argv[1:]
    if kind not in WITH_FILES:
        short_names = {name: name for name, _, _ in leaves(kind()) if "." not in name}
        first = next(iter(short_names))
        arguments = name_positional(arguments, first, repeated=first in several)
    help_topic, arguments = take_help(arguments)
    file: str = ""
    config: Any = None
    try:
        file, arguments = take_file(arguments, kind)
        if file or help_topic or kind is not Config:
            config = read_config(kind, file, find_preset) if file else kind()
            override(config, arguments, short_names, several)
        if help_topic:
            print(help_text(config, usage, help_topic, short_names))
            raise SystemExit(0)
        if config is None:
            names = ", ".join(shipped_configs(kind))
            raise ConfigError(
                f"a config is required: a file of yours, or one of {names}, "
                f"as in{example(usage)} (--help-all explains every setting)"
            )
        if not file and not arguments and kind is not DoctorConfig:
            raise ConfigError(f"arguments are missing, as in{example(usage)} (--help)")
        from dapo_jax.run import checks

        checks.check(config)
        check_output(config)
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


def run(
    kind: type,
    usage: str | None,
    work: Callable[[Any], int | None],
    short_names: Mapping[str, str] | None = None,
    *,
    single_process: str = "",
    **options: Any,
) -> int:
    """Run a command: load its config with `options`, call `work`, and end all processes.

    `work` returns an exit code or None (0). It imports heavy modules itself, so that help and wrong
    settings are answered at once. `single_process` names a command that only one process may run.
    """
    config = load(kind, usage, short_names, **options)
    from dapo_jax.run.checks import guarded
    from dapo_jax.runtime import processes

    return processes.run(lambda: guarded(lambda: work(config)), alone=single_process)
