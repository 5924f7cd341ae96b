"""Layers of several shapes (Gemma 4): training, meshes, decoding, and multimodal folders."""

import dataclasses
import functools
import json
import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import TINY
from families_fixtures import export, stored_bytes
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.extend.core import jaxprs_in_params
from safetensors.numpy import load_file, save_file
from test_windows import assert_decoding_equals_training

from dapo_jax.extras.families.mixed_layers import periods
from dapo_jax.model.decoder import Decoder, abstract_params, init_params, layer_stacks
from dapo_jax.model.load_huggingface import read_config
from dapo_jax.runtime.sharding import unbox

FOLDER = pathlib.Path(__file__).parents[1] / "fixtures/models/gemma4"
GEMMA_4 = dataclasses.replace(  # every switch of the family
    TINY,
    family="gemma4_text",
    layers=6,
    window=3,
    sliding=(True, False, True, False, True, False),
    full_head_dim=2 * TINY.head_dim,
    full_kv_heads=2,
    keys_as_values=True,
    value_norm=True,
    sharing_layers=2,
    wide_sharing_mlp=True,
    layer_inputs=4,
    multiplied=True,
    logit_cap=3.0,
    qk_norm=True,
    out_norms=True,
    query_scalar=1,
    scale_embeddings=True,
    activation="gelu_tanh",
)


def make_params():
    """Return random parameters with scores of usual size; large ones amplify rounding."""
    noise = iter(jax.random.split(jax.random.key(1), 99))
    stacked = unbox(init_params(GEMMA_4, jax.random.key(0)))
    stacked = jax.tree.map(lambda x: x + 0.1 * jax.random.normal(next(noise), x.shape), stacked)
    flat = flatten_dict(stacked, sep="/")
    for path in flat:
        flat[path] *= 0.5 if path.endswith(("query_norm/scale", "key_norm/scale")) else 1
    return unflatten_dict(flat, sep="/")


@pytest.mark.slow
def test_slots_pages_and_scores_equal_training_of_mixed_layers(one_device):
    assert_decoding_equals_training(make_params(), GEMMA_4, one_device)


def test_layers_repeat_in_periods_and_share_the_last_keys_of_their_kind():
    assert periods("aaabaaabcccdcccd") == [
        ([("a", 3), ("b", 1)], 2),
        ([("c", 3), ("d", 1)], 2),
    ]
    assert periods("aabab") == [([("a", 2)], 1), ([("b", 1)], 1), ([("a", 1)], 1), ([("b", 1)], 1)]
    assert periods("abcabcaabb")[0] == ([("a", 1), ("b", 1), ("c", 1)], 2)
    assert periods("abacabac") == [([(name, 1)], 1) for name in "abacabac"]  # a occurs twice
    assert [GEMMA_4.cache_of(number) for number in range(6)] == [0, 1, 2, 3, 2, 3]
    assert layer_stacks(GEMMA_4) == {
        "layers": [0, 2],
        "full_layers": [1, 3],
        "sharing_layers": [4],
        "sharing_full_layers": [5],
    }


def scanned(jaxpr):
    """Return the shapes that scans of a program stack up, those inside of scans included."""
    shapes = set()
    for equation in jaxpr.eqns:
        if equation.primitive.name == "scan":
            once = getattr(equation.params["jaxpr"], "jaxpr", equation.params["jaxpr"]).outvars
            outputs = zip(equation.outvars, once, strict=True)
            stacked = [out for out, own in outputs if out.aval.shape != own.aval.shape]
            shapes |= {variable.aval.shape for variable in stacked}
        for inner in jaxprs_in_params(equation.params):
            shapes |= scanned(inner)
    return shapes


def test_the_forward_pass_keeps_the_parameters_of_layers_without_copies():
    config = dataclasses.replace(
        GEMMA_4, sharing_layers=0, layers=8, sliding=(True, True, True, False) * 2, remat="full"
    )
    params = unbox(abstract_params(config))
    ids = jnp.zeros((1, 8), jnp.int32)

    def residuals(params):
        apply = functools.partial(Decoder(config).apply, mutable=False)
        return jax.tree.leaves(jax.vjp(lambda p: apply({"params": p}, ids, ids, ids), params)[1])

    stacked = scanned(jax.make_jaxpr(residuals)(params).jaxpr)
    up = params["layers"]["up"]["kernel"].shape[1:]
    assert (2, 3, 1, 8, config.embed) in stacked  # the layers' inputs
    assert not [shape for shape in stacked if shape[-2:] == up]


def test_a_multimodal_folder_gives_the_text_model(tmp_path, one_device, capsys):
    shutil.copytree(FOLDER, tmp_path / "whole")
    tensors = load_file(FOLDER / "model.safetensors")
    renamed = {name.replace("model.", "model.language_model.", 1): t for name, t in tensors.items()}
    renamed["model.vision_tower.patch.weight"] = np.zeros((2, 2), np.float32)
    save_file(renamed, tmp_path / "whole/model.safetensors")
    values = json.loads((FOLDER / "config.json").read_text())
    nested = {"model_type": "gemma4", "text_config": values, "vision_config": {"model_type": "x"}}
    (tmp_path / "whole/config.json").write_text(json.dumps(nested))
    config = export(tmp_path / "whole", tmp_path / "text", one_device)
    assert config == read_config(FOLDER) == read_config(tmp_path / "text")
    assert stored_bytes(tmp_path / "text") == stored_bytes(FOLDER)
    skipped = "1 tensors that a text model does not read, such as model.vision_tower.patch.weight,"
    assert capsys.readouterr().out.count(skipped) == 1
