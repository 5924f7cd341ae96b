"""Plan a run for devices that this machine lacks: whether it fits, and what a step takes.

    dapo-jax plan dapo_qwen2p5_32b --topology=v5p:4x4x4

The compiler of the device compiles the run's own programs, without the device. Exit code 0:
everything fits; 1: something does not, with how much is missing and what to change; 2: wrong
settings. Memory is the compiler's figure; seconds are a formula's, since nothing runs. Flags:
"""

import re
import sys

from dapo_jax.config.experiment import Config
from dapo_jax.config.settings import Section, assign_text, check_settings, defaults, leaves, setting
from dapo_jax.run import command_line
from dapo_jax.types.errors import ConfigError
from dapo_jax.types.rules import Count, PositiveOr0, Share, Unit

ONE_TURN = "turns of the environment are not counted: a response is one turn, without observations"


class PlanSettings(Section):
    """Flags of `dapo-jax plan`, in addition to the config that it plans."""

    topology: str = setting("", "KIND:SHAPE, as in v5p:4x4x4, v5e:2x4 or v6e:16x16.")
    slices: Count = setting(1, "Number of slices of that topology; mesh.data is a multiple of it.")
    model: str = setting("", "Folder with a config.json or a published name; empty: the config's.")
    json: bool = setting(False, "Print one JSON object instead of tables.")
    cache: str = setting("auto", "Folder of earlier results; 'none': compile everything again.")
    price: PositiveOr0 = setting(0.0, "Dollars per chip-hour; 0: show no dollars.")
    flops: Unit = setting(0.0, "Fraction of peak FLOP/s; 0: of the nearest published runs.")
    hbm: Unit = setting(0.0, "Fraction of peak memory bandwidth; 0: of the nearest published runs.")
    busy: Share = setting(0.6, "Assumed fraction of slots that hold a live response, on average.")
    kept: Share = setting(0.5, "Assumed fraction of groups neither all correct nor all wrong.")
    tokens: PositiveOr0 = setting(0.0, "Assumed mean length of a response; 0: 0.2 of the limit.")


def read_flags() -> PlanSettings:
    """Read the flags of a plan, and leave the rest of the command line for the config."""
    settings, given, rest = PlanSettings(), {}, []
    _, switches = command_line.flag_names(Config)
    try:
        for flag, text in command_line.split_flags(sys.argv[1:], {"json", *switches}):
            if flag in defaults(PlanSettings):
                command_line.check_once(flag, given.setdefault(flag, text), text)
                assign_text(settings, flag, text)
            else:
                rest.append(f"--{flag}={text}" if flag else text)
        check_settings(settings)
    except ConfigError as error:
        command_line.exit_with_error(re.sub(r"^config\.", "--", str(error)))
    sys.argv[1:] = rest
    return settings


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
    from dapo_jax.extras.plan import plan
    from dapo_jax.run.checks import guarded

    def work() -> int:
        if config.environment.used:
            print(f"warning: {ONE_TURN}", file=sys.stderr)
        return plan.plan(config, settings)

    return guarded(work)
