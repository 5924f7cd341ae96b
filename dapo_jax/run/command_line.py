"""Command lines: a config's file, typed overrides `--config.name=value`, help, one-line errors."""

import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from types import MappingProxyType
from typing import Any, NoReturn

from dapo_jax.config.files import locate, read_config, shipped_configs
from dapo_jax.config.foreign_names import ADVICE, replacements
from dapo_jax.config.help import EVERYTHING, HELP_FLAGS, help_text
from dapo_jax.config.settings import assign_text, defaults
from dapo_jax.types.errors import ConfigError, nearest

LONG_DASHES = ("–", "—")
NO_FLAGS: Mapping[str, str] = MappingProxyType({})


def split_flags(arguments: list[str], switches: Collection[str] = ()) -> Iterator[tuple[str, str]]:
    """Yield (flag, value) for a command line; a positional argument has the flag "".

    A flag without `=` takes the next argument as its value; one of `switches` is true, unless
    that is `false`.
    """
    rest = [*arguments]
    while rest:
        argument = rest.pop(0)
        flag, separator, value = argument.lstrip("-").partition("=")
        if not argument.startswith("-") or flag[:1].isdigit():
            flag, value = "", argument
        elif not separator and flag in switches:
            value = rest.pop(0) if rest[:1] in (["true"], ["false"]) else "true"
        elif not separator and rest and not rest[0].startswith("--"):
            value = rest.pop(0)
        yield flag, value


def flag_names(kind: type, short_names: Mapping[str, str] = NO_FLAGS) -> tuple[dict, set[str]]:
    """Return the settings of a config by flag, and the flags that need no value."""
    usual = defaults(kind)
    names = {f"config.{name}": name for name in usual} | dict(short_names)
    switches = {flag for flag, name in names.items() if isinstance(usual[name], bool)}
    return names, switches | {flag for flag, topic in HELP_FLAGS.items() if topic == EVERYTHING}


def read_flags(
    kind: type,
    short_names: Mapping[str, str] = NO_FLAGS,
    first: str = "config",
    several: Collection[str] = (),
) -> dict[str, str]:
    """Return the texts of the command line by setting, of `config` (a file) and of `help`.

    A positional argument is the value of the flag `first`. Raises `ConfigError` for an unknown
    flag, and for a second value of any but those of `several`, whose values are joined by lines.
    """
    names, switches = flag_names(kind, short_names)
    names["config"] = "config"
    given: dict[str, str] = {}
    unexpected = []
    for flag, text in split_flags(sys.argv[1:], switches):
        if flag in HELP_FLAGS:
            given["help"] = HELP_FLAGS[flag] if text in ("", "true") else text.lower()
            continue
        is_taken = names[first] in given and first not in several
        if not flag and (is_taken or text.startswith(LONG_DASHES)):
            unexpected.append(text)
            continue
        flag = flag or first
        if flag not in names:
            raise _unknown(flag, defaults(kind))
        name = names[flag]
        if name in several and name in given:
            text = f"{given[name]}\n{text}"
        else:
            check_once(flag, given.get(name, text), text)
        given[name] = text
    if unexpected:
        # Web pages and word processors turn two hyphens into a long dash.
        has_dash = any(text.startswith(LONG_DASHES) for text in unexpected)
        hint = "; a flag begins with two hyphens" if has_dash else ""
        raise ConfigError(f"unexpected arguments: {' '.join(unexpected)}{hint}")
    return given


def check_once(flag: str, earlier: str, text: str) -> None:
    """Raise `ConfigError` for another value of a flag."""
    if earlier != text:
        raise ConfigError(f"--{flag} is given twice: {earlier!r} and {text!r}")


def _unknown(flag: str, known: Collection[str]) -> ConfigError:
    """Return the error about a flag that does not exist, with the setting that it may mean."""
    setting = flag.removeprefix("config.")
    sections = {name.rpartition(".")[0] for name in known} - {""}
    meant = [setting] if setting in known else replacements(setting)
    if setting in ADVICE:
        hint = f"; {ADVICE[setting]}"
    elif meant and {*meant} <= {*known, *sections}:
        hint = f"; did you mean {' and '.join(f'--config.{name}' for name in meant)}?"
    else:
        hint = "" if setting in sections else nearest(setting, known)
    if setting in sections:
        return ConfigError(f"config.{setting} is a section: see --help={setting}{hint}")
    is_flag = setting == flag
    problem = f"--{flag}: there is no such flag" if is_flag else f"{flag}: there is no such setting"
    return ConfigError(f"{problem}{hint} (--help-all lists all)")


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


def load(
    kind: type,
    usage: str | None,
    short_names: Mapping[str, str] = NO_FLAGS,
    *,
    check_output: Callable[[Any], None] = lambda config: None,
    several: Collection[str] = (),
    needs_arguments: bool = True,
) -> Any:
    """Return the checked config of the command line: `NAME[:PRESET]` or a file, `--config.x=y`.

    A positional argument is the file of a kind with `needs_file`, else the value of the first
    setting; kinds without files have short flags for settings outside sections.

    Prints the help (which begins with `usage`) or a one-line error and exits if there is none.

    Args:
        short_names: more settings by their short flag.
        check_output: raises `ConfigError` if the command must not write; it is called last.
        several: flags that may be repeated.
        needs_arguments: the defaults alone are an error.
    """
    usage, needs_file, first = usage or "", getattr(kind, "needs_file", None), "config"
    if needs_file is None:
        short_names = {name: name for name in defaults(kind) if "." not in name}
        first = next(iter(short_names))
    given: dict[str, str] = {}
    file = ""
    try:
        given = read_flags(kind, short_names, first, several)
        file, topic = given.pop("config", ""), given.pop("help", "")
        config = read_config(kind, file) if file else kind()
        for name, text in given.items():
            assign_text(config, name, text)
        if topic:
            print(help_text(config, usage, topic, short_names))
            raise SystemExit(0)
        if not file and needs_file:
            names = ", ".join(shipped_configs(kind.__name__))
            raise ConfigError(
                f"a config is required: a file of yours, or one of {names}, "
                f"as in{example(usage)} (--help-all explains every setting)"
            )
        if not file and not given and needs_arguments:
            raise ConfigError(f"arguments are missing, as in{example(usage)} (--help)")
        from dapo_jax.run import checks

        checks.check(config)
        check_output(config)
    except ConfigError as error:
        exit_with_error(str(error) if error.field in given else locate(error, file))
    return config


def run(
    kind: type,
    usage: str | None,
    work: Callable[[Any], int | None],
    *flags: Any,
    single_process: str = "",
    **options: Any,
) -> int:
    """Run a command: load its config with `options`, call `work`, and end all processes.

    `work` returns an exit code or None (0). It imports heavy modules itself, so that help and wrong
    settings are answered at once. `single_process` names a command that only one process may run.
    """
    config = load(kind, usage, *flags, **options)
    from dapo_jax.run.checks import guarded
    from dapo_jax.runtime import processes

    return processes.run(lambda: guarded(lambda: work(config), config), alone=single_process)


def example(usage: str) -> str:
    """Return the first command that a usage shows, on one line."""
    command = re.search(r"^    (?:.*\\\n)*.*$", usage, re.MULTILINE)
    return " " + " ".join(command[0].replace("\\\n", " ").split()) if command else ""
