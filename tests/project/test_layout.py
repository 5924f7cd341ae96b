"""The shape of the house: one direction of imports, short files, short functions."""

import ast
import pathlib
import re

import pytest

from dapo_jax.config.experiment import (
    Config,
    DpoConfig,
    ExportConfig,
    ReportConfig,
    ServeConfig,
    SftConfig,
)
from dapo_jax.runtime.settings import leaves

ROOT = pathlib.Path(__file__).parents[2]
SOURCES = sorted(p for p in (ROOT / "dapo_jax").rglob("*.py") if p.name != "__init__.py")

# Top floor of the library; an entry imports only from those before it.
FLOORS = (
    "structs contracts runtime config algorithms verifier rewards data environments model rollout "
    "learner train reporting run commands"
).split()

# What only reinforcement learning reads does not count.
OFFLINE_ROOMS = (
    "run.supervised.common run.supervised.training run.supervised.resume "
    "data.supervised run.compute learner.update learner.policy "
    "learner.optimizer runtime.sharding "
    "model.training_attention model.decoder model.trainable"
).split()
ROOMS_OF = {
    SftConfig: ["run.supervised.sft", "data.arithmetic", *OFFLINE_ROOMS],
    DpoConfig: ["run.supervised.dpo", *OFFLINE_ROOMS],
    ExportConfig: ["run.export", "run.hub", "reporting.model_card"],
    ServeConfig: [
        "commands.serve.server",
        "commands.serve.access",
        "commands.serve.budgets",
        "run.compute",
    ],
    ReportConfig: ["commands.report", "reporting.page.page"],
}


def room(path: pathlib.Path) -> str:
    return ".".join(path.relative_to(ROOT / "dapo_jax").with_suffix("").parts)


def imported_entries(path: pathlib.Path) -> set[str]:
    """Entries of the top floor that a file imports from."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("dapo_jax."):
            names.add((node.module or "").split(".")[1])
        elif isinstance(node, ast.ImportFrom) and node.module == "dapo_jax":
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            assert not any(alias.name.startswith("dapo_jax") for alias in node.names), path
    return names


def test_the_top_floor_is_what_the_order_names():
    entries = {p.stem for p in (ROOT / "dapo_jax").iterdir() if p.is_dir() or p.suffix == ".py"}
    assert entries - {"__init__", "__main__", "__pycache__"} == set(FLOORS)


@pytest.mark.parametrize("entry", FLOORS)
def test_an_entry_imports_only_from_those_before_it(entry):
    before = {*FLOORS[: FLOORS.index(entry)], entry}
    for path in SOURCES:
        if room(path).split(".")[0] == entry:
            assert imported_entries(path) <= before, path


def test_only_the_engines_side_and_the_server_import_jetstream():
    users = {
        room(path) for path in SOURCES if re.search(r"(from|import) jetstream", path.read_text())
    }
    assert users == {
        "rollout.jetstream_api",
        "commands.serve.jetstream_server",
    }


@pytest.mark.parametrize("folder", ["dapo_jax", "configs", "tests", "notebooks"])
def test_functions_stay_short(folder):
    for path in sorted((ROOT / folder).rglob("*.py")):
        text = path.read_text()
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef):
                length = node.end_lineno - node.lineno + 1
                assert length <= 60, f"{path}:{node.name} has {length} lines"


def test_the_algorithm_reads_in_eighty_lines():
    text = (ROOT / "dapo_jax/train.py").read_text()
    lengths = {
        node.name: node.end_lineno - node.body[1].lineno + 1  # without its docstring
        for node in ast.parse(text).body
        if isinstance(node, ast.FunctionDef)
    }
    assert len(text.splitlines()) <= 90 and lengths["train_step"] <= 20


KINDS = (Config, SftConfig, DpoConfig, ExportConfig, ServeConfig, ReportConfig)
# What a section is called where it is not called by its name.
CALLED = {"architecture": ("shape",)}


@pytest.mark.parametrize("kind", KINDS)
def test_every_setting_has_a_reader(kind):
    # A setting that its own config resolves is read; one that is only checked is not.
    checkers = ("config.algorithm", "config.validation", "algorithms")
    readers = [path for path in SOURCES if not room(path).startswith(checkers)]
    if kind in ROOMS_OF:
        readers = [path for path in readers if room(path) in ROOMS_OF[kind]]
    code = "\n".join(path.read_text() for path in readers)
    for name, field, _ in leaves(kind()):
        section = name.split(".")[-2] if "." in name else "config"
        owners = "|".join((section, *CALLED.get(section, ()), "self", "settings"))
        read = rf"\b_?(?:{owners})\.{field.name}\b"
        assert re.search(read, code), f"nothing reads config.{name}"
        assert field.metadata["explanation"]
