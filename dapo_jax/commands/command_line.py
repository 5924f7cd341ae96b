"""From a command line to a checked config: typed overrides, and errors that say what is allowed."""

import itertools
import re
import sys
from collections.abc import Callable, Collection, Mapping
from typing import Any

from absl import flags
from ml_collections import config_flags

from dapo_jax.config.experiment import Config, Data, DpoConfig, SftConfig
from dapo_jax.config.files import locate, read_config
from dapo_jax.config.help import help_text, take_help
from dapo_jax.config.user_code import resolve
from dapo_jax.config.validation import CHOICES, validate
from dapo_jax.data.prompts.templates import VERIFIERS_OF, open_template
from dapo_jax.data.row_formats import FIELDS, parse_fields
from dapo_jax.data.sources import check_sources, is_generated, parse_sources
from dapo_jax.data.supervised_rows import EXAMPLES, PAIRS, read_fields
from dapo_jax.learner.advantages import ESTIMATORS
from dapo_jax.learner.losses import KL_ESTIMATORS, LOSS_WEIGHTS, RATIOS, TRAINED_RESPONSES
from dapo_jax.learner.optimizer import SCHEDULES
from dapo_jax.reporting.wandb_tracker import check_project
from dapo_jax.rewards.functions import own_parts
from dapo_jax.runtime import processes
from dapo_jax.runtime.nonfinite import EXIT_CODE, NotFinite
from dapo_jax.runtime.settings import WORDS, ConfigError, check_types, leaves, nearest, require
from dapo_jax.runtime.storage.ownership import RUN, check_free
from dapo_jax.runtime.storage.retries import UNSAVED, is_refusal, of_a_bucket, reason
from dapo_jax.verifier.verifier import VERIFIERS

# Settings whose value is a key of a table that lives beside the code it names.
TABLES = {
    "algorithm.advantage": ESTIMATORS,
    "algorithm.ratio": RATIOS,
    "algorithm.aggregate": LOSS_WEIGHTS,
    "algorithm.trained_responses": TRAINED_RESPONSES,
    "algorithm.kl_estimator": KL_ESTIMATORS,
    "optimizer.schedule": SCHEDULES,
    "critic.optimizer.schedule": SCHEDULES,
    "reward.verifier": VERIFIERS,
}
AUTO = {"packing.row_tokens": "-1"}  # what the word stands for


def check(config: Any) -> None:
    """Raises `ConfigError` for anything wrong that the settings alone can tell."""
    check_types(config)
    for name, _, value in leaves(config):
        if name in TABLES:
            require(value in TABLES[name], name, value, "one of " + ", ".join(TABLES[name]))
    validate(config)
    if isinstance(config, SftConfig | DpoConfig):
        read_fields(config.data, PAIRS if isinstance(config, DpoConfig) else EXAMPLES)
    if isinstance(config, Config):
        own_parts(list(config.reward.weights()))
        if config.algorithm.token_weights:
            resolve("algorithm.token_weights", config.algorithm.token_weights)
        check_project(config.log.wandb)
        _check_data(config.data)
        readers = VERIFIERS_OF.get(config.data.template, (config.reward.verifier,))
        require(
            config.reward.verifier in readers,
            "reward.verifier",
            config.reward.verifier,
            f"{' or '.join(readers)}: what data.template = {config.data.template!r} asks for",
        )


def _check_data(data: Data) -> None:
    names = [*parse_sources("data.source", data.source)]
    if data.heldout_source:
        names += parse_sources("data.heldout_source", data.heldout_source)
    fields = parse_fields("data.fields", data.fields, FIELDS)
    require(
        not fields or not all(map(is_generated, names)),
        "data.fields",
        data.fields,
        "empty where all problems are generated: nothing reads it",
    )
    shows_none = not open_template(data.template).shows_system
    own = data.fields if "system" in fields else ""
    for field, value in ("data.system_prompt", data.system_prompt), ("data.fields", own):
        allowed = f"without a system message with data.template = {data.template!r}: it shows none"
        require(not (value and shows_none), field, value, allowed)


def check_run_dir(config: Config) -> None:
    """Raises `ConfigError` where a run must not write."""
    check_free("run_dir", config.run_dir, RUN)


def check_run(config: Config) -> None:
    """Raises `ConfigError` where a run must not write, or finds no file to read."""
    check_run_dir(config)
    check_sources(config.data)


def _check_override_names(arguments: list[str], kind: type) -> None:
    """absl answers a mistyped key or value with a traceback; this says what is meant or allowed."""
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
        what = f"config.{setting}: there is no such setting" * name.startswith("config.")
        what = what or f"--{name}: there is no such flag"
        raise ConfigError(f"{what}{nearest(setting, known)} (--help lists all)")


def _check_value(setting: str, value: str, kind: Any) -> None:
    """Raises `ConfigError` for the text of an override that says no value of that type."""
    fits = kind is not bool or value.lower() in ("true", "t", "1", "false", "f", "0")
    try:
        kind(value)
    except ValueError:
        fits = False
    require(fits, setting, value, WORDS[kind])


