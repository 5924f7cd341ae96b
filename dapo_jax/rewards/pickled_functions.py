"""Functions that a program gives as rewards: names for them, and copies for worker processes.

A function of a module goes to the workers by its name. Any other one (a lambda, a function of a
notebook) goes as cloudpickle's copy, in a file of a private folder that only the pool writes.
"""

import functools
import importlib
import inspect
import io
import linecache
import os
import pathlib
import re
import sys
import types
from collections.abc import Callable, Collection, Iterable
from typing import Any

import cloudpickle

from dapo_jax.runtime.settings import ConfigError, require

HERE = "in_process:"  # before the name of a part that this process computes
GIVEN = "given:"  # before the name of one whose copy the workers have
LARGEST_COPY = 64 << 20  # bytes; each worker process reads and keeps its own
HINT = "or let it run here: in_process=True"

_functions: dict[str, Callable] = {}  # by name
_copies: dict[str, bytes] = {}


class _Counted(io.BytesIO):
    """File that keeps the first bytes and counts all."""

    size = 0

    def write(self, data: Any) -> int:
        count = memoryview(data).nbytes
        self.size += count
        if self.size <= LARGEST_COPY:
            super().write(data)
        return count


def _is_importable(function: Callable) -> bool:
    """True if a worker finds the function by module and name."""
    module = getattr(function, "__module__", None) or "__main__"
    name = getattr(function, "__qualname__", "")
    known = getattr(sys.modules.get(module), name, None) is function
    return module != "__main__" and name.isidentifier() and known


def _cached(function: Callable, parameters: dict[str, Any]) -> Callable:
    return functools.lru_cache(**parameters)(function)


class _Pickler(cloudpickle.Pickler):
    """Pickler that refuses arrays on devices: a worker would take a device of the trainer's.

    A function with a cache goes with its code, where `pickle` would send its name alone.
    """

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, functools._lru_cache_wrapper) and not _is_importable(obj):
            return _cached, (obj.__wrapped__, obj.cache_parameters())
        if isinstance(obj, types.ModuleType) and type(obj) is not types.ModuleType:
            return importlib.import_module, (obj.__name__,)  # of a type of its own, as dapo_jax
        jax = sys.modules.get("jax")
        if jax is not None and isinstance(obj, jax.Array):
            raise TypeError("an array of JAX lies on a device of the trainer; use numpy.asarray")
        return super().reducer_override(obj)


def _copy(value: Any) -> _Counted:
    """File with a copy of a value. Raises what the value's own pickling may raise."""
    file = _Counted()
    _Pickler(file).dump(value)
    return file


def _load_elsewhere(copy: bytes) -> None:
    """Reads a copy as a worker does, in which nothing of the program's own module is known."""
    program = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        cloudpickle.loads(copy)
    finally:
        sys.modules["__main__"] = program


def _refusal(value: Any) -> str:
    """Reason why a worker can't have a copy; empty if it can."""
    try:
        file = _copy(value)
        size = file.size
        if size <= LARGEST_COPY:
            _load_elsewhere(file.getvalue())
    except RecursionError:
        return "it is nested too deeply"
    except Exception as error:  # whatever an object's own methods raise
        return f"{type(error).__name__}: {error}"
    text = f"it has {size / 1e6:,.0f} MB, and at most {LARGEST_COPY / 1e6:,.0f} MB are sent"
    return text if size > LARGEST_COPY else ""


def _held(value: Any) -> dict[str, Any]:
    """Variables that a function refers to, or attributes of an object."""
    if isinstance(value, types.MethodType):
        return {"self": value.__self__}
    if not isinstance(value, types.FunctionType):
        return dict(getattr(value, "__dict__", {}))
    parameters = inspect.signature(value).parameters.values()
    defaults = {p.name: p.default for p in parameters if p.default is not p.empty}
    found = inspect.getclosurevars(value).nonlocals
    names = [name for name in _global_names(value.__code__) if name in value.__globals__]
    return defaults | dict(found) | {name: value.__globals__[name] for name in names}


def _global_names(code: types.CodeType) -> Iterable[str]:
    """Names of a function and of those inside it; names of attributes are among them."""
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from _global_names(inner)


def _blame(value: Any, path: str = "", seen: tuple[int, ...] = ()) -> str:
    """Name of the innermost variable that can't be copied, as `helper.lock`, and why."""
    for name, held in _held(value).items():
        if id(held) not in seen and not isinstance(held, types.ModuleType) and _refusal(held):
            return _blame(held, f"{path}.{name}".lstrip("."), (*seen, id(value)))
    return (f"its variable `{path}`: " if path else "") + _refusal(value)


def _name(prefix: str, function: Callable, taken: Collection[str]) -> str:
    """Name of a part; a number makes it another than those that are taken."""
    own = getattr(function, "__qualname__", type(function).__name__).split("<locals>.")[-1]
    name = first = prefix + (re.sub(r"\W+", "_", own).strip("_") or "function")
    number = 1
    while name in taken:
        number += 1
        name = f"{first}_{number}"
    return name


def name_of(
    function: Callable,
    in_process: bool,
    taken: Collection[str] = (),
    field: str = "reward.parts",
) -> str:
    """Name of a Python function as a part: `module:function`, `given:NAME`, `in_process:NAME`.

    Args:
        in_process: whether this process is to call it.
        taken: names of other functions beside it.
        field: the setting that it is given for.

    Raises:
        ConfigError: a worker can't have a copy of the function; the variable is named.
    """
    require(callable(function), field, function, "a function, or the name of one")
    if _is_importable(function) and not in_process:
        return f"{function.__module__}:{function.__qualname__}"
    name = _name(HERE if in_process else GIVEN, function, taken)
    if not in_process:
        if _refusal(function):
            hint = f"; {HINT}" if field == "reward.parts" else ""
            raise ConfigError(
                f"config.{field} = {function!r}: can't be sent to a worker process: "
                f"{_blame(function)}. Make it inside of the function, or in a module{hint}"
            )
        _copies[name] = _copy(function).getvalue()
    _functions[name] = function  # in the place of an earlier one: a notebook's cell is run again
    return name


def find(name: str) -> Callable:
    """Function of a name that `name_of` gave. Raises `ConfigError` for another one."""
    how = ", in_process=True" * name.startswith(HERE)
    known = f"given by the program: dapo_jax.train(config, reward=function{how})"
    require(name in _functions, "reward.parts", name, known)
    return _functions[name]


def write_copies(names: Iterable[str], path: pathlib.Path) -> None:
    """Writes copies of the given functions among the names, for `read_copies` of a worker.

    Lines of a notebook's cell go with its function: a worker shows the one that raised.
    """
    names = [name for name in names if name.startswith(GIVEN)]
    codes = [getattr(_functions[name], "__code__", None) for name in names]
    files = {code.co_filename for code in codes if code}
    lines = {file: linecache.getlines(file) for file in files if not os.path.exists(file)}
    copies = {name: _copies[name] for name in names}
    path.write_bytes(cloudpickle.dumps((copies, lines)))


def read_copies(path: pathlib.Path) -> None:
    """Makes the functions known that `write_copies` of the parent has written."""
    copies, lines = cloudpickle.loads(path.read_bytes())
    for file, texts in lines.items():
        linecache.cache[file] = (sum(map(len, texts)), None, texts, file)
    _functions.update({name: cloudpickle.loads(copy) for name, copy in copies.items()})
