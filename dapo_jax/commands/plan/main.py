"""Plan of a run on devices that are not here: whether it fits, and what it takes.

    dapo-jax plan dapo_qwen2p5_32b --topology=v5p:4x4x4
    dapo-jax plan FILE --topology=v6e:2x4 --search
    dapo-jax plan FILE --topology=v5p:4x4x4 --simulate

The programs are the run's own; the compiler of the device compiles them without one. Exit code 0:
everything fits; 1: something does not, with how much is missing and what to change; 2: wrong
settings. Memory is the compiler's word; seconds are a roofline's, and nothing has run. Flags:
"""

import sys
from typing import Any

from dapo_jax.commands import command_line
from dapo_jax.commands.plan.flags import PlanSettings
from dapo_jax.config.experiment import Config
from dapo_jax.runtime.settings import ConfigError, leaves


def read_flags() -> PlanSettings:
    """Reads the flags of a plan; what else is on the command line is left there for the config."""
    parser = command_line.FlagParser(add_help=False, allow_abbrev=False)
    for name, _, default in leaves(PlanSettings()):
        if isinstance(default, bool):
            parser.add_argument(f"--{name}", action="store_true")
        else:
            parser.add_argument(f"--{name}", type=type(default), default=default)
    flags, rest = parser.parse_known_args()
    sys.argv[1:] = rest
    return PlanSettings(**vars(flags))


def usage() -> str:
    """Help text, with every flag."""
    flags = "\n".join(
        f"  --{name}={default!r}\n      {field.metadata['explanation']}"
        for name, field, default in leaves(PlanSettings())
    )
    return f"{(__doc__ or '').strip()}\n\n{flags}"


def load() -> tuple[Any, PlanSettings]:
    """Reads config and flags; ends the program with a line where they are wrong."""
    settings = read_flags()
    config = command_line.load(Config, usage())
    if settings.model:
        config.model.folder = settings.model
    try:
        settings.check()
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    return config, settings


def main() -> int:
    """Runs the command; returns the exit code."""
    config, settings = load()
    from dapo_jax.commands.checks import guarded
    from dapo_jax.commands.plan import plan, search, tables

    if config.environment.used:
        plan.say(f"warning: {tables.ONE_TURN}")
    return guarded(lambda: (search.search if settings.search else plan.plan)(config, settings))


if __name__ == "__main__":
    sys.exit(main())
