"""A cache of compiled programs in this process, for the next run with equal settings.

A jitted function is freed together with its compiled code. Tracing and lowering it again takes
longer than a small run trains.
"""

import collections
import copy
import dataclasses
from collections.abc import Callable, Hashable
from typing import Any

from jax.sharding import Mesh

MAX_KEPT = 8  # a run has two or three; compiled code takes device memory
_kept: collections.OrderedDict[Hashable, Any] = collections.OrderedDict()  # oldest use first


def keep(make: Callable[..., Any], *arguments: Any, frozen: Any = None, **options: Any) -> Any:
    """Return the cached result for these arguments; build it with `make` on a miss.

    Call `forget_programs` after changing code that the programs were traced from.
    """
    if frozen:
        return make(*arguments, frozen=frozen, **options)
    key = (make, *map(_key, arguments), *options, *map(_key, options.values()))
    if key not in _kept:
        copies = {name: _copy(value) for name, value in options.items()}
        _kept[key] = make(*map(_copy, arguments), **copies)
    _kept.move_to_end(key)
    if len(_kept) > MAX_KEPT:
        _kept.popitem(last=False)
    return _kept[key]


def forget_programs() -> None:
    """Drop all kept programs; the next run traces and compiles again."""
    _kept.clear()


def _copy(argument: Any) -> Any:
    return argument if isinstance(argument, Mesh) else copy.deepcopy(argument)


def _key(argument: Any) -> Hashable:
    """Return a hashable key of an argument; 1, 1.0 and True have different ones."""
    if isinstance(argument, Mesh):
        return argument
    if dataclasses.is_dataclass(argument) and not isinstance(argument, type):
        return type(argument), repr(dataclasses.asdict(argument))
    return repr(argument)
