"""gpt-oss as a policy: sampled in every layout, adapted, trained with replayed routes, exported."""

import shutil

import numpy as np
import pytest
from flax.traverse_util import flatten_dict
from kept_groups import make_kept
from mxfp4_folders import write_both
from small_runs import read_rows
from test_sinks import GPT_OSS, random_params

from dapo_jax.config.experiment import ExportConfig, Lora, Mesh, Optimizer
from dapo_jax.model import save_huggingface
from dapo_jax.model.experts import REPLACED
from dapo_jax.model.load_huggingface import load_params, read_config
from dapo_jax.run.export import export
from dapo_jax.run.run import train

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
    export(ExportConfig(run=str(tmp_path / "run"), out=str(tmp_path / "out")))
    assert read_config(tmp_path / "out") == GPT_OSS
    assert "quantization_config" not in (tmp_path / "out/config.json").read_text()
    before, after = (
        flatten_dict(load_params(folder, GPT_OSS, one_device), sep="/")
        for folder in (packed, tmp_path / "out")
    )
    moved = {path for path, array in after.items() if np.abs(array - before[path]).max() > 0}
    sinks = "layers/sinks" in moved
    assert sinks != adapted and {"layers/moe/expert_up/kernel", "layers/out/kernel"} <= moved