def spell_out(arguments: list[str], short_names: Mapping[str, str]) -> list[str]:
    """The command line with `--k=32` written as the setting that `k` is short for."""
    full = []
    for argument in arguments:
        name, separator, value = argument.partition("=")
        short = short_names.get(name.lstrip("-")) if name.startswith("-") else None
        full.append(f"--config.{short}{separator}{value}" if short else argument)
    return full


def join_repeated(arguments: list[str], names: Collection[str]) -> list[str]:
    """The command line with flags that may be given again as one, a line for each value."""
    values: dict[str, list[str]] = {name: [] for name in names}
    others, rest = [], iter(arguments)
    for argument in rest:
        name, separator, value = argument.partition("=")
        flag = name.lstrip("-")
        if name.startswith("-") and flag in values:
            values[flag].append(value if separator else next(rest, ""))
        else:
            others.append(argument)
    return [f"--{name}=" + "\n".join(found) for name, found in values.items() if found] + others


def take_file(arguments: list[str]) -> tuple[str, list[str]]:
    """What `--config=FILE` or `--config FILE` names (the last one), and the other arguments."""
    file, others, rest = "", [], iter(arguments)
    for argument in rest:
        name, separator, value = argument.partition("=")
        if name in ("--config", "-config"):
            file = value if separator else next(rest, "")
        else:
            others.append(argument)
    return file, others


def spell_auto(arguments: list[str]) -> list[str]:
    """The command line with the number in place of 'auto' where a setting has one for it."""
    spelled, setting = [], ""
    for argument in arguments:
        name, separator, value = argument.partition("=")
        if setting in AUTO and argument == "auto":
            argument = AUTO[setting]
        setting = name.lstrip("-").removeprefix("config.") if name.startswith("-") else ""
        if setting in AUTO and separator and value == "auto":
            argument = f"{name}={AUTO[setting]}"
        spelled.append(argument)
    return spelled


def override(config: Any, arguments: list[str]) -> Any:
    """`config`, changed as `--config.name=value` says. Raises `ConfigError`."""
    arguments = spell_auto(arguments)
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
        raise ConfigError(f"unexpected arguments: {' '.join(extra)}")
    return holder.value


def load(
    kind: type,
    usage: str | None,
    short_names: Mapping[str, str] | None = None,
    *,
    needs_file: bool = True,
    several: Collection[str] = (),
    door: Callable[[Any], None] = lambda config: None,
) -> Any:
    """The checked config that the command line describes: `--config=FILE[:PRESET] --config.x=y`.

    Prints help, or one line that says what is wrong, and exits where there is no config to return.

    Args:
        usage: what the help begins with; a module's docstring, which Python may have left out.
        short_names: settings by the flag that may stand for them.
        needs_file: without it, overrides of the defaults are enough.
        several: flags that may be given again.
        door: raises `ConfigError` where the command must not write; asked once the settings are
            known to be good.
    """
    short_names = short_names or {}
    asked, arguments = take_help(spell_out(join_repeated(sys.argv[1:], several), short_names))
    file, arguments = take_file(arguments)
    config: Any = None
    try:
        if file or asked or not needs_file:
            config = override(read_config(kind, file) if file else kind(), arguments)
        if asked:
            print(help_text(config, usage or "", asked, short_names, TABLES | CHOICES))
            raise SystemExit(0)
        if config is None:
            raise ConfigError(
                "--config=FILE is required, e.g. --config=configs/arithmetic.py "
                "(--help explains every setting)"
            )
        if not file and not arguments:
            raise ConfigError(f"arguments are missing, as in{example(usage or '')} (--help)")
        check(config)
        door(config)
    except ConfigError as error:
        said = " ".join(locate(error, config, file).split())  # one line, whatever was quoted
        print(f"error: {processes.printable(said)}", file=sys.stderr)
        raise SystemExit(2) from None
    return config


def example(usage: str) -> str:
    """The first command that a usage shows, on one line."""
    shown = re.search(r"^    (?:.*\\\n)*.*$", usage, re.MULTILINE)
    return " " + " ".join(shown[0].replace("\\\n", " ").split()) if shown else ""


def guarded(work: Callable[[], Any]) -> int:
    """The exit code of `work`; what users, numbers or buckets did wrong is a line, no traceback."""
    try:
        work()
    except ConfigError as error:
        processes.complain(f"error: {error}")
        return 2
    except NotFinite as error:
        processes.complain(f"error: {error}")
        return EXIT_CODE
    except Exception as error:
        if not of_a_bucket(error):
            raise
        processes.complain(f"error: the bucket can't be read or written: {reason(error)}")
        return 2 if is_refusal(error) else UNSAVED
    return 0


def main() -> None:
    """Checks a run's settings and folder, and prints the model folder that they name."""
    usage = "Checks the settings of a run; arguments as for dapo-jax train."
    print(load(Config, usage, door=check_run_dir).model.folder)


if __name__ == "__main__":
    main()
