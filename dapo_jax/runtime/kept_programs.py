"""Compiled programs of this process, kept for the next run or engine that is like an earlier one.

A jitted function takes what it has compiled along when it goes. A run that made its own would trace
and lower again what the run before it did, which takes longer than a small run trains.
"""

import copy
import dataclasses
import functools
import sys
from collections.abc import Callable, Hashable, Iterator
from typing import Any

from jax.sharding import Mesh

MOST = 8  # a run has two or three; compiled code takes memory of the devices
FLOORS = "algorithms learner model rollout runtime.nonfinite runtime.sharding structs".split()
TRACED = tuple(f"dapo_jax.{floor}" for floor in FLOORS)


@dataclasses.dataclass(frozen=True)
class _Recipe:
    """Function that makes programs; two are equal where its arguments and the code are.

    Attributes:
        make: has its arguments.
        traced: functions and constants that the programs are traced from; they stay alive, so that
            no other has the identity of one.
    """

    make: Callable[[], Any] = dataclasses.field(compare=False)
    traced: tuple[Any, ...] = dataclasses.field(compare=False)
    identities: tuple[int, ...]
    values: tuple[Hashable, ...]


@functools.lru_cache(MOST)
def _made(recipe: _Recipe) -> Any:
    return recipe.make()


def keep(make: Callable[..., Any], *arguments: Any, frozen: Any = None, **options: Any) -> Any:
    """Programs that `make` made of equal arguments before, from the same code; else new ones.

    Shapes, the mesh in use and the settings of jax are not compared: jax.jit traces by them.

    Args:
        make: makes programs that hold no parameters and no other state.
        arguments, options: sections of settings, meshes and plain values; the programs get copies,
            since the caller may change a section later.
        frozen: parameters that the programs hold: with any, nothing is kept.
    """
    if frozen:
        return make(*arguments, frozen=frozen, **options)
    values = make, *map(_value, arguments), *options, *map(_value, options.values())
    options = {name: _copied(value) for name, value in options.items()}
    made = functools.partial(make, *map(_copied, arguments), **options)
    traced = tuple(_traced())
    return _made(_Recipe(made, traced, tuple(map(id, traced)), values))


def forget_programs() -> None:
    """Lets the next run trace and compile anew."""
    _made.cache_clear()


def _copied(argument: Any) -> Any:
    return argument if isinstance(argument, Mesh) else copy.deepcopy(argument)


def _value(argument: Any) -> Hashable:
    """Value of an argument; as text 1, 1.0 and True are three."""
    if isinstance(argument, Mesh):
        return argument
    if dataclasses.is_dataclass(argument) and not isinstance(argument, type):
        return type(argument), repr(dataclasses.asdict(argument))
    return repr(argument)


def _traced() -> Iterator[Any]:
    """Functions, methods, tables and constants of the modules that are traced, as they are now.

    A test replaces a function; a notebook puts another one into a table or reloads a module.
    """
    for module in sorted(name for name in sys.modules if name.startswith(TRACED)):
        for name, value in list(vars(sys.modules[module]).items()):
            if name.startswith("__"):
                continue
            inside = ()
            if isinstance(value, dict):
                inside = value.values()
            elif isinstance(value, type) and value.__module__ == module:
                inside = filter(callable, vars(value).values())
            for one in (value, *inside):
                yield one
                yield getattr(one, "__code__", None)  # which IPython's autoreload replaces
