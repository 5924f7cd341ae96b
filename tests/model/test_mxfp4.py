"""Folders with experts in MXFP4, as gpt-oss is published, load as the numbers that they hold."""

import json

import jax
import numpy as np
import pytest
from families_fixtures import export, stored_bytes
from mxfp4_folders import quantised, write_both
from safetensors.numpy import load_file, save_file
from test_sinks import GPT_OSS, random_params

from dapo_jax.model import load_huggingface, save_huggingface
from dapo_jax.runtime.settings import ConfigError
from dapo_jax.runtime.sharding import make_mesh


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A folder in MXFP4, and one of the same numbers."""
    root = tmp_path_factory.mktemp("mxfp4")
    save_huggingface.save_folder(root / "source", random_params(), GPT_OSS, (1,))
    write_both(root / "source", root / "packed", root / "plain")
    return root / "packed", root / "plain"


def test_numbers_equal_those_of_another_library():
    draws = np.random.default_rng(0).normal(size=(2, 64, 3)) * np.exp2([-40, 0, 40])
    blocks, scales, numbers = quantised(np.concatenate([draws, -draws]).astype("f"))
    np.testing.assert_array_equal(load_huggingface.dequantise(blocks, scales), numbers)
    every = np.arange(256, dtype=np.uint8).reshape(1, 16, 1, 16)
    doubled = load_huggingface.dequantise(every, np.full((1, 16, 1), 128, np.uint8))
    assert set(np.abs(doubled).ravel()) == {0, 1, 2, 3, 4, 6, 8, 12}
    assert np.isnan(load_huggingface.dequantise(blocks, np.full_like(scales, 255))).all()


def test_a_folder_in_mxfp4_loads_like_a_plain_one(folders, one_device, monkeypatch):
    packed, plain = folders
    config = load_huggingface.read_config(packed)
    assert config == load_huggingface.read_config(plain)
    assert load_huggingface.stored_dtype(packed) == "bfloat16"
    expected = load_huggingface.load_params(packed, config, one_device)
    monkeypatch.setattr(load_huggingface, "EXPERT_BYTES", 9000)  # two of eight experts
    mesh = make_mesh(1, 2, 2, expert=2)
    for folder, places in ((plain, one_device), (plain, mesh), (packed, mesh)):
        loaded = load_huggingface.load_params(folder, config, places)
        jax.tree.map(np.testing.assert_array_equal, loaded, expected)
    gate = loaded["layers"]["moe"]["expert_gate"]["kernel"]
    assert gate.addressable_shards[0].data.size == gate.size / 8


def test_an_export_is_plain(folders, one_device, tmp_path):
    packed, plain = folders
    export(packed, tmp_path / "out", one_device)
    assert stored_bytes(tmp_path / "out") == stored_bytes(plain)
    original = json.loads((plain / "config.json").read_text())
    written = json.loads((tmp_path / "out/config.json").read_text())
    assert written == original | {"torch_dtype": "bfloat16"}


NAME = "model.layers.1.mlp.experts.down_proj"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({f"{NAME}_scales": None}, f"{NAME}_blocks: must be U8"),
        ({f"{NAME}_scales": np.zeros((8, 32, 2), np.uint8)}, f"{NAME}_blocks: must be U8"),
        ({f"{NAME}_scales": np.zeros((8, 32, 1), np.float32)}, f"{NAME}_blocks: must be U8"),
        ({f"{NAME}_scales": np.full((8, 32, 1), 255, np.uint8)}, "not finite.*expert_down"),
        ({NAME: np.zeros((8, 32, 32), np.float32)}, f"{NAME}: plain and in MXFP4"),
    ],
    ids=["missing", "shape", "dtype", "scale of 255", "twice"],
)
def test_blocks_that_do_not_fit_are_rejected(changes, words, folders, tmp_path, one_device):
    packed, _ = folders
    (tmp_path / "config.json").symlink_to(packed / "config.json")
    tensors = load_file(packed / "model.safetensors") | changes
    tensors = {name: array for name, array in tensors.items() if array is not None}
    save_file(tensors, tmp_path / "model.safetensors")
    config = load_huggingface.read_config(tmp_path)
    with pytest.raises(ConfigError, match=words):
        load_huggingface.load_params(tmp_path, config, one_device)
