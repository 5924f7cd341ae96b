"""The shape of the house: one direction of imports, short files, short functions."""

import ast
import pathlib
import re

import pytest

from dapo_jax import algorithms
from dapo_jax.experiment.config import (
    Config,
    DpoConfig,
    ExportConfig,
    ReportConfig,
    ServeConfig,
    SftConfig,
)
from dapo_jax.experiment.settings import leaves
from dapo_jax.reporting import metrics

ROOT = pathlib.Path(__file__).parent.parent
SOURCES = sorted(p for p in (ROOT / "dapo_jax").rglob("*.py") if p.name != "__init__.py")

# Floor by floor: a file imports only from what stands above it. A folder is one floor; `/name`
# is a file that stands beside the folders (`algorithms` is the second file that newcomers open).
FLOORS = """
verifier   extraction normalisation numerals structure units equivalence conventions trees
           tokens expressions budgets enclosures polynomials fields roots functions readings
           algebra regions judgement worker minerva verifier process remote jail
experiment settings hooks /algorithms devices sections watch checkpoint config combinations
           validation files
           /structs /sharding /finite /watch /processes /marks /storage /lines /folders
prompts    sandbox rendering chat tokenizer templates
data       arithmetic harmless gym formats readers files sources pipeline turns examples
model      blocked splash attention decode_attention decoder inference families trained names
           huggingface saving head logprobs
sampler    sampling pages slots page_store loading decoding jetstream engine served requests
           rollout
learner    advantages losses packing traces skipped optimizer update policy critic
rewards    functions worker pool rule model judge
           /carrying /finished /filtering
evaluation scores responses evaluation
reporting  metrics tracking writers plots tables progress watched notices recorded readings
           compared page
           /memory /assembly /checksums /same_run /checkpoints /keeping /explain /cli /parts
           /signals /halfway /offline /supervised /preferences /orders /train /states /begun
           /resuming /run
           /scoring /driving /generation /serving /http_requests /http_api
plan       compiled traffic chips cuda devices shapes programs measure laws costs rooms simulate
           calibrate roofline estimate settings advice report planning search __main__
           /main /evaluate /sft /dpo /export /replay /serve /report /api
"""


def _rooms() -> list[str]:
    rooms, folder = [], ""
    for line in FLOORS.strip().splitlines():
        first, *names = line.split()
        if line.startswith(" "):
            names.insert(0, first)
        else:
            folder = first
        rooms += [name[1:] if name[0] == "/" else f"{folder}.{name}" for name in names]
    return rooms


ROOMS = _rooms()

# What only reinforcement learning reads does not count.
OFFLINE_ROOMS = (
    "offline halfway data.turns data.examples assembly learner.update learner.policy "
    "learner.optimizer sharding model.attention model.decoder"
).split()
ROOMS_OF = {
    SftConfig: ["supervised", "data.arithmetic", *OFFLINE_ROOMS],
    DpoConfig: ["preferences", *OFFLINE_ROOMS],
    ExportConfig: ["export"],
    ServeConfig: ["serve"],
    ReportConfig: ["report", "reporting.page"],
}


def room(path: pathlib.Path) -> str:
    return ".".join(path.relative_to(ROOT / "dapo_jax").with_suffix("").parts)


def imported_rooms(path: pathlib.Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("dapo_jax"):
            below = node.module.removeprefix("dapo_jax").lstrip(".")
            for alias in node.names:
                joined = f"{below}.{alias.name}".lstrip(".")
                names.add(joined if joined in ROOMS else below)
        elif isinstance(node, ast.Import):
            assert not any(alias.name.startswith("dapo_jax") for alias in node.names), path
    return names - {""}


def test_every_file_is_a_known_room():
    assert {room(path) for path in SOURCES} == set(ROOMS)


@pytest.mark.parametrize("path", SOURCES, ids=room)
def test_rooms_import_only_from_rooms_above(path):
    above = ROOMS[: ROOMS.index(room(path))]
    wrong = sorted(imported_rooms(path) - set(above))
    assert not wrong, f"{room(path)} imports {wrong}, which stand below it"


def test_a_folder_is_one_floor():
    """So that the order of files is an order of folders too."""
    names = [line.split()[0] for line in FLOORS.strip().splitlines() if not line.startswith(" ")]
    folders = {path.parent.name for path in SOURCES if path.parent.name != "dapo_jax"}
    assert len(names) == len(set(names)) and set(names) == folders


def test_only_the_engines_side_and_the_server_import_jetstream():
    users = {
        room(path) for path in SOURCES if re.search(r"(from|import) jetstream", path.read_text())
    }
    assert users == {"sampler.jetstream", "driving", "serving"}


@pytest.mark.parametrize("folder", ["dapo_jax", "configs", "tests", "notebooks"])
def test_files_and_functions_stay_short(folder):
    for path in sorted((ROOT / folder).rglob("*.py")):
        text = path.read_text()
        # What stands between the cells of a notebook is text to read.
        said = "#" if folder == "notebooks" else "\0"
        code = [line for line in text.splitlines() if not line.startswith(said)]
        assert len(code) <= 350, path
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef):
                length = node.end_lineno - node.lineno + 1
                assert length <= 60, f"{path}:{node.name} has {length} lines"


def test_prompts_to_update_reads_in_sixty_lines():
    tree = ast.parse((ROOT / "dapo_jax/train.py").read_text())
    lengths = {
        node.name: node.end_lineno - node.lineno + 1
        for node in tree.body
        if isinstance(node, ast.FunctionDef)
    }
    assert lengths["train_step"] + lengths["update_policy"] <= 60


KINDS = (Config, SftConfig, DpoConfig, ExportConfig, ServeConfig, ReportConfig)
# What a section is called where it is not called by its name.
CALLED = {"architecture": ("shape",)}


@pytest.mark.parametrize("kind", KINDS)
def test_every_setting_has_a_reader(kind):
    # A setting that its own config resolves is read; one that is only checked is not.
    checkers = ("experiment.combinations", "experiment.validation", "algorithms")
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


def test_the_docs_explain_every_metric_and_preset():
    for page, names in ("metrics", metrics.MEANINGS), ("algorithms", algorithms.PRESETS):
        text = (ROOT / f"docs/{page}.md").read_text()
        missing = [name for name in names if f"`{name}`" not in text]
        assert not missing, f"docs/{page}.md lacks {missing}"
