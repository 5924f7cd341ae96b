"""List the configs that ship with the package, or print one as a start for your own.

    dapo-jax configs
    dapo-jax configs show arithmetic > my.py

A config is then trained by its name or file: dapo-jax train arithmetic, dapo-jax train my.py.
"""

import sys

from dapo_jax.config.files import shipped_configs, summary
from dapo_jax.run.command_line import exit_with_error
from dapo_jax.types.errors import nearest

COMMANDS = {"train": "Config", "sft": "SftConfig"}  # what a config returns


def main() -> int:
    """Run the command. Exit code 0: done; 2: wrong arguments."""
    arguments = sys.argv[1:]
    shipped = shipped_configs()
    if {"-h", "--help"} & set(arguments):
        print((__doc__ or "").strip())
    elif not arguments:
        for command, kind in COMMANDS.items():
            for name, path in shipped_configs(kind).items():
                print(f"dapo-jax {command:<6}{name:<21}{summary(path)}")
    elif arguments[0] != "show" or len(arguments) != 2:
        given = " ".join(arguments)
        exit_with_error(f"configs {given}: must be dapo-jax configs, or dapo-jax configs show NAME")
    elif arguments[1] not in shipped:
        hint = nearest(arguments[1], shipped) or f"; there are {', '.join(shipped)}"
        exit_with_error(f"configs show {arguments[1]}: there is no such packaged config{hint}")
    else:
        print(shipped[arguments[1]].read_text(encoding="utf-8"), end="")
    return 0
