"""Adapter folders in PEFT's format: names, numbers, refusals, experts."""

import dataclasses
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import MOE, TINY
from flax.traverse_util import flatten_dict, unflatten_dict
from row_files import read_table
from safetensors.numpy import load_file, save_file
from test_windows import GPT_OSS, random_params

from dapo_jax.config.experiment import Lora
from dapo_jax.model import load_huggingface, param_paths, peft_adapters, save_huggingface
from dapo_jax.model.decoder import DecoderConfig, init_params
from dapo_jax.model.load_huggingface import load_params
from dapo_jax.model.logprobs import Rows, hidden_states
from dapo_jax.model.trainable import choose_trained, is_trained, merge
from dapo_jax.run.export import policy_layers
from dapo_jax.runtime import sharding
from dapo_jax.runtime.sharding import make_mesh, unbox
from dapo_jax.types.errors import ConfigError

LORA = Lora(rank=3, alpha=7.5, targets="key,out,down")
DECODER = choose_trained(TINY, 0.0, LORA)
ROOT = pathlib.Path(__file__).parents[1]
WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"


def random_adapters(config: DecoderConfig) -> dict[str, np.ndarray]:
    """Return adapters as after some training, by path."""
    random, shapes = np.random.default_rng(5), param_paths.param_shapes(config)
    trained = {path: shape for path, shape in shapes.items() if is_trained(path, config)}
    return {path: random.normal(0, 0.2, shape).astype("f4") for path, shape in trained.items()}


def save(folder: pathlib.Path, adapters, config: DecoderConfig, base="base") -> pathlib.Path:
    folder.mkdir(exist_ok=True)
    save_huggingface.save_adapters(folder, adapters, adapters.__getitem__, config, base)
    return folder


@pytest.fixture
def folder(tmp_path):
    return save(tmp_path / "adapter", random_adapters(DECODER), DECODER)


def test_names_and_shapes_are_those_of_peft(folder):
    shapes = {}
    for layer in (0, 1):
        for name, (inner, outer) in {
            "self_attn.k_proj": (32, 16),
            "self_attn.o_proj": (32, 32),
            "mlp.down_proj": (64, 32),
        }.items():
            below = f"base_model.model.model.layers.{layer}.{name}"
            shapes |= {f"{below}.lora_A.weight": (3, inner), f"{below}.lora_B.weight": (outer, 3)}
    tensors = load_file(folder / WEIGHTS)
    assert {name: array.shape for name, array in tensors.items()} == shapes
    values = json.loads((folder / CONFIG).read_text())
    assert (values["r"], values["lora_alpha"], values["peft_type"]) == (3, 7.5, "LORA")
    assert values["target_modules"] == ["down_proj", "k_proj", "o_proj"]
    assert (folder / WEIGHTS).stat().st_mode & 0o777 == 0o644


@pytest.mark.parametrize("family", ["gemma4", "qwen3_5", "qwen3_moe"])  # with more matrices
def test_adapters_are_read_back(family, tmp_path, one_device):
    decoder = load_huggingface.read_config(ROOT / "fixtures/models" / family)
    config = choose_trained(decoder, 0.0, LORA)
    adapters = random_adapters(config)
    folder = save(tmp_path / "adapter", adapters, config)
    loaded = flatten_dict(peft_adapters.load_adapters(str(folder), config, one_device), sep="/")
    jax.tree.map(np.testing.assert_array_equal, loaded, adapters)
    if family == "qwen3_moe":  # each expert has a name
        tensors = load_file(folder / WEIGHTS)
        below = "base_model.model.model.layers.1.mlp.experts.3.down_proj"
        assert tensors[f"{below}.lora_A.weight"].shape == (3, decoder.mlp)
        up = adapters["layers/moe/expert_down/lora_b"][1, 3]
        np.testing.assert_array_equal(tensors[f"{below}.lora_B.weight"], up.T)


