"""What a reader pays: the code that the training loop needs, and the size of everything else.

Every bound is a measured number that may only fall. `pytest tests/project/test_structure.py -s`
prints the numbers of today.
"""

import ast
import functools
import pathlib
import re
import subprocess
import sys

import pytest
from test_layout import LIBRARY, ROOT, tree_of

LOOP = "dapo_jax.run.loop"
MAX_CLOSURE_LINES = 23_301
MAX_CLOSURE_MODULES = 104
MAX_ARROWS = 45
MAX_LIBRARY_LINES = 41_653
MAX_TEST_LINES = 32_663
# Lines of an extra, at most.
EXTRAS = {
    "alerts": 150,
    "arithmetic": 136,
    "code": 711,
    "distillation": 270,
    "doctor": 180,
    "environments": 450,
    "exact": 161,
    "families": 600,
    "gguf": 300,
    "gym": 190,
    "init": 150,
    "jetstream": 162,
    "judge": 205,
    "math": 4_004,
    "plan": 950,
    "report": 395,
    "samplers": 899,
    "serve": 1_245,
    "sft": 862,
    "tinker": 1_559,
    "trackers": 142,
    "vllm": 260,
    "words": 170,
}
# Extras that may use another one.
USES = {
    ("doctor", "plan"),
    ("init", "math"),
    ("report", "alerts"),
    ("report", "plan"),
    ("serve", "tinker"),
    ("sft", "arithmetic"),
    ("tinker", "serve"),
}
WALK = ROOT / "docs/architecture.md"


def name_of(path: pathlib.Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {name_of(path): path for path in sorted(LIBRARY.rglob("*.py"))}


@functools.cache
def imports(module: str) -> frozenset[str]:
    """Return the modules of the package that a module imports, also inside functions."""
    tree = tree_of(FILES[module])
    unseen = {
        id(node)
        for guard in ast.walk(tree)
        if isinstance(guard, ast.If) and "TYPE_CHECKING" in ast.dump(guard.test)
        for node in ast.walk(guard)
    }
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and id(node) not in unseen:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            found |= {name if name in FILES else node.module for name in names}
    return frozenset(found & FILES.keys() - {module, "dapo_jax"})


def closure() -> set[str]:
    """Return the modules that the training loop imports, transitively."""
    seen, left = set(), [LOOP]
    while left:
        module = left.pop()
        if module not in seen:
            seen.add(module)
            left += imports(module)
    return seen


def lines(path: pathlib.Path) -> int:
    """Return the number of lines of a file, or of all Python files in a folder."""
    files = path.rglob("*.py") if path.is_dir() else [path]
    return sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files)


def is_extra(module: str) -> bool:
    return module.startswith("dapo_jax.extras")


def test_the_training_loop_needs_little_code():
    modules = closure()
    total = sum(lines(FILES[module]) for module in modules)
    print(f"closure of {LOOP}: {total:,} lines, {len(modules)} modules")
    assert total <= MAX_CLOSURE_LINES and len(modules) <= MAX_CLOSURE_MODULES


def test_no_module_of_the_core_imports_an_extra():
    assert not {
        (module, used)
        for module in FILES
        if not is_extra(module)
        for used in imports(module)
        if is_extra(used)
    }


def test_importing_the_loop_loads_no_extra():
    """Nor does a registry import what nobody asked for."""
    code = f"import sys, {LOOP}; print([m for m in sys.modules if m.startswith('dapo_jax.extras')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_entries_of_the_package_have_few_imports_between_them():
    def entry(module: str) -> str:
        return module.split(".")[1]

    pairs = {(entry(m), entry(used)) for m in FILES if m != "dapo_jax" for used in imports(m)}
    arrows = {(user, used) for user, used in pairs if user != used}
    print(f"{len(arrows)} arrows")
    assert len(arrows) <= MAX_ARROWS


def test_library_and_tests_stay_small():
    library, tests = lines(LIBRARY), lines(ROOT / "tests")
    print(f"library {library:,} lines, tests {tests:,}")
    assert library <= MAX_LIBRARY_LINES and tests <= MAX_TEST_LINES


@pytest.mark.parametrize("name", EXTRAS)
def test_an_extra_keeps_its_limit(name):
    folder = LIBRARY / "extras" / name
    size = lines(folder if folder.is_dir() else folder.with_suffix(".py"))
    print(f"{name}: {size:,} of {EXTRAS[name]:,} lines")
    assert size <= EXTRAS[name]


def test_every_extra_has_a_limit():
    folder = LIBRARY / "extras"
    names = {path.stem for path in folder.glob("*") if path.suffix == ".py" or lines(path)}
    assert names - {"__init__", "__pycache__"} == EXTRAS.keys()


def test_extras_use_few_others():
    def extra(module: str) -> str:
        return module.split(".")[2]

    used = {
        (extra(module), extra(other))
        for module in filter(is_extra, FILES)
        for other in filter(is_extra, imports(module))
        if module != "dapo_jax.extras" != other
    }
    assert {(user, other) for user, other in used if user != other} <= USES


def test_the_files_of_a_prompts_walk_exist():
    """The list in docs/architecture.md: what a prompt passes, from the command to the metrics."""
    text = WALK.read_text(encoding="utf-8").partition("## The walk of a prompt")[2]
    files = re.findall(r"`([\w/]+\.py)`", text.partition("\n## ")[0])
    total = sum(lines(LIBRARY / file) for file in files)
    print(f"walk: {len(files)} files, {total:,} lines")
    assert len(files) == len({*files}) <= 60 and total <= 15_000
