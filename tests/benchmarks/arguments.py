"""Command line of the benchmarks."""

import argparse
from typing import Any


def read_arguments(description: str | None, *, others: bool = False, **defaults: Any) -> Any:
    """Return the command line's values of the named arguments.

    The type of a default is the type of the argument: False makes a switch, a list takes several
    values.

    Args:
        description: the module's docstring.
        others: also return all other arguments, as a list.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in defaults.items():
        if default is False:
            parser.add_argument(f"--{name}", action="store_true")
        elif isinstance(default, list):
            parser.add_argument(f"--{name}", type=type(default[0]), nargs="+", default=default)
        else:
            parser.add_argument(f"--{name}", type=type(default), default=default)
    return parser.parse_known_args() if others else parser.parse_args()
