"""The notebooks are what their scripts say, show what they showed, and run from top to bottom."""

import importlib.util
import os
import pathlib
import re
import subprocess
import sys

import nbformat
import pytest

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


def converted(path: pathlib.Path, folder: pathlib.Path) -> subprocess.CompletedProcess | None:
    """What nbconvert said of a copy there; None where it waits for a kernel that has answered.

    Rarely, with widgets on a busy machine, it does so for ever.
    """
    (folder / path.name).write_bytes(path.read_bytes())
    command = "jupyter nbconvert --to notebook --execute --inplace --log-level=ERROR".split()
    environment = os.environ | {"DAPO_NOTEBOOK_QUICK": "1", "PYTHONPATH": str(ROOT)}
    environment["XLA_FLAGS"] += " --xla_force_host_platform_device_count=1"  # the last one counts
    whole = [sys.executable, "-m", *command, path.name]
    options = {"cwd": folder, "env": environment, "capture_output": True, "text": True}
    try:
        return subprocess.run(whole, timeout=120, **options)
    except subprocess.TimeoutExpired:
        return None


@EACH
def test_a_notebook_runs_from_top_to_bottom(path, tmp_path):
    """By a user's command, with sliders, in sizes that teach nothing."""
    kept = nbformat.read(path, as_version=4)
    done = next(filter(None, (converted(path, tmp_path) for _ in range(3))), None)
    assert done and done.returncode == 0, done and done.stderr[-3000:]
    ran = nbformat.read(tmp_path / path.name, as_version=4)
    widgets = widget_outputs(ran)
    outputs = [*outputs_of(ran), *(one for outputs in widgets for one in outputs)]
    assert not errors_in(outputs)
    # A picture in a widget for each that is committed, and as many in all.
    assert pictures_in(outputs) == pictures_in(outputs_of(kept))
    assert len(widgets) == sum(cell.source.count("\nplay(") for cell in ran.cells)


def test_an_error_behind_a_slider_is_seen(tmp_path):
    code = "import ipywidgets\nipywidgets.interact(lambda i: 1 / i, i=(0, 0))"
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code)])
    nbformat.write(notebook, tmp_path / "a.ipynb")
    command = "jupyter nbconvert --to notebook --execute --inplace a.ipynb".split()
    subprocess.run([sys.executable, "-m", *command], cwd=tmp_path, check=True)
    (outputs,) = widget_outputs(nbformat.read(tmp_path / "a.ipynb", as_version=4))
    assert errors_in(outputs) == ["division by zero"]
