"""Export of a checkpoint as a model folder, with its card for a hub, also by other commands."""

import dataclasses
import json
import pathlib
import shlex
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor

import jax.numpy as jnp
import numpy as np
import pytest
import yaml
from flax.traverse_util import flatten_dict
from row_files import read_table
from safetensors.numpy import load_file
from served import http_serving, reopen
from small_runs import make_evaluation, run_evaluation

from dapo_jax.config.experiment import Config, ExportConfig
from dapo_jax.extras.serve import policy
from dapo_jax.model import load_huggingface
from dapo_jax.run import export as exporting
from dapo_jax.run.export import SavedPolicy, export
from dapo_jax.run.store import checkpoint_folder
from dapo_jax.runtime import processes, registry
from dapo_jax.types.errors import ConfigError

ROOT = pathlib.Path(__file__).parents[2]


def test_the_newest_checkpoint_of_eight_devices_becomes_a_folder(saved_run, tmp_path, one_device):
    """With the layers that were frozen, and what the base's folder holds besides parameters."""
    run_dir, source = saved_run
    out = export(ExportConfig(run_dir, str(tmp_path / "out")))
    policy, config = SavedPolicy(run_dir), load_huggingface.read_config(out)
    assert config == load_huggingface.read_config(source) and config.frozen_layers == 0
    exported, before = (
        flatten_dict(load_huggingface.load_params(folder, config, one_device), sep="/")
        for folder in (out, source)
    )
    for path, array in exported.items():
        if path.startswith("layers/"):  # the first stayed what it was and is in no checkpoint
            np.testing.assert_array_equal(array[0], before[path][0])
            array, before[path] = array[1:], before[path][1:]
        np.testing.assert_array_equal(array, policy.read(path))
        np.testing.assert_allclose(array, before[path] * 1.01**2, rtol=1e-6)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (out / name).read_bytes() == (source / name).read_bytes()
    assert json.loads((out / "config.json").read_text())["max_position_embeddings"] == 77


def test_dtype_step_and_file_size_follow_the_config(saved_run, tmp_path):
    config = ExportConfig(
        saved_run[0], str(tmp_path / "out"), step=1, dtype="bfloat16", max_shard_gb=1e-5
    )
    export(config)
    assert json.loads((tmp_path / "out/config.json").read_text())["torch_dtype"] == "bfloat16"
    assert len(list((tmp_path / "out").glob("model-*-of-*.safetensors"))) > 2
    stored = {}
    for path in (tmp_path / "out").glob("*.safetensors"):
        stored |= load_file(path)
    assert {str(tensor.dtype) for tensor in stored.values()} == {"bfloat16"}
    exact = SavedPolicy(saved_run[0], 1).read("embedding")
    rounded = exact.astype(jnp.bfloat16)
    np.testing.assert_array_equal(stored["model.embed_tokens.weight"], rounded)
    newest = SavedPolicy(saved_run[0]).read("embedding")
    assert not np.array_equal(exact, newest)


OTHER = ROOT / "tests/fixtures/models/llama3"
REJECTED = dict(read_table(__file__, "rejected"))
REJECTED["other model"] = (
    {"model": str(OTHER)},
    r"is not the model of the run:\n  embedding: \(32, 32\) in the run, ",
)


@pytest.mark.parametrize("name", REJECTED)
def test_rejected_export_writes_nothing(name, saved_run, tmp_path):
    changes, words = REJECTED[name]
    with pytest.raises(ConfigError, match=words):
        export(config_of(saved_run, tmp_path, **changes))
    assert not any(tmp_path.iterdir())


# --- publishing ----------------------------------------------------------------------------------


def config_of(saved_run, tmp_path, **changes) -> ExportConfig:
    return dataclasses.replace(ExportConfig(saved_run[0], str(tmp_path / "out")), **changes)


def local_files(folder: pathlib.Path) -> dict[str, bytes]:
    paths = (path for path in folder.iterdir() if not path.name.startswith(".dapo_jax"))
    return {path.name: path.read_bytes() for path in paths}


def front_matter(text: str) -> dict:
    return yaml.safe_load(text.split("---\n")[1])


