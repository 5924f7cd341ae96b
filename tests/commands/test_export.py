"""Export of a checkpoint as a model folder, with its card for a hub."""

import dataclasses
import json
import pathlib
import shutil

import jax.numpy as jnp
import numpy as np
import pytest
import yaml
from flax.traverse_util import flatten_dict
from row_files import read_table
from safetensors.numpy import load_file

from dapo_jax.config.experiment import ExportConfig
from dapo_jax.model import load_huggingface
from dapo_jax.run.export import SavedPolicy, export
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
