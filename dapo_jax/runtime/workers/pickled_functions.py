"""Python functions as settings: their names, and their copies for worker processes.

Workers import a module's function by name. Any other function (a lambda, a function of a notebook)
is copied with cloudpickle into a private folder that only this process writes.
"""

import functools
import importlib
import inspect
import io
import itertools
import linecache
import os
import pathlib
import re
import sys
import tempfile
import types
from collections.abc import Callable, Collection, Iterable
from typing import Any

import cloudpickle

from dapo_jax.types.errors import ConfigError, require

IN_PROCESS_PREFIX = "in_process:"  # of functions that the trainer's process calls
PICKLED_PREFIX = "given:"  # of functions that workers receive as copies
MAX_COPY_BYTES = 64 << 20  # every worker process reads and keeps its own copy

_functions: dict[str, Callable] = {}  # by name
_copies: dict[str, bytes] = {}


def _is_importable(function: Callable) -> bool:
    """Return whether a worker can import the function."""
    module = getattr(function, "__module__", None) or "__main__"
    name = getattr(function, "__qualname__", "")
    is_attribute = getattr(sys.modules.get(module), name, None) is function
    return module != "__main__" and name.isidentifier() and is_attribute


def _cached(function: Callable, parameters: dict[str, Any]) -> Callable:
    return functools.lru_cache(**parameters)(function)


def _code_of_file(file: str, make: Callable[..., types.CodeType], *fields: Any) -> types.CodeType:
    return make(*fields).replace(co_filename=file)


class _Pickler(cloudpickle.Pickler):
    """Pickler that rejects arrays on devices, since a worker would occupy the trainer's device."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, types.CodeType):  # cloudpickle 3.1.3 drops the file, which errors name
            make, fields, *_ = self.dispatch_table[types.CodeType](obj)
            return _code_of_file, (obj.co_filename, make, *fields)
        if isinstance(obj, functools._lru_cache_wrapper) and not _is_importable(obj):
            return _cached, (obj.__wrapped__, obj.cache_parameters())
        if isinstance(obj, types.ModuleType) and type(obj) is not types.ModuleType:
            return importlib.import_module, (obj.__name__,)  # a subclass, as dapo_jax is
        jax = sys.modules.get("jax")
        if jax is not None and isinstance(obj, jax.Array):
            raise TypeError("a JAX array is on a device of the trainer; use numpy.asarray")
        return super().reducer_override(obj)


def _copy(value: Any) -> bytes:
    """Return a copy that a worker can load. Raises whatever the value's pickling raises."""
    file = io.BytesIO()
    _Pickler(file).dump(value)
    if file.tell() > MAX_COPY_BYTES:
        raise ValueError(f"its copy has over {MAX_COPY_BYTES:,} bytes")
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")  # a worker has another one
    try:
        cloudpickle.loads(file.getvalue())
    finally:
        sys.modules["__main__"] = main
    return file.getvalue()


def _copy_error(value: Any) -> str:
    """Return why a value can't be copied; empty if it can."""
    try:
        _copy(value)
    except RecursionError:
        return "it is nested too deeply"
    except Exception as error:  # methods of the object may raise anything
        return f"{type(error).__name__}: {error}"
    return ""


def _variable_error(function: Callable) -> str:
    """Return the name of a variable that can't be copied, and why; empty if unknown."""
    if inspect.isfunction(function):
        variables = inspect.getclosurevars(function)
        for name, value in {**variables.nonlocals, **variables.globals}.items():
            if error := _copy_error(value):
                return f"its variable `{name}`: {error}"
    return ""


def register_function(
    function: Callable,
    in_process: bool,
    reserved: Collection[str] = (),
    field: str = "reward.parts",
) -> str:
    """Return a name for a function: `module:function`, `given:NAME` or `in_process:NAME`."""
    require(callable(function), field, function, "a function, or the name of one")
    if _is_importable(function) and not in_process:
        return f"{function.__module__}:{function.__qualname__}"
    prefix = IN_PROCESS_PREFIX if in_process else PICKLED_PREFIX
    title = getattr(function, "__qualname__", type(function).__name__).split("<locals>.")[-1]
    base = prefix + (re.sub(r"\W+", "_", title).strip("_") or "function")
    names = itertools.chain([base], (f"{base}_{number}" for number in itertools.count(2)))
    name = next(name for name in names if name not in reserved)
    if not in_process:
        try:
            _copies[name] = _copy(function)
        except Exception:
            reason = _variable_error(function) or _copy_error(function)
            hint = ", or pass in_process=True" if field == "reward.parts" else ""
            raise ConfigError(
                f"config.{field} = {function!r}: can't be sent to a worker process: {reason}. "
                f"Create it inside the function or move it to a module{hint}"
            ) from None
    _functions[name] = function  # replaces an earlier one: a notebook cell may run again
    return name


def register_own(function: Callable, field: str) -> str:
    """Return a name for a function that this process calls; a changed one has another name."""
    if _is_importable(function):
        return register_function(function, in_process=False)
    reserved = [name for name, earlier in _functions.items() if not _is_same(function, earlier)]
    return register_function(function, in_process=True, reserved=reserved, field=field)


def _is_same(function: Callable, earlier: Callable) -> bool:
    """Return whether two functions have equal code and variables, as of a cell that runs again."""

    def content(function: Any) -> tuple:
        cells = [cell.cell_contents for cell in function.__closure__ or ()]
        return function.__code__, function.__defaults__, function.__kwdefaults__, cells

    try:
        return function is earlier or content(function) == content(earlier)
    except Exception:  # objects that are no functions, or that can't be compared
        return False


def find_registered(field: str, name: str) -> Callable | None:
    """Return the function that `register_function` named; None for a name `module:function`."""
    if not name.startswith((PICKLED_PREFIX, IN_PROCESS_PREFIX)):
        return None
    option = ", in_process=True" * name.startswith(IN_PROCESS_PREFIX)
    call = f"dapo_jax.train(config, reward=function{option})"
    if field.startswith("algorithm."):
        call = f"config.{field} = function"
    allowed = f"given by the program: {call}"
    require(name in _functions, field, name, allowed)
    return _functions[name]


class FunctionCopies:
    """File with copies of the pickled functions among some names, for `load_copies`."""

    def __init__(self, names: Iterable[str]):
        self.path = ""  # if no name needs a copy
        pickled = [name for name in names if name.startswith(PICKLED_PREFIX)]
        if not pickled:
            return
        self._folder = tempfile.TemporaryDirectory(prefix="dapo_jax_", ignore_cleanup_errors=True)
        self.path = os.path.join(self._folder.name, "functions")
        # Source lines of notebook cells are sent too, so that a worker can show the line that
        # raised.
        codes = [getattr(_functions[name], "__code__", None) for name in pickled]
        files = {code.co_filename for code in codes if code}
        lines = {file: linecache.getlines(file) for file in files if not os.path.exists(file)}
        copies = {name: _copies[name] for name in pickled}
        pathlib.Path(self.path).write_bytes(cloudpickle.dumps((copies, lines)))

    def close(self) -> None:
        """Delete the file."""
        if self.path:
            self._folder.cleanup()


def load_copies(path: str) -> None:
    """Register the functions that `FunctionCopies` of the parent wrote; none if it is empty."""
    if path:
        copies, lines = cloudpickle.loads(pathlib.Path(path).read_bytes())
        for file, texts in lines.items():
            linecache.cache[file] = (sum(map(len, texts)), None, texts, file)
        _functions.update({name: cloudpickle.loads(copy) for name, copy in copies.items()})
