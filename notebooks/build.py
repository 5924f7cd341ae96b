"""Makes the notebooks out of the scripts beside this file, runs them, and keeps what they showed.

    python notebooks/build.py                            all of them: minutes
    python notebooks/build.py 1_loss_playground          one

A script is the source (jupytext's percent format); its .ipynb is never edited. Each begins with a
cell that installs dapo_jax, which stands here once.
"""

import argparse
import base64
import io
import os
import pathlib
import sys
import tempfile

import jupytext
import nbformat
from nbclient import NotebookClient
from PIL import Image

HERE = pathlib.Path(__file__).resolve().parent
SOURCES = sorted(HERE.glob("[0-9]_*.py"))
SECONDS = 1800  # for one cell, on a slow machine
COLOURS = 128  # of a picture: a third of its bytes, and no difference to the eye

INSTALL = """\
# @title Install dapo_jax from its wheel
# No package index has it yet: make the wheel in a checkout (`pip wheel --no-deps .`), upload it.
# Colab may then ask to restart its runtime.
import glob
import importlib.util
import shutil

if importlib.util.find_spec("dapo_jax") is None:
    chips = glob.glob("/dev/accel*") + glob.glob("/dev/vfio/[0-9]*")
    extra = "[cuda]" if shutil.which("nvidia-smi") else "[tpu]" if chips else ""
    %pip install --quiet "{glob.glob('dapo_jax-*.whl')[0]}{extra}"
"""


def make(source: pathlib.Path) -> nbformat.NotebookNode:
    """The notebook of a script, not run yet."""
    cells = [
        nbformat.v4.new_code_cell(INSTALL.strip()),
        *jupytext.read(source).cells,
    ]
    for number, cell in enumerate(cells):
        cell.id, cell.metadata = f"cell-{number}", {}  # the same whenever it is made
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    return nbformat.v4.new_notebook(cells=cells, metadata={"kernelspec": kernel})


def run(notebook: nbformat.NotebookNode) -> None:
    """Runs it in a folder that goes away, with a picture in the place of sliders."""
    os.environ["DAPO_NOTEBOOK_STATIC"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        NotebookClient(
            notebook,
            timeout=SECONDS,
            coalesce_streams=True,
            resources={"metadata": {"path": folder}},
        ).execute()
    for cell in notebook.cells:
        cell.metadata = {}  # when each began and ended
        for output in cell.get("outputs", ()):
            if png := output.get("data", {}).get("image/png"):
                output["data"]["image/png"] = smaller(png)


def smaller(png: str) -> str:
    """The picture with a palette."""
    picture = Image.open(io.BytesIO(base64.b64decode(png))).convert("RGB")
    found = io.BytesIO()
    picture.quantize(COLOURS, dither=Image.Dither.NONE).save(found, "png", optimize=True)
    return base64.b64encode(found.getvalue()).decode()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    known = [source.stem for source in SOURCES]
    parser.add_argument("names", nargs="*", help=f"of {', '.join(known)}; none: all")
    chosen = parser.parse_args().names
    if unknown := sorted(set(chosen) - set(known)):
        parser.error(f"{', '.join(unknown)}: must be of {', '.join(known)}")
    # Of this checkout, by this Python, wherever the kernel starts.
    os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE.parent), *filter(None, sys.path)])
    for source in SOURCES:
        if not chosen or source.stem in chosen:
            notebook = make(source)
            run(notebook)
            nbformat.write(notebook, source.with_suffix(".ipynb"))
            print(f"{source.stem}: {source.with_suffix('.ipynb').stat().st_size / 1e3:.0f} kB")


if __name__ == "__main__":
    main()
