"""The wheel: its files, its metadata, and training from it outside a checkout."""

import email
import importlib.metadata
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import venv
import zipfile

import pytest
from markdown_it import MarkdownIt

ROOT = pathlib.Path(__file__).parents[2]
PACKED = ("setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", "CHANGELOG.md")
NEW_ENOUGH = 77  # setuptools that knows licence expressions
REPOSITORY = re.search(r'^REPOSITORY = "(.+)"$', (ROOT / "setup.py").read_text(), re.M)[1]


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
    assert "configs/arithmetic_dapo.png" in paths and all((ROOT / path).exists() for path in paths)


def test_the_repository_has_one_address():
    tracked = subprocess.check_output(["git", "ls-files", "-z"], cwd=ROOT, text=True).split("\0")
    own = re.compile(r"(?:colab\.research\.google\.com/github|github\.com)/([\w-]+/dapo[_-]jax)")
    for path in filter(None, tracked):
        text = (ROOT / path).read_bytes().decode("utf-8", "ignore")
        assert {f"https://github.com/{name}" for name in own.findall(text)} <= {REPOSITORY}, path


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
    small = ["--config.total_steps=2", "--config.data.heldout_problems=8"]
    assert "step 2/2" in call("train", "arithmetic", *small)
    settings = json.loads((here / "runs/arithmetic_dapo/config.json").read_text())
    assert settings["model"]["folder"] == "dapo_jax:arithmetic_base"
    assert "avg@16" in call("evaluate", "arithmetic", "--k=16", *small)