def test_the_published_product_equals_the_merged_change(folder):
    """alpha / r B A of the file, [out, in], layer by layer."""
    tensors, adapters = load_file(folder / WEIGHTS), random_adapters(DECODER)
    shapes = param_paths.param_shapes(TINY)
    for target in ("key", "out", "down"):
        path = f"layers/{target}/kernel"
        for layer, name in enumerate(param_paths.published_names(path, TINY)):
            pair = (adapters[f"layers/{target}/{part}"] for part in ("lora_a", "lora_b"))
            parts = (array.__getitem__ for array in (np.zeros(shapes[path]), *pair))
            ours = merge(DECODER.adapters, *parts, layer)
            name = f"base_model.model.{name.removesuffix('.weight')}"
            theirs = tensors[f"{name}.lora_B.weight"] @ tensors[f"{name}.lora_A.weight"] * 7.5 / 3
            published = param_paths.to_published(path, ours, TINY)
            np.testing.assert_allclose(published, theirs, atol=1e-6)


def change_config(folder: pathlib.Path, **changes) -> None:
    path = folder / CONFIG
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    "changes", [*read_table(__file__, "options"), {"lora_alpha": float("nan")}], ids=str
)
def test_an_option_that_changes_the_numbers_is_rejected_by_name(changes, folder):
    change_config(folder, **changes)
    ((name, value),) = changes.items()
    with pytest.raises(ConfigError, match="lora.folder") as raised:
        peft_adapters.read_adapters(str(folder), DECODER)
    assert f"adapter_config.json: {name} = {value!r}: " in str(raised.value)
    assert "left out" not in str(raised.value)  # which would change what the file computes


def test_a_factor_over_the_root_of_the_rank_is_read_merged_and_written(folder, tmp_path):
    change_config(folder, use_rslora=True)
    settings = peft_adapters.read_settings(str(folder), TINY)
    assert settings["rslora"] and settings["alpha"] == 7.5
    decoder = choose_trained(TINY, 0.0, Lora(**settings))
    assert decoder.adapters.scale == pytest.approx(7.5 / 3**0.5)
    adapters = peft_adapters.read_adapters(str(folder), decoder)
    with pytest.raises(ConfigError, match="--config.lora.rslora=True"):
        peft_adapters.read_adapters(str(folder), DECODER)
    kernel, down, up = (array.__getitem__ for array in np.ones((3, 1, 3, 3), np.float32))
    np.testing.assert_allclose(merge(decoder.adapters, kernel, down, up, 0), 1 + 3 * 7.5 / 3**0.5)
    written = save(tmp_path / "again", adapters, decoder)
    values = [json.loads((place / CONFIG).read_text()) for place in (folder, written)]
    assert values[0] == values[1] and values[1]["lora_alpha"] == 7.5
    assert (written / WEIGHTS).read_bytes() == (folder / WEIGHTS).read_bytes()


def test_options_that_change_no_number_are_accepted(folder):
    change_config(folder, lora_dropout=0.1, task_type=None, peft_version="9", target_modules=".*k")
    change_config(folder, base_model_name_or_path="/home/me/base", use_qalora=False, eva_config={})
    exact = peft_adapters.read_adapters(str(folder), DECODER)
    path = folder / WEIGHTS
    save_file({n: array.astype(jnp.bfloat16) for n, array in load_file(path).items()}, path)
    for name, array in peft_adapters.read_adapters(str(folder), DECODER).items():
        np.testing.assert_array_equal(array, exact[name].astype(jnp.bfloat16))


KEY = "base_model.model.model.layers.0.self_attn.k_proj"
DOWN = "base_model.model.model.layers.0.mlp.down_proj.lora_B.weight"


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        ("base_model.model.lm_head.lora_A.weight", np.zeros((3, 32), np.float32), "unknown"),
        (f"{KEY}.lora_magnitude_vector", np.zeros(3, np.float32), "unknown"),
        (f"{KEY}.lora_A.weight", np.zeros((3, 31), np.float32), "shape (3, 31), expected (3, 32)"),
        (DOWN, np.zeros((32, 3), np.int8), "dtype int8"),
        (DOWN, np.full((32, 3), np.nan, np.float32), "not finite"),
        (DOWN, None, "missing"),
    ],
)
def test_a_tensor_that_fits_no_matrix_is_named(name, value, problem, folder):
    tensors = load_file(folder / WEIGHTS) | {name: value}
    save_file({n: array for n, array in tensors.items() if array is not None}, folder / WEIGHTS)
    with pytest.raises(ConfigError) as raised:
        peft_adapters.read_adapters(str(folder), DECODER)
    assert f"{name}: " in str(raised.value) and problem in str(raised.value)


