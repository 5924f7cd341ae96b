"""Plan a run for devices that this machine lacks: whether it fits, and what a step takes.

    dapo-jax plan dapo_qwen2p5_32b --topology=v5p:4x4x4
    dapo-jax plan FILE --topology=v6e:2x4 --search
    dapo-jax plan FILE --topology=v5p:4x4x4 --simulate

The compiler of the device compiles the run's own programs, without the device. Exit code 0:
everything fits; 1: something does not, with how much is missing and what to change; 2: wrong
settings. Memory is the compiler's figure; seconds are a roofline's, since nothing runs. Flags:
"""

import sys
from typing import Any

from dapo_jax.commands import command_line
from dapo_jax.commands.plan.flags import PlanSettings
from dapo_jax.config.experiment import Config
from dapo_jax.runtime.settings import ConfigError, leaves


def read_flags() -> PlanSettings:
    """Read the flags of a plan, and leave the rest of the command line for the config."""
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
    """Return the help text with every flag."""
    flags = "\n".join(
        f"  --{name}={default!r}\n      {field.metadata['explanation']}"
        for name, field, default in leaves(PlanSettings())
    )
    return f"{(__doc__ or '').strip()}\n\n{flags}"


def load() -> tuple[Any, PlanSettings]:
    """Read config and flags. Exits with code 2 and one line if they are wrong."""
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
    """Run the command; return the exit code."""
    config, settings = load()
    from dapo_jax.commands.checks import guarded
    from dapo_jax.commands.plan import plan, search, tables

    if config.environment.used:
        plan.print_progress(f"warning: {tables.ONE_TURN}")
    return guarded(lambda: (search.search if settings.search else plan.plan)(config, settings))


if __name__ == "__main__":
    sys.exit(main())