def test_the_card_has_the_front_matter_that_hubs_read(saved_run, tmp_path):
    out = export(config_of(saved_run, tmp_path, base_model="a/base"))
    card = (out / "README.md").read_text()
    assert front_matter(card) == {
        "base_model": "a/base",
        "base_model_relation": "finetune",
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["dapo_jax", "reinforcement-learning"],
    }
    assert "# out\n" in card and str(out.parent) not in card


def test_paths_of_the_base_are_not_published(saved_run, tmp_path):
    base = shutil.copytree(saved_run[1], tmp_path / "base")
    values = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(values | {"_name_or_path": "/home/alice/base"}))
    out = export(config_of(saved_run, tmp_path, model=str(base)))
    assert json.loads((out / "config.json").read_text()) == values
    assert not any(b"/home/alice" in content for content in local_files(out).values())


# --- the folder of a run where a model folder is expected -----------------------------------------


@pytest.fixture
def run(saved_run, tmp_path, monkeypatch) -> str:
    """A run with checkpoints of steps 1 and 2, in the working folder."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(saved_run[0], "runs/mine")
    pathlib.Path("runs/mine/config.json").write_text(json.dumps(dataclasses.asdict(Config())))
    return "runs/mine"


def test_the_newest_checkpoint_is_exported_once(run, capsys):
    with ThreadPoolExecutor(3) as pool:
        folders = list(pool.map(lambda _: exporting.newest_export(run, "model"), range(3)))
    assert folders == ["runs/mine/exported/mine-step2"] * 3
    assert capsys.readouterr().out.count("written to") == 1
    decoder = load_huggingface.read_config(folders[0])
    layer = next(iter(load_huggingface.read_layers(folders[0], ["embedding"], decoder)))
    assert (layer[1](0) == SavedPolicy(run, 2).read("embedding")).all()
    # An older newest checkpoint, as after a run that lost its last one, gets another folder.
    shutil.rmtree(checkpoint_folder(run) / "2")
    assert exporting.newest_export(run, "model") == "runs/mine/exported/mine-step1"
    for folder in folders[0], "dapo_jax:arithmetic_base":
        assert exporting.newest_export(folder, "model") == folder


def test_serve_takes_a_run_and_names_it_for_clients(run, byte_engine, monkeypatch):
    loaded, load = [], reopen(byte_engine)
    monkeypatch.setattr(policy, "load_served", lambda config: loaded.append(config) or load(config))
    monkeypatch.setattr(policy, "warm_up", lambda *args: None)
    with http_serving(run, served_name="") as (_, client):
        assert [model.id for model in client.models.list()] == ["mine"]
        assert client.completions.create(model="mine", prompt="3+4=", max_tokens=2).choices
    assert [config.model for config in loaded] == ["runs/mine/exported/mine-step2"]


def test_evaluate_takes_a_run(run, alone, tmp_path):
    scores = run_evaluation(make_evaluation(run, "scores", samples=1))
    assert scores["policy"] == "runs/mine/exported/mine-step2"
    (report,) = tmp_path.glob("scores/evaluations/mine-step2_*/report.json")
    assert json.loads(report.read_text())["problems"] == scores["problems"] > 0


@pytest.mark.parametrize("several", [False, True])
def test_a_run_that_cannot_be_exported_into_names_the_command(run, several, monkeypatch, capsys):
    with monkeypatch.context() as patch, pytest.raises(ConfigError) as raised:
        if several:
            patch.setattr(processes, "count", lambda: 2)
            patch.setattr(exporting, "newest_step", lambda *args, **options: 2)
            patch.setattr(processes, "broadcast_from_host0", lambda work, name: work())
        else:
            pathlib.Path(run, "exported").write_text("in the way")
        exporting.newest_export(run, "model")
    check_command(str(raised.value), "config.model = 'runs/mine': can't export the run", capsys)


def check_command(message: str, words: str, capsys) -> None:
    """Run the command that ends an error, and read the folder that it writes."""
    assert words in message and "\n" not in message
    _, name, *arguments = shlex.split(message.partition("export it first: ")[2])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [name, *arguments])
        assert registry.find("commands", name)() == 0, capsys.readouterr().err
    load_huggingface.check_weights("models/mine")


def test_training_from_a_run_names_the_command(run, capsys):
    with pytest.raises(ConfigError) as raised:
        load_huggingface.read_config(run, field="start")
    check_command(str(raised.value), "config.start = 'runs/mine': is a run, not a model", capsys)
