"""A new user's first hour: every command of docs/quickstart.md in an empty folder, in its order.

    python tests/project/first_hour.py [--folder=FOLDER]

Print each block with its output and seconds; stop at the first failure.
"""

import argparse
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).parents[2]
PAGE = ROOT / "docs/quickstart.md"


def blocks(language: str) -> list[str]:
    """Return the code blocks of a language that run without a network."""
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)


def environment() -> dict[str, str]:
    """Return an environment with this interpreter as `python` and one device.

    Keeps the XLA flags of the tests that make it compile faster.
    """
    binaries = pathlib.Path(sys.executable).parent
    path = os.pathsep.join([str(binaries), os.environ["PATH"]])
    flags = re.sub(
        r"--xla_force_host_platform_device_count=\d+", "", os.environ.get("XLA_FLAGS", "")
    )
    changed = {"PATH": path, "PYTHONPATH": str(ROOT), "COLUMNS": "80", "XLA_FLAGS": flags}
    return dict(os.environ) | changed


def run(command: list[str], folder: pathlib.Path) -> str:
    """Return the output of a command, with errors. Raises if it fails."""
    done = subprocess.run(
        command,
        cwd=folder,
        env=environment(),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    if done.returncode:
        raise RuntimeError(f"exit code {done.returncode}:\n{' '.join(command)}\n{done.stdout}")
    return done.stdout


def first_hour(folder: pathlib.Path) -> list[str]:
    """Return the output of every block of the page, in order."""
    outputs = []
    for block in [*blocks("bash"), *blocks("python")]:
        started = time.perf_counter()
        is_shell = block in blocks("bash")
        command = ["bash", "-euo", "pipefail", "-c"] if is_shell else [sys.executable, "-c"]
        outputs.append(run([*command, block], folder))
        print(f"{block}\n{outputs[-1]}({time.perf_counter() - started:.0f} s)\n", flush=True)
    return outputs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", default="", help="empty or new; default: a temporary one")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = pathlib.Path(options.folder or temporary)
        folder.mkdir(parents=True, exist_ok=True)
        first_hour(folder)


if __name__ == "__main__":
    main()
