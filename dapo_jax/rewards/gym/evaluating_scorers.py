"""Refusal of reasoning-gym tasks whose scorers evaluate the answer.

An answer is text that a model wrote, and is never evaluated. The scorers of nine tasks hand it to
`eval`, or to sympy's parser, which is `eval` as well: these tasks are refused by name. A task of
another release is refused where the source of its scorer could evaluate anything.
"""

import ast
import functools
import importlib.util
import pathlib
import sys
from typing import Any

EVALUATING = frozenset(
    "binary_matrix countdown intermediate_integration n_queens polynomial_multiplication puzzle24 "
    "simple_integration spiral_matrix string_insertion".split()
)

# Tasks of release 0.1.25 whose modules evaluate texts of their own, but read the answer.
READING = frozenset(
    "advanced_geometry basic_arithmetic bf bitwise_arithmetic codeio decimal_arithmetic "
    "gsm_symbolic number_sorting polynomial_equations propositional_logic simple_equations".split()
)

# Names that evaluate text or run programs, and modules that hold such names.
_EVALUATORS = frozenset(
    "eval exec compile __import__ import_module literal_eval sympify parse_expr parse_latex "
    "lambdify system popen Popen run_path run_module".split()
)
_MODULES = frozenset(
    "sympy ast code codeop subprocess os pickle dill cloudpickle marshal shelve runpy ctypes "
    "multiprocessing numexpr pandas jinja2 builtins".split()
)


def refusal(task: str, dataset: Any) -> str | None:
    """Reason why the scorer of a task gets no answer; None where it may read answers.

    Args:
        dataset: the task's object, of a class of the package.
    """
    if task in EVALUATING:
        return "its scorer evaluates the answer"
    if task in READING:
        return None
    try:
        names = ", ".join(evaluators(type(dataset)))
    except (OSError, SyntaxError) as error:
        return f"whether its scorer evaluates text can't be seen: {error}"
    return f"its scorer may evaluate text ({names}), and nobody has looked at it" if names else None


@functools.lru_cache(maxsize=1024)
def _read_module(name: str) -> tuple[frozenset[str], frozenset[str]]:
    """The evaluators in a module's source, and the modules of the same package it imports.

    Raises OSError where there is no source to read.
    """
    loaded = sys.modules.get(name)
    spec = getattr(loaded, "__spec__", None) or importlib.util.find_spec(name)
    origin = getattr(loaded, "__file__", None) or (spec and spec.origin)
    if not origin or not origin.endswith(".py"):
        raise OSError(f"the source of {name} can't be read")
    package = name if origin.endswith("__init__.py") else name.rpartition(".")[0]
    used, imported = set(), set()
    for node in ast.walk(ast.parse(pathlib.Path(origin).read_bytes())):
        match node:
            case ast.Name(id=identifier):
                used.add(identifier)
            case ast.Attribute(value=owner, attr=identifier):
                if not (
                    isinstance(owner, ast.Name) and (owner.id, identifier) == ("re", "compile")
                ):
                    used.add(identifier)
            case ast.Import(names=aliases):
                imported |= {alias.name for alias in aliases}
            case ast.ImportFrom(module=module, names=aliases, level=level):
                base = importlib.util.resolve_name("." * level + (module or ""), package)
                imported |= {base} | {f"{base}.{alias.name}" for alias in aliases}
    top = name.partition(".")[0]
    own = {module for module in imported if module.partition(".")[0] == top}
    modules = {module.partition(".")[0] for module in imported}
    return frozenset(used & _EVALUATORS | modules & _MODULES), frozenset(own)


def _is_module(name: str) -> bool:
    try:
        return name in sys.modules or importlib.util.find_spec(name) is not None
    except ImportError:
        return False


def evaluators(dataset: type) -> list[str]:
    """Names that could evaluate text in the modules of a class and in their imports, sorted.

    Only modules of the class's own package count, without the package's lists of its tasks. Raises
    OSError where a source can't be read.
    """
    package = dataset.__module__.partition(".")[0]
    waiting = {kind.__module__ for kind in dataset.__mro__}
    waiting = {name for name in waiting if name.partition(".")[0] == package}
    seen, names = set(), set()
    while waiting:
        module = waiting.pop()
        seen.add(module)
        evaluating, imported = _read_module(module)
        names |= evaluating
        waiting |= {name for name in imported - seen - {package} if _is_module(name)}
    return sorted(names)
