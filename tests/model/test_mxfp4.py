"""Folders with experts in MXFP4, as gpt-oss is published, load as the numbers that they hold."""

import json
import shutil

import jax
import numpy as np
import pytest
from families_fixtures import export, stored_bytes
from flax.traverse_util import flatten_dict
from kept_groups import make_kept
from mxfp4_folders import quantised, write_both
from safetensors.numpy import load_file, save_file
from small_runs import read_rows
from test_windows import GPT_OSS, random_params

from dapo_jax.config.experiment import ExportConfig, Lora, Mesh, Optimizer
from dapo_jax.model import load_huggingface, save_huggingface
from dapo_jax.model.experts import REPLACED
from dapo_jax.model.load_huggingface import load_params, read_config
from dapo_jax.run.export import export as export_run
from dapo_jax.run.run import train
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


# --- a run ----------------------------------------------------------------------------------------


slow = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tiny_folder):
    """A model folder of gpt-oss with the embedded task's tokenizer."""
    folder = tmp_path_factory.mktemp("gpt_oss")
    save_huggingface.save_folder(folder, random_params(), GPT_OSS, (1,))
    shutil.copy(tiny_folder / "tokenizer.json", folder)
    return folder


LORA = Lora(rank=2, alpha=3.0, targets="out,gate,up,down")


@slow
@pytest.mark.parametrize("adapted", [False, True])
def test_a_run_from_mxfp4_replays_routes_and_is_exported(
    adapted, folder, score_folder, tmp_path, one_device
):
    packed = tmp_path / "packed"
    write_both(folder, packed, tmp_path / "plain")
    shutil.copy(folder / "tokenizer.json", packed)
    own = {"mesh": Mesh(data=1, fsdp=1, tensor=2, expert=4)}
    own |= {"sampler": {"weights_dtype": "int8"}, "lora": LORA} if adapted else {}
    config = make_kept("plain", packed, score_folder, tmp_path / "run", replay="sampler", **own)
    config.optimizer = Optimizer(learning_rate=0.02, warmup_steps=0)
    train(config)
    rows = read_rows(tmp_path / "run")
    assert 0 < rows[0][REPLACED] < 0.5 and all(np.isfinite(row["loss"]) for row in rows)
    export_run(ExportConfig(run=str(tmp_path / "run"), out=str(tmp_path / "out")))
    assert read_config(tmp_path / "out") == GPT_OSS
    assert "quantization_config" not in (tmp_path / "out/config.json").read_text()
    before, after = (
        flatten_dict(load_params(folder, GPT_OSS, one_device), sep="/")
        for folder in (packed, tmp_path / "out")
    )
    moved = {path for path, array in after.items() if np.abs(array - before[path]).max() > 0}
    sinks = "layers/sinks" in moved
    assert sinks != adapted and {"layers/moe/expert_up/kernel", "layers/out/kernel"} <= moved
