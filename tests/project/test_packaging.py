"""The wheel: its files, its metadata, and training from it outside a checkout.

And launch/versions.txt: what launch/ and the tests install, with hashes, as setup.py allows.
"""

import email
import importlib.metadata
import json
import os
import pathlib
import platform
import re
import shutil
import subprocess
import sys
import venv
import zipfile

import pytest
from markdown_it import MarkdownIt
from packaging.markers import Marker
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = pathlib.Path(__file__).parents[2]
PACKED = ("setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", "CHANGELOG.md")
NEW_ENOUGH = 77  # setuptools that knows licence expressions
REPOSITORY = re.search(r'^REPOSITORY = "(.+)"$', (ROOT / "setup.py").read_text(), re.M)[1]
PINNED = re.compile(
    r"([\w.-]+)(?:\[[\w,]+\])?==(\S+)(?: ; ([^\\]+))? \\(?:\n    --hash=sha256:[0-9a-f]{64} ?\\?)+"
)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> pathlib.Path:
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in PACKED:
        shutil.copy(ROOT / name, source)
    for name in ("dapo_jax", "configs"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, source / name, ignore=ignored)
    (source / "launch").mkdir()
    shutil.copy(ROOT / "launch/env.sh", source / "launch")
    # Elsewhere than in the environment of launch/install.sh pip fetches a newer one.
    installed = int(importlib.metadata.version("setuptools").split(".")[0])
    isolation = ["--no-build-isolation"] * (installed >= NEW_ENOUGH)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", *isolation]
    done = subprocess.run([*command, "-w", str(out), str(source)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (path,) = out.glob("dapo_jax-*.whl")
    return path


def metadata(wheel: pathlib.Path) -> email.message.Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith("METADATA")]
        return email.message_from_bytes(archive.read(name))


def test_code_configs_and_policies_are_in_it_and_nothing_else(wheel):
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}
    tracked = subprocess.check_output(
        ["git", "ls-files", "dapo_jax", "configs", "launch/env.sh"], cwd=ROOT, text=True
    )
    files = {name for name in tracked.split() if not name.endswith(".png")}
    assert packed == {re.sub("^(configs|launch)/", r"dapo_jax/\1/", name) for name in files}
    assert wheel.stat().st_size < 4e6


def test_the_metadata_has_licence_authors_and_links(wheel):
    about = metadata(wheel)
    assert about["License-Expression"] == "Apache-2.0" and about["License-File"] == "LICENSE"
    assert about["Author"] and about["Keywords"] and about["Requires-Python"] == ">=3.11"
    assert not any(text.startswith("License ::") for text in about.get_all("Classifier"))
    links = [text.split(", ")[1] for text in about.get_all("Project-URL")]
    assert len(links) >= 3 and all(link.startswith(REPOSITORY) for link in links)


def test_links_of_the_description_lead_to_files_of_the_repository(wheel):
    tokens = MarkdownIt("commonmark").enable("table").parse(metadata(wheel).get_payload())
    inline = [child for token in tokens for child in token.children or ()]
    links = [link for t in inline if (link := t.attrGet("href") or t.attrGet("src"))]
    assert all(re.match("https://|#", link) for link in links), links
    own = [link.removeprefix(REPOSITORY) for link in links if link.startswith(REPOSITORY)]
    paths = [re.fullmatch(r"/(blob|raw)/main/([^#]+)(#.*)?", link)[2] for link in own]
    assert "docs/pods.md" in paths and all((ROOT / path).exists() for path in paths)


