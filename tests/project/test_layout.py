"""The structure of the library: imports, short functions, settings in use, no data run as code."""

import ast
import dataclasses
import functools
import importlib
import pathlib
import re

from dapo_jax.config.settings import Section
from dapo_jax.runtime.sharding import AXES

ROOT = pathlib.Path(__file__).parents[2]
LIBRARY = ROOT / "dapo_jax"
SOURCES = sorted(LIBRARY.rglob("*.py"))
MAX_ARROWS = 44  # imports between top-level packages
MAX_FUNCTION_LINES = 60

# The top-level packages; each imports only from those before it.
PACKAGES = (
    "types runtime config data rewards model rollout learner step run commands extras"
).split()
PRIVATE = re.compile(r"jax\._src|orbax\.[\w.]*_src|ctypes|_getframe")
# What would run data as code.
CALLS = {"eval", "exec", "compile", "__import__"}
ATTRIBUTES = {("os", "system"), ("os", "popen"), ("yaml", "load"), ("builtins", "eval")}
MODULES = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "code", "codeop"}
# Copies of functions that the program itself has made, in a folder that only it may write.
ALLOWED = {
    "dapo_jax/runtime/workers/pickled_functions.py": ["cloudpickle"],
    "dapo_jax/extras/code/driver.py": ["exec"],  # a row's tests, inside a sandbox
}


@functools.cache
def tree_of(path: pathlib.Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def package_of(path: pathlib.Path) -> str:
    return path.relative_to(LIBRARY).parts[0].removesuffix(".py")


def imported_packages(path: pathlib.Path) -> set[str]:
    """Return the top-level packages that a file imports from."""
    names = set()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("dapo_jax."):
            names.add(node.module.split(".")[1])
        elif isinstance(node, ast.ImportFrom) and node.module == "dapo_jax":
            names |= {alias.name for alias in node.names} - {"__version__"}
        elif isinstance(node, ast.Import):
            assert not any(alias.name.startswith("dapo_jax") for alias in node.names), path
    return names


def arrows() -> set[tuple[str, str]]:
    """Return the pairs of different packages of which the first imports from the second."""
    pairs = {(package_of(path), name) for path in SOURCES for name in imported_packages(path)}
    return {(user, used) for user, used in pairs if user != used and user in PACKAGES}


def test_every_package_is_in_the_order():
    entries = {p.stem for p in LIBRARY.iterdir() if p.is_dir() or p.suffix == ".py"}
    assert entries - {"__init__", "__main__", "__pycache__"} == set(PACKAGES)


def test_packages_import_only_from_those_before_them_and_from_few():
    upward = {(a, b) for a, b in arrows() if PACKAGES.index(a) < PACKAGES.index(b)}
    assert not upward
    assert len(arrows()) <= MAX_ARROWS


def test_only_the_engine_imports_jetstream():
    users = {
        path.relative_to(LIBRARY).as_posix()
        for path in SOURCES
        if re.search(r"(from|import) jetstream", path.read_text(encoding="utf-8"))
    }
    assert users == {"extras/jetstream.py"}


def test_the_library_uses_no_private_interface():
    users = {
        f"{path.relative_to(ROOT)}: {match[0]}"
        for path in SOURCES
        for match in PRIVATE.finditer(path.read_text(encoding="utf-8"))
    }
    # cuDNN's packed rows: `jax.nn.dot_product_attention` has no offsets yet (jax-ml/jax#29731).
    assert users == {"dapo_jax/model/cudnn_attention.py: jax._src"}


def test_functions_stay_short():
    folders = ("dapo_jax", "configs", "tests", "notebooks")
    paths = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    long = {
        f"{path.relative_to(ROOT)}:{node.name}"
        for path in paths
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.end_lineno - node.lineno + 1 > MAX_FUNCTION_LINES
    }
    assert not long


def test_a_training_step_stays_readable():
    body = tree_of(LIBRARY / "step.py").body
    (step,) = (node for node in body if getattr(node, "name", "") == "train_step")
    assert step.end_lineno - step.lineno + 1 <= 25


def sections() -> list[type]:
    """Return every class of settings."""
    for path in SOURCES:
        if "(Section):" in path.read_text(encoding="utf-8"):
            importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))
    kinds: list[type] = [Section]
    for kind in kinds:
        kinds += kind.__subclasses__()
    return kinds[1:]


def test_every_setting_has_a_reader_and_an_explanation():
    # Not in modules that only declare, preset or check settings.
    passive = {*LIBRARY.glob("config/*.py")}
    readers = set(SOURCES) - passive | {LIBRARY / "config/experiment.py"}
    nodes = [node for path in readers for node in ast.walk(tree_of(path))]
    loaded = [n for n in nodes if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Load)]
    attributes = {node.attr for node in loaded} | {*AXES}  # `mesh_sizes` reads them by name
    # A table of thresholds names its settings.
    named = {node.value for node in nodes if isinstance(node, ast.Constant)}
    for kind in sections():
        for field in dataclasses.fields(kind):
            name = f"{kind.__name__.lower()}.{field.name}"
            assert field.name in attributes or name in named, f"nothing reads {name}"
            assert field.default is dataclasses.MISSING or field.metadata["explanation"]


def reasons(text: str) -> list[str]:
    """Return the names in a module's text that would run data."""
    names = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in CALLS:
            names.append(node.func.id)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            names += [node.attr] * ((node.value.id, node.attr) in ATTRIBUTES)
        if isinstance(node, ast.keyword) and isinstance(node.value, ast.Constant):
            names += [node.arg] * (node.arg in ("shell", "allow_pickle") and bool(node.value.value))
        if isinstance(node, ast.Import | ast.ImportFrom):
            imported = [alias.name for alias in node.names] + [getattr(node, "module", None) or ""]
            names += [name for name in imported if name.split(".")[0] in MODULES]
    return names


def test_no_module_runs_data():
    all_reasons = {str(path.relative_to(ROOT)): reasons(path.read_text()) for path in SOURCES}
    assert {path: names for path, names in all_reasons.items() if names} == ALLOWED