@pytest.mark.parametrize("broken", [CONFIG, WEIGHTS])
@pytest.mark.parametrize("content", [None, b"", b"[]", b"{", b"\xff\xfe"])
def test_a_file_that_is_missing_or_torn_is_named(broken, content, folder):
    (folder / broken).unlink()
    if content is not None:
        (folder / broken).write_bytes(content)
    with pytest.raises(ConfigError, match=f"config.lora.folder: .*{broken}"):
        peft_adapters.read_adapters(str(folder), DECODER)


@pytest.mark.parametrize(
    "lora", [{"rank": 2}, {"alpha": 8.0}, {"targets": "key,out"}, {"targets": "query,key,out,down"}]
)
def test_wrong_settings_are_rejected_with_those_of_the_folder(lora, folder):
    decoder = choose_trained(TINY, 0.0, dataclasses.replace(LORA, **lora))
    flags = "--config.lora.rank=3 --config.lora.alpha=7.5 --config.lora.targets=down,key,out"
    with pytest.raises(ConfigError, match=flags):
        peft_adapters.read_adapters(str(folder), decoder)


# --- adapters of experts -------------------------------------------------------------------------

ADAPTERS_DECODER = choose_trained(MOE, 0.0, Lora(rank=2, alpha=3.0, targets="query,gate,up,down"))
ADAPTERS = random_adapters(ADAPTERS_DECODER)
ROWS = jax.random.randint(jax.random.key(1), (4, 9), 2, 32), jnp.ones((4, 9), jnp.int32)
ROWS = (*ROWS, jnp.broadcast_to(jnp.arange(9), (4, 9)))


@pytest.fixture(scope="module")
def base():
    """Parameters without adapters, by path."""
    params = jax.jit(init_params, static_argnums=0)(MOE, jax.random.key(0))
    return flatten_dict(unbox(params), sep="/")


def states(flat, config, rows=ROWS):
    return jax.jit(lambda p: hidden_states(p, config, Rows(*rows))[0])(
        unflatten_dict(flat, sep="/")
    )


@pytest.mark.parametrize(
    "config", [MOE, pytest.param(GPT_OSS, marks=pytest.mark.slow)], ids=lambda c: c.family
)
def test_adapters_of_experts_compute_what_merged_experts_do(config, base, tmp_path, one_device):
    if config is GPT_OSS:
        base = flatten_dict(random_params(), sep="/")
    decoder = choose_trained(config, 0.0, Lora(rank=2, alpha=3.0, targets="out,gate,up,down"))
    adapters = random_adapters(decoder)
    save_huggingface.save_folder(tmp_path / "base", unflatten_dict(base, sep="/"), config, (1,))
    layers = policy_layers(adapters, adapters.__getitem__, decoder, str(tmp_path / "base"))
    (tmp_path / "merged").mkdir()
    save_huggingface.save_weights(tmp_path / "merged", layers, decoder)
    merged = flatten_dict(load_params(tmp_path / "merged", config, one_device), sep="/")
    adapted = states(base | adapters, decoder)
    np.testing.assert_allclose(adapted, states(merged, config), atol=1e-4)
    assert np.abs(adapted - states(base, config)).max() > 0.1
    changed = {path for path in merged if np.abs(merged[path] - base[path]).max() > 1e-3}
    names = ("out", "moe/expert_gate", "moe/expert_up", "moe/expert_down")
    assert changed == {f"layers/{name}/kernel" for name in names}


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [{"expert": 4, "tensor": 2, "fsdp": 1}, {"fsdp": 4, "tensor": 2}])
def test_adapters_of_experts_are_the_same_on_a_mesh(sizes, base):
    expected = states(base | ADAPTERS, ADAPTERS_DECODER)
    with sharding.activate(make_mesh(**({"data": 1} | sizes))):
        actual = states(base | ADAPTERS, ADAPTERS_DECODER, [jnp.tile(x, (2, 1)) for x in ROWS])
    np.testing.assert_allclose(actual[:4], expected, atol=2e-5)
