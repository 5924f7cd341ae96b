"""The notebooks are made from their scripts, hold their outputs, and run."""

import ast
import importlib.util
import os
import pathlib
import re
from typing import Any

import nbformat
import pytest
import zmq
from jupyter_client import AsyncKernelManager
from jupyter_core.utils import run_sync
from nbclient import NotebookClient

import dapo_jax

ROOT = pathlib.Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
EACH = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


class Client(NotebookClient):
    """Notebook client that looks for a reply whenever it has sent the kernel something.

    jupyter_client sends a widget's state through a blocking shadow of the socket, which swallows
    the signal of a reply that arrives at that moment: it was then waited for for ever. Reading the
    socket's events schedules what has arrived.
    """

    async def async_start_new_kernel_client(self) -> Any:
        client = await super().async_start_new_kernel_client()
        channel: Any = client.shell_channel
        send = channel.send

        def send_and_look(message: dict) -> None:
            send(message)
            channel.socket.get(zmq.EVENTS)

        channel.send = send_and_look
        return client


def in_kernel(kernel: AsyncKernelManager, notebook: nbformat.NotebookNode, source: str) -> None:
    """Run a notebook in a kernel that is there, in a namespace without the names of earlier ones.

    `source` runs before the cells, and is no part of the notebook.
    """
    whole = "%config InlineBackend.print_figure_kwargs = {'bbox_inches': None}"  # not drawn twice
    magic = "%reset -f", "%matplotlib inline", whole, source
    first = nbformat.v4.new_code_cell("\n".join(magic))
    notebook.cells.insert(0, first)
    client: Any = Client(notebook, km=kernel, timeout=300)
    client.execute()
    client.kc.stop_channels()
    notebook.cells.remove(first)


@pytest.fixture(scope="module")
def kernel():
    """A kernel with one device for all notebooks: each new one would import JAX again."""
    manager = AsyncKernelManager(kernel_name="python3")
    flags = os.environ["XLA_FLAGS"] + " --xla_force_host_platform_device_count=1"  # the last counts
    environment = {"PYTHONPATH": str(ROOT), "DAPO_NOTEBOOK_QUICK": "1", "XLA_FLAGS": flags}
    run_sync(manager.start_kernel)(env=os.environ | environment)
    yield manager
    run_sync(manager.shutdown_kernel)(now=True)


@pytest.fixture(scope="module")
def build():
    spec = importlib.util.spec_from_file_location("build", ROOT / "notebooks/build.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def outputs_of(notebook) -> list:
    return [output for cell in notebook.cells for output in cell.get("outputs", ())]


def pictures_in(outputs: list) -> int:
    return sum("image/png" in output.get("data", {}) for output in outputs)


def errors_in(outputs: list) -> list[str]:
    return [output["evalue"] for output in outputs if output["output_type"] == "error"]


def widget_outputs(notebook) -> list[list]:
    """Return the outputs of each widget: a cell does not fail if a slider's function does."""
    kind = "application/vnd.jupyter.widget-state+json"
    models = notebook.metadata.get("widgets", {}).get(kind, {"state": {}})["state"].values()
    return [m["state"]["outputs"] for m in models if m["model_name"] == "OutputModel"]


def test_every_script_has_its_notebook_and_every_notebook_its_script(build):
    assert NOTEBOOKS and {p.stem for p in NOTEBOOKS} == {p.stem for p in build.SOURCES}


@EACH
def test_a_notebook_is_what_its_script_makes(path, build):
    made, notebook = build.make(path.with_suffix(".py")), nbformat.read(path, as_version=4)
    names = "id", "cell_type", "source", "metadata"
    for cell, expected in zip(notebook.cells, made.cells, strict=True):
        assert [cell[name] for name in names] == [expected[name] for name in names]
    assert nbformat.validate(notebook) is None


@EACH
def test_a_notebook_imports_nothing_of_ours_but_the_api(path):
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


@pytest.mark.slow
@EACH
def test_a_notebook_runs_from_top_to_bottom(path, kernel, tmp_path):
    """With sliders, in sizes that teach nothing."""
    kept, ran = (nbformat.read(path, as_version=4) for _ in range(2))
    in_kernel(kernel, ran, f"%cd -q {tmp_path}")
    widgets = widget_outputs(ran)
    outputs = sum(widgets, outputs_of(ran))
    assert not errors_in(outputs)
    # A picture in a widget for each that is committed, and as many in all.
    assert pictures_in(outputs) == pictures_in(outputs_of(kept))
    assert len(widgets) == sum(cell.source.count("\nplay(") for cell in ran.cells)
