"""The policy that ships with the package: found by its name everywhere, and made by its recipe."""

import json

import jax
import pytest
from command_lines import RL, run
from shipped import FOLDER, MADE_BY, NAME, recipe_digest, weights_digest

from dapo_jax.data.prompts.tokenizer import Tokenizer
from dapo_jax.extras.plan.published_shapes import read_shape
from dapo_jax.extras.serve.server import served_name
from dapo_jax.extras.serve.settings import ServeConfig
from dapo_jax.model import load_huggingface
from dapo_jax.runtime.storage.models import model_path
from dapo_jax.types.errors import ConfigError


def test_only_what_loading_reads_ships_and_it_is_small():
    files = {path.name: path.stat().st_size for path in FOLDER.iterdir()}
    settings = {"config.json", "generation_config.json", "tokenizer_config.json"}
    assert set(files) == {"model.safetensors", "tokenizer.json", *settings}
    assert sum(files.values()) < 2_500_000


def test_its_name_is_the_same_folder_to_every_reader(one_device):
    decoder = load_huggingface.read_config(NAME)
    assert decoder == load_huggingface.read_config(FOLDER) == read_shape(NAME)
    assert load_huggingface.fingerprint(NAME) == load_huggingface.fingerprint(FOLDER)
    assert load_huggingface.stored_dtype(NAME) == "float32"
    ids, same_ids = (Tokenizer.from_folder(name).encode("1+2=") for name in (NAME, FOLDER))
    assert ids == same_ids
    params = load_huggingface.load_params(NAME, decoder, one_device)
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == 595_584
    assert served_name(ServeConfig(model=NAME)) == "arithmetic_base"


def test_a_policy_that_does_not_ship_is_refused_with_those_that_do(tmp_path, monkeypatch, capsys):
    for name in ("dapo_jax:", "dapo_jax:..", "dapo_jax:nothing", "dapo_jax:arithmetic_base/.."):
        with pytest.raises(ConfigError, match=r"config\.start = .*dapo_jax:arithmetic_base"):
            model_path(name, "start")
    model = "--config.model.folder=dapo_jax:arithmetic"
    line = [RL, f"--config.run_dir={tmp_path}/run", model]
    code, output = run("train", line, monkeypatch, capsys)
    assert code == 2 and "did you mean dapo_jax:arithmetic_base?" in output
    assert output.count("\n") == 1 and not (tmp_path / "run").exists()


def test_the_recipe_is_still_that_of_the_shipped_weights():
    made_by = json.loads(MADE_BY.read_text())
    again = "dapo-jax sft --config=configs/arithmetic_base.py, then python tests/support/shipped.py"
    assert made_by["recipe"] == recipe_digest(), f"another recipe, so make it anew: {again}"
    assert made_by["weights"] == weights_digest(FOLDER)