@pytest.mark.slow
def test_the_readmes_commands_run_from_a_wheel_in_an_empty_folder(wheel, tmp_path):
    environment, here = tmp_path / "environment", tmp_path / "here"
    here.mkdir()
    venv.create(environment, with_pip=True)
    python = str(environment / "bin/python")
    # In isolation: pip would take this checkout, which the path has, for the installed package.
    subprocess.run([python, "-I", "-m", "pip", "install", "-q", "--no-deps", wheel], check=True)
    # Other packages are those of the tests; dapo_jax is found before theirs.
    own = [str(path) for path in environment.glob("lib/python*/site-packages")]
    shared = [path for path in sys.path if path.endswith("site-packages")]
    outside = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    outside["PYTHONPATH"] = os.pathsep.join(own + shared)

    def call(*arguments: str, code: int = 0) -> str:
        command = [str(environment / "bin/dapo-jax"), *arguments]
        done = subprocess.run(command, cwd=here, env=outside, capture_output=True, text=True)
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr

    assert f"{own[0]}/dapo_jax/configs/arithmetic.py" in call("train", "arithmetic:x", code=2)
    assert call("configs").count("\n") == len([*ROOT.glob("configs/*.py")])
    assert call("configs", "show", "guessing") == (ROOT / "configs/guessing.py").read_text()
    assert "did you mean --config.seed?" in call("train", "arithmetic", "--data_seed=1", code=2)
    small = ["--config.total_steps=2", "--config.data.heldout_problems=8"]
    assert "step 2/2" in call("train", "arithmetic", *small)
    settings = json.loads((here / "runs/arithmetic_dapo/config.json").read_text())
    assert settings["model"]["folder"] == "dapo_jax:arithmetic_base"
    assert "avg@16" in call("evaluate", "arithmetic", "--k=16", *small)
    page = (ROOT / "docs/quickstart.md").read_text().partition("## Your own rows in memory")[2]
    (here / "rows.py").write_text(page.split("```python\n")[1].split("```")[0])
    subprocess.run([python, "rows.py"], cwd=here, env=outside, check=True)
    assert json.loads((here / "runs/rows/summary.json").read_text())["steps"] == 2


def pins(*wanted: str, python: str = platform.python_version()) -> dict[str, str]:
    line = f"source launch/pins.sh && pins {' '.join(wanted)}"
    text = subprocess.check_output(["bash", "-c", line], text=True, cwd=ROOT)
    entries = re.split(r"\n(?=\S)", re.sub("^#.*\n", "", text, flags=re.MULTILINE).strip())
    matches = [PINNED.fullmatch(entry) for entry in entries]
    assert all(matches), [entry for entry, match in zip(entries, matches, strict=True) if not match]
    here = {"python_full_version": python, "python_version": python.rpartition(".")[0]}
    matches = [match for match in matches if not match[3] or Marker(match[3]).evaluate(here)]
    names = [canonicalize_name(match[1]) for match in matches]
    assert len(set(names)) == len(names)
    return dict(zip(names, (match[2] for match in matches), strict=True))


@pytest.mark.parametrize("python", ["3.11.5", "3.12.0", "3.14.0"])
def test_every_package_of_every_extra_has_a_version_that_setup_allows_and_a_hash(python):
    extras = importlib.metadata.metadata("dapo_jax").get_all("Provides-Extra")
    assert pins("base", ",".join(extras), python=python)
    for extra in extras:
        pinned = pins("base", extra, python=python)
        here = {"extra": extra, "python_version": python.rpartition(".")[0]}
        for wanted in map(Requirement, importlib.metadata.requires("dapo_jax")):
            if not wanted.marker or wanted.marker.evaluate(here):
                version = pinned[canonicalize_name(wanted.name)]
                assert wanted.specifier.contains(version), f"{wanted}, but {version}"
    assert len(pins("base", "test")) > 120 and not pins("base").keys() & {"libtpu", "ruff"}
    assert "setuptools" in pins("base")
    assert pins("uv").keys() == {"uv"} and "cyclonedx-bom" in pins("sbom")


def test_jetstream_comes_alone():
    assert pins("base", "jetstream").keys() - pins("base").keys() == {"google-jetstream"}
    assert not pins("base", "test").keys() & {"tensorflow", "seqio", "editdistance"}
    assert "pins base jetstream" in (ROOT / "launch/install.sh").read_text()


# --- the quickstart ------------------------------------------------------------------------------

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


@pytest.mark.slow
def test_every_block_of_the_quickstart_runs(tmp_path):
    commands = [["bash", "-euo", "pipefail", "-c", block] for block in blocks("bash")]
    commands.append([sys.executable, "-c", "\n".join(blocks("python"))])  # as in one notebook
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
