"""Supervised training and offline pairs with low-rank adapters: learning, folders, settings."""

import json
import pathlib

import numpy as np
import pytest
from safetensors.numpy import load_file
from supervised_runs import example_rows, pair_rows, read_metrics, settings

from dapo_jax.config.experiment import DpoConfig, Lora, Optimizer, SftConfig
from dapo_jax.config.validation import validate
from dapo_jax.run.supervised import make_base, prefer
from dapo_jax.runtime.settings import ConfigError

LORA = Lora(rank=4, alpha=8.0, targets="query,value,out,down")
COMMANDS = {"sft": (SftConfig, example_rows), "dpo": (DpoConfig, pair_rows)}


def make_config(command, path, folder, **changes):
    kind, rows = COMMANDS[command]
    size = {"examples_per_step" if command == "sft" else "pairs_per_step": 28}
    quick = {"lora": LORA, "optimizer": Optimizer(learning_rate=2e-2, warmup_steps=2)}
    return kind(**settings(path, rows(), folder, **quick | size | changes))


def stored(folder) -> dict[str, np.ndarray]:
    return load_file(pathlib.Path(folder) / "model.safetensors")


def assert_merged(folder, base):
    """Matrices with an adapter are W + alpha / r B A; all else is the base's."""
    after, before = stored(folder), stored(base)
    adapters, moved = load_file(f"{folder}.adapter/adapter_model.safetensors"), set()
    assert after.keys() == before.keys()
    for name, array in before.items():
        below = f"base_model.model.{name.removesuffix('.weight')}"
        if f"{below}.lora_A.weight" in adapters:
            moved.add(name.split(".")[-2])
            up, down = (adapters[f"{below}.lora_{part}.weight"] for part in "BA")
            assert np.abs(up).max() > 1e-3
            array = array + LORA.alpha / LORA.rank * up @ down
        np.testing.assert_allclose(after[name], array, atol=1e-6)
    assert moved == {"q_proj", "v_proj", "o_proj", "down_proj"}


def test_adapters_learn_examples_and_the_folder_has_them_merged(tiny_folder, alone, tmp_path):
    config = make_config("sft", tmp_path, tiny_folder)
    make_base(config)
    rows = read_metrics(config.out)
    assert rows[-1]["heldout_nll"] < 0.9 * rows[0]["heldout_nll"]
    assert_merged(config.out, tiny_folder)


def test_adapters_come_to_prefer_the_chosen_answers(tiny_folder, alone, tmp_path):
    config = make_config("dpo", tmp_path, tiny_folder)
    config.data.passes = 8.0
    prefer(config)
    rows = read_metrics(config.out)
    assert rows[0]["heldout_preference_loss"] == pytest.approx(np.log(2), abs=1e-12)
    assert rows[-1]["heldout_preference_accuracy"] > 0.5
    assert_merged(config.out, tiny_folder)
    values = json.loads((tmp_path / "out.adapter/adapter_config.json").read_text())
    assert values["base_model_name_or_path"] == tiny_folder.name and values["r"] == 4


@pytest.mark.parametrize(
    ("start", "lora", "words"),
    [
        ("", Lora(rank=2), "lora.*2.*must be"),
        ("", Lora(rank=-1), "lora.*-1.*must be"),
        ("", Lora(alpha=1.0), "lora.*alpha.*must be"),
        ("base", Lora(folder="here"), "lora.rank = 0: must be r of here/adapter_config"),
    ],
)
def test_adapters_that_cannot_be_trained_are_refused(start, lora, words):
    with pytest.raises(ConfigError, match=words):
        validate(SftConfig(total_steps=1, start=start, lora=lora))


def test_an_unknown_matrix_is_refused_before_anything_is_loaded(tiny_folder, alone, tmp_path):
    config = make_config("sft", tmp_path, tiny_folder, lora=Lora(rank=2, targets="q_proj"))
    with pytest.raises(ConfigError, match="lora.targets = 'q_proj': must be some of query"):
        make_base(config)
    config.lora = Lora(rank=2, folder=str(tmp_path))
    with pytest.raises(ConfigError, match="config.lora.folder: .*adapter_config.json can't be re"):
        make_base(config)
    assert [path.name for path in tmp_path.iterdir()] == ["own.jsonl"]
