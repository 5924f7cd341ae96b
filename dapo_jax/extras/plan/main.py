"""Plan a run for devices that this machine lacks: whether it fits, and what a step takes.

    dapo-jax plan dapo_qwen2p5_32b --topology=v5p:4x4x4

The compiler of the device compiles the run's own programs, without the device. Exit code 0:
everything fits; 1: something does not, with how much is missing and what to change; 2: wrong
settings. Memory is the compiler's figure; seconds are a roofline's, since nothing runs. Flags:
"""

import sys

from dapo_jax.commands import command_line
from dapo_jax.config.experiment import Config
from dapo_jax.extras.plan.flags import PlanSettings
from dapo_jax.runtime.settings import check_unique, leaves

ONE_TURN = (
    "turns of the environment are not counted: a response is one turn, without observations, "
    "without repeated prefills and without waiting for the environment"
)


def read_flags() -> PlanSettings:
    """Read the flags of a plan, and leave the rest of the command line for the config."""
    parser = command_line.FlagParser(add_help=False, allow_abbrev=False)
    for name, _, default in leaves(PlanSettings()):
        if isinstance(default, bool):
            parser.add_argument(f"--{name}", action="store_true")
        else:
            parser.add_argument(f"--{name}", type=type(default), default=default)
    own = {f"--{name}" for name, _, _ in leaves(PlanSettings())}
    names = [argument.partition("=")[0] for argument in sys.argv[1:]]
    try:
        check_unique([name for name in names if name in own], "flag")
    except ValueError as error:
        parser.error(str(error))
    flags, sys.argv[1:] = parser.parse_known_args()
    return PlanSettings(**vars(flags))


def main() -> int:
    """Run the command; return the exit code."""
    settings = read_flags()
    explained = [
        f"  --{name}={default!r}\n      {field.metadata['explanation']}"
        for name, field, default in leaves(PlanSettings())
    ]
    config = command_line.load(Config, "\n".join([(__doc__ or "").strip(), "", *explained]))
    if settings.model:
        config.model.folder = settings.model
    from dapo_jax.commands.checks import guarded
    from dapo_jax.extras.plan import plan

    def work() -> int:
        settings.check()
        if config.environment.used:
            plan.print_progress(f"warning: {ONE_TURN}")
        return plan.plan(config, settings)

    return guarded(work)
