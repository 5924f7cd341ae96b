"""Model cards of exports, and folders sent to a hub: the real client, a server on this machine."""

import dataclasses
import json
import pathlib
import shutil

import pytest
import yaml
from command_lines import run_shown
from fake_hub import FakeHub
from row_files import read_table

from dapo_jax.config.experiment import ExportConfig
from dapo_jax.run.export import export
from dapo_jax.runtime.settings import ConfigError


@pytest.fixture
def hub(monkeypatch):
    """The only hub that the client knows; the token of alice, who may write."""
    from huggingface_hub import constants

    with FakeHub() as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", "/nowhere/token")
        monkeypatch.setenv("HF_TOKEN", "writes")
        yield hub


def config_of(saved_run, tmp_path, **changes) -> ExportConfig:
    return dataclasses.replace(ExportConfig(saved_run[0], str(tmp_path / "out")), **changes)


def local_files(folder: pathlib.Path) -> dict[str, bytes]:
    paths = (path for path in folder.iterdir() if not path.name.startswith(".dapo_jax"))
    return {path.name: path.read_bytes() for path in paths}


def front_matter(text: str) -> dict:
    return yaml.safe_load(text.split("---\n")[1])


def check_published(hub: FakeHub, out: pathlib.Path) -> None:
    repository = hub.repositories["lab/first"]
    assert repository["private"] is True
    assert repository["files"] == local_files(out) | {".gitattributes": b""}
    card = repository["files"]["README.md"].decode()
    assert front_matter(card) == {
        "base_model": "a/base",
        "base_model_relation": "finetune",
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["dapo_jax", "reinforcement-learning", "dapo"],
    }
    assert "# first\n" in card and str(out.parent) not in card


def line_of(saved_run, out: pathlib.Path) -> list[str]:
    names = ["--push_to_hub=lab/first", "--base_model=a/base"]
    return [f"--run={saved_run[0]}", f"--out={out}", *names]


def test_a_folder_is_published_with_its_card_as_a_private_repository(
    hub, saved_run, tmp_path, monkeypatch, capsys
):
    line = line_of(saved_run, tmp_path / "out")
    code, out, error = run_shown("export", line, monkeypatch, capsys)
    assert code == 0, error
    assert f"sent to {hub.url}/lab/first" in out
    check_published(hub, tmp_path / "out")


def test_nothing_is_uploaded_by_default(hub, saved_run, tmp_path):
    export(config_of(saved_run, tmp_path))
    assert hub.asked == [] and (tmp_path / "out/README.md").exists()


def test_an_export_replaces_an_earlier_one_and_its_files(hub, saved_run, tmp_path):
    small = {"max_shard_gb": 1e-5, "push_to_hub": "first", "private": False}
    export(config_of(saved_run, tmp_path, **small))
    repository = hub.repositories["alice/first"]
    assert "model.safetensors.index.json" in repository["files"] and repository["private"] is False
    repository["tags"], repository["files"]["notes.txt"] = ["dapo_jax"], b"the user's"
    export(config_of(saved_run, tmp_path, **small | {"max_shard_gb": 1.0}))
    kept = {".gitattributes": b"", "notes.txt": b"the user's"}
    assert repository["files"] == local_files(tmp_path / "out") | kept


REFUSED = dict(read_table(__file__, "refused"))


@pytest.mark.parametrize("name", REFUSED)
def test_rejected_upload_writes_nothing(name, hub, saved_run, tmp_path):
    changes, words = REFUSED[name]
    hub.add("lab/full", True, {"thesis.tex": b""})
    hub.add("alice/open", False, {})
    with pytest.raises(ConfigError, match=words):
        export(config_of(saved_run, tmp_path, **changes))
    assert not any(tmp_path.iterdir())
    assert not [line for line in hub.asked if not line.startswith("GET ")]


@pytest.mark.parametrize(("token", "words"), read_table(__file__, "tokens"))
def test_missing_or_weak_token_is_rejected(token, words, hub, saved_run, tmp_path, monkeypatch):
    monkeypatch.delenv("HF_TOKEN")
    if token:
        monkeypatch.setenv("HF_TOKEN", token)
    with pytest.raises(ConfigError, match=f"config.push_to_hub = 'x'.*{words}") as raised:
        export(config_of(saved_run, tmp_path, push_to_hub="x"))
    assert not any(tmp_path.iterdir()) and not (token and token in str(raised.value))


def test_unreachable_hub_is_one_line(saved_run, tmp_path, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("HF_TOKEN", "writes")
    with pytest.raises(ConfigError, match="config.push_to_hub = 'x': .*refused") as raised:
        export(config_of(saved_run, tmp_path, push_to_hub="x"))
    assert "\n" not in str(raised.value) and not any(tmp_path.iterdir())


def test_failed_upload_keeps_the_folder_and_prints_the_command(hub, saved_run, tmp_path):
    hub.refused = "/api/models/alice/x/commit/main"
    out = tmp_path / "out"
    with pytest.raises(ConfigError, match=f"{out} is complete: hf upload alice/x {out}"):
        export(config_of(saved_run, tmp_path, push_to_hub="x"))
    assert (out / "model.safetensors").exists()


def test_paths_of_the_base_are_not_published(saved_run, tmp_path):
    base = shutil.copytree(saved_run[1], tmp_path / "base")
    values = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(values | {"_name_or_path": "/home/alice/base"}))
    out = export(config_of(saved_run, tmp_path, model=str(base)))
    assert json.loads((out / "config.json").read_text()) == values
    assert not any(b"/home/alice" in content for content in local_files(out).values())


def test_the_card_is_written_without_any_record_of_the_run(saved_run, tmp_path):
    out = export(config_of(saved_run, tmp_path, license="apache-2.0", datasets="a/b,c/d"))
    card = (out / "README.md").read_text()
    assert front_matter(card)["datasets"] == ["a/b", "c/d"]
    assert front_matter(card)["license"] == "apache-2.0" and "base_model" not in front_matter(card)
    assert "## Curves" not in card and "## Held-out scores" not in card
    settings = json.loads((out / "run_config.json").read_text())
    assert settings["model"]["folder"] == pathlib.Path(saved_run[1]).name
