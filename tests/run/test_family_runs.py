"""Runs of newer families: carried responses, resumption, adapters, routes, export, shapes."""

import dataclasses
import functools
import pathlib
import shutil

import jax
import numpy as np
import pytest
from kept_groups import make_kept, same_run
from safetensors.numpy import load_file
from small_runs import open_run, read_rows

from dapo_jax.config.experiment import Checkpoint, ExportConfig, Lora, Optimizer, Rollout
from dapo_jax.model import peft_adapters, save_huggingface
from dapo_jax.model.decoder import init_params
from dapo_jax.model.experts import REPLACED
from dapo_jax.model.load_huggingface import read_config
from dapo_jax.run.export import export
from dapo_jax.run.loop import train
from dapo_jax.runtime.sharding import unbox

MODELS = pathlib.Path(__file__).parents[1] / "fixtures/models"
ATTENTION, DELTA = "query,key,value,out", "query,out,delta_out,delta_"
TARGETS = {
    "qwen3_5": f"gate,up,down,{DELTA}qkv,delta_z,delta_b,delta_a",
    "qwen3_next": f"gate,up,down,{DELTA}qkvz,delta_ba",
    "gemma4": f"gate,up,down,{ATTENTION}",
    "olmo3": f"gate,up,down,{ATTENTION}",
    "smollm3": f"gate,up,down,{ATTENTION}",
}
slow = pytest.mark.slow
each_family = pytest.mark.parametrize("name", TARGETS)


@functools.cache
def random_policy(name):
    """Return decoder and random parameters of a family's fixture, with 32 tokens."""
    config = dataclasses.replace(read_config(MODELS / name), vocab=32)
    params = unbox(init_params(config, jax.random.key(0)))
    noise = iter(jax.random.split(jax.random.key(1), 99))
    params = jax.tree.map(lambda x: x + 0.1 * jax.random.normal(next(noise), x.shape), params)
    return config, params


@pytest.fixture
def make_folder(tmp_path, tiny_folder):
    def make(name):
        config, params = random_policy(name)
        folder = tmp_path / name
        save_huggingface.save_folder(folder, params, config, (1,))
        shutil.copy(tiny_folder / "tokenizer.json", folder)
        return folder

    return make


@slow
@each_family
@pytest.mark.parametrize("adapted", [False, True], ids=["whole", "adapters"])
def test_a_stopped_run_resumes_bit_for_bit_and_is_exported(
    name, adapted, make_folder, score_folder, tmp_path, alone
):
    """Responses are carried from step to step, and experts take the sampler's routes."""
    folder = make_folder(name)
    changes = {
        "replay": "sampler" if name == "qwen3_next" else "none",
        "lora": Lora(rank=2, alpha=3.0, targets=TARGETS[name]) if adapted else Lora(),
        "optimizer": Optimizer(0.02, warmup_steps=0, name="adamw" if adapted else "muon"),
        "checkpoint": Checkpoint(every_steps=1, keep=1),
        "rollout": Rollout(6, 4, updates_per_rollout=2, carry_over="all"),
    }
    make = functools.partial(make_kept, "plain", folder, score_folder, **changes)
    train(make(tmp_path / "whole"))
    with open_run(make(tmp_path / "run")) as run:
        run.begin()
        run.step()
        assert any(group.begun for group in run.state.source.partial)
        run.checkpoints.close()
    train(make(tmp_path / "run"))
    assert same_run(tmp_path / "run", tmp_path / "whole") == []
    rows = read_rows(tmp_path / "run")
    assert all(np.isfinite(row["loss"]) and row["gradient_norm"] > 0 for row in rows)
    assert (REPLACED in rows[0]) == (name == "qwen3_next")
    export(ExportConfig(run=str(tmp_path / "run"), out=str(tmp_path / "out")))
    assert read_config(tmp_path / "out") == read_config(folder)
    before, after = (load_file(path / "model.safetensors") for path in (folder, tmp_path / "out"))
    moved = {path for path in after if np.abs(after[path] - before[path]).max() > 0}
    norms = {path for path in moved if "norm" in path}
    assert bool(norms) != adapted and len(moved) > len(before) // 4
    if adapted:
        tensors = load_file(tmp_path / "out.adapter" / peft_adapters.WEIGHTS)
        stems = {path.partition(".lora_")[0].removeprefix("base_model.model.") for path in tensors}
        assert {path.removesuffix(".weight") for path in moved} == stems
