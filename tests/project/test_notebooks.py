"""The notebooks are what their scripts say, show what they showed, and run from top to bottom."""

import ast
import importlib.util
import os
import pathlib
import re
import time

import nbformat
import pytest
from nbclient.output_widget import OutputWidget
from notebook_client import execute

import dapo_jax

ROOT = pathlib.Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
EACH = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


@pytest.fixture(scope="module")
def build():
    spec = importlib.util.spec_from_file_location("build", ROOT / "notebooks/build.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def outputs_of(notebook) -> list:
    return [one for cell in notebook.cells if cell.cell_type == "code" for one in cell.outputs]


def pictures_in(outputs: list) -> int:
    return sum("image/png" in one.get("data", {}) for one in outputs)


def errors_in(outputs: list) -> list[str]:
    return [one["evalue"] for one in outputs if one["output_type"] == "error"]


def widget_outputs(notebook) -> list[list]:
    """What each output of a widget holds: a cell does not fail where a slider's function does."""
    state = notebook.metadata.get("widgets", {}).get(
        "application/vnd.jupyter.widget-state+json", {"state": {}}
    )["state"]
    return [
        model["state"]["outputs"]
        for model in state.values()
        if model["model_name"] == "OutputModel"
    ]


def test_every_script_has_its_notebook_and_every_notebook_its_script(build):
    assert NOTEBOOKS and {p.stem for p in NOTEBOOKS} == {p.stem for p in build.SOURCES}


@EACH
def test_a_notebook_is_what_its_script_makes(path, build):
    made, found = build.make(path.with_suffix(".py")), nbformat.read(path, as_version=4)
    kept = [(cell.id, cell.cell_type, cell.source, cell.metadata) for cell in found.cells]
    assert kept == [(cell.id, cell.cell_type, cell.source, cell.metadata) for cell in made.cells]
    assert nbformat.validate(found) is None


@EACH
def test_a_notebook_imports_nothing_of_ours_but_the_api(path):
    """`notebooks` is the folder itself: what was measured for a notebook is read by a module."""
    code = "\n".join(
        re.sub(r"^(\s*)%.*$", r"\1pass", cell.source, flags=re.MULTILINE)
        for cell in nbformat.read(path, as_version=4).cells
        if cell.cell_type == "code"
    )
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            named = {alias.name for alias in node.names}
            assert all(not name.startswith("dapo_jax.") for name in named), named
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("dapo_jax"):
            assert node.module == "dapo_jax"
            assert {alias.name for alias in node.names} <= set(dapo_jax.__all__)


@EACH
def test_a_notebook_is_committed_as_it_ran_and_small(path):
    notebook = nbformat.read(path, as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == [*range(1, len(code) + 1)]
    assert pictures_in(outputs_of(notebook)) >= 3 and not errors_in(outputs_of(notebook))
    assert "widget-view" not in path.read_text()  # what is blank where nothing runs
    assert path.stat().st_size < 1e6


def test_one_address_stands_in_every_place(build):
    pages = [*NOTEBOOKS, *ROOT.glob("docs/*.md"), ROOT / "README.md"]
    own = re.compile(r"https://(?:github\.com|colab\.research\.google\.com/github)/[\w-]+/dapo_jax")
    for page in pages:
        found = set(own.findall(page.read_text(encoding="utf-8")))
        assert found <= {build.REPOSITORY, build.COLAB}, page
        assert page.suffix == ".md" or len(found) == 2, f"{page} is not installed or opened"


@EACH
def test_a_notebook_runs_from_top_to_bottom(path, tmp_path):
    """With sliders, in sizes that teach nothing."""
    kept, ran = (nbformat.read(path, as_version=4) for _ in range(2))
    flags = os.environ["XLA_FLAGS"] + " --xla_force_host_platform_device_count=1"  # the last counts
    execute(ran, tmp_path, DAPO_NOTEBOOK_QUICK="1", XLA_FLAGS=flags)
    widgets = widget_outputs(ran)
    outputs = [*outputs_of(ran), *(one for outputs in widgets for one in outputs)]
    assert not errors_in(outputs)
    # A picture in a widget for each that is committed, and as many in all.
    assert pictures_in(outputs) == pictures_in(outputs_of(kept))
    assert len(widgets) == sum(cell.source.count("\nplay(") for cell in ran.cells)


def test_a_reply_that_comes_while_a_widget_is_updated_and_an_error_behind_a_slider_are_seen(
    tmp_path, monkeypatch
):
    """The client is slow with a widget's state, as on a busy machine: the cell's reply is there."""
    send = OutputWidget.send

    def send_late(self, *args, **options):
        time.sleep(0.5)
        send(self, *args, **options)

    monkeypatch.setattr(OutputWidget, "send", send_late)
    code = "import ipywidgets\nipywidgets.interact(lambda i: 1 / i, i=(0, 0))"
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code)])
    started = time.monotonic()
    execute(notebook, tmp_path)
    assert time.monotonic() - started < 120  # of 300 for a cell whose reply is missed
    (outputs,) = widget_outputs(notebook)
    assert errors_in(outputs) == ["division by zero"]
