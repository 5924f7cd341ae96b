"""The commands of docs/quickstart.md in an empty folder, in their order."""

import json
import os
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[2]
PAGE = (ROOT / "docs/quickstart.md").read_text()


def blocks(language: str) -> list[str]:
    """Return the page's code of that language, as far as it runs without a network."""
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)


def run(command: list[str], folder: pathlib.Path) -> subprocess.CompletedProcess:
    """Run a command on one device, as on a laptop; `python` is this interpreter."""
    path = os.pathsep.join([str(pathlib.Path(sys.executable).parent), os.environ["PATH"]])
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=1"
    changed = {"PATH": path, "PYTHONPATH": str(ROOT), "COLUMNS": "80", "XLA_FLAGS": flags}
    environment = os.environ | changed
    return subprocess.run(command, cwd=folder, env=environment, text=True, capture_output=True)


def test_every_block_of_the_quickstart_runs(tmp_path):
    commands = [["bash", "-euo", "pipefail", "-c", block] for block in blocks("bash")]
    commands += [[sys.executable, "-c", block] for block in blocks("python")]
    output = ""
    for command in commands:
        done = run(command, tmp_path)
        assert done.returncode == 0, f"{command[-1]}\n{done.stdout}{done.stderr}"
        output += done.stdout + done.stderr
    assert "step 2/2" in output and "\x1b" not in output
    assert (tmp_path / "models/mine/config.json").exists()
    completion = output[output.index('{"id"') :]
    choice = json.JSONDecoder().raw_decode(completion)[0]["choices"][0]
    assert re.match(r"\d\+\d=\d", choice["text"]) and choice["finish_reason"] == "stop"
    rows = (tmp_path / "runs/mine/metrics.jsonl").read_text().splitlines()
    assert "reward_parts/mine.reward:score" in json.loads(rows[-1])


def test_the_mistake_that_the_quickstart_shows_has_that_message(tmp_path):
    command, answer = re.search(r"^(dapo-jax .*)\n\n(error: .*)$", PAGE, re.M).groups()
    config = re.search(r"cat > (mine/config.py) <<'EOF'\n(.*?)^EOF$", PAGE, re.M | re.S)
    (tmp_path / "mine").mkdir()
    (tmp_path / config[1]).write_text(config[2])
    done = run(["bash", "-c", command], tmp_path)
    assert (done.returncode, done.stderr.strip()) == (2, answer)
