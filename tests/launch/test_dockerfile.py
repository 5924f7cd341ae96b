"""launch/Dockerfile: its copies exist, and its steps install what runs."""

import json
import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
TEXT = (ROOT / "launch/Dockerfile").read_text()


@pytest.mark.slow
def test_the_steps_install_a_command_that_trains(tmp_path):
    """Run the RUN steps and the entry point in a folder instead of an image, without root."""
    app, work = tmp_path / "app", tmp_path / "work"
    work.mkdir()
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "venv")], check=True)
    path = f"{tmp_path / 'venv/bin'}:{os.environ['PATH']}"
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"PATH": path, "DEVICE": ""}
    lines = re.sub(r"\\\n\s*", "", re.sub(r"^#.*\n", "", TEXT, flags=re.M)).splitlines()
    instructions = [line.split(" ", 1) for line in lines if line]
    for name, arguments in instructions:
        if name == "COPY":
            *sources, target = arguments.split()
            for source in sources:
                place = app / source if target != source else app / target
                place.parent.mkdir(parents=True, exist_ok=True)
                copy = shutil.copytree if (ROOT / source).is_dir() else shutil.copy
                copy(ROOT / source, place)
        if name == "RUN":
            step = ["/bin/bash", "-o", "pipefail", "-euc", arguments]
            subprocess.run(step, cwd=app, env=env, check=True)
    entry = json.loads(dict(instructions)["ENTRYPOINT"])
    entry[2] = entry[2].replace("/opt/dapo_jax", str(app))
    train = ["train", "arithmetic", "--config.total_steps=2", "--config.run_dir=run"]
    subprocess.run([*entry, *train], cwd=work, env=env, check=True)
    assert (work / "run/summary.json").exists()
