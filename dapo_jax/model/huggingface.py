"""Model folders in the Hugging Face layout: read into device shards, and written back.

One name table serves both directions. A tensor is read when a device shard needs it, so the host
holds one tensor at a time beside the shards themselves.
"""

import hashlib
import json
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util
from safetensors import safe_open
from safetensors.numpy import save_file

from dapo_jax import sharding
from dapo_jax.model.decoder import DecoderConfig, abstract_params
from dapo_jax.settings import ConfigError, require

MODEL_TYPES = ("qwen2",)
FINGERPRINT_BYTES = 1 << 20  # of either end of a file

# Settings that would change the numbers, with the only value that is computed here.
UNSUPPORTED = {"rope_scaling": None, "use_sliding_window": False, "hidden_act": "silu"}

# our path below `layers`: published name below `model.layers.N`
LAYER_NAMES = {
    "attention_norm/scale": "input_layernorm.weight",
    "query/kernel": "self_attn.q_proj.weight",
    "query/bias": "self_attn.q_proj.bias",
    "key/kernel": "self_attn.k_proj.weight",
    "key/bias": "self_attn.k_proj.bias",
    "value/kernel": "self_attn.v_proj.weight",
    "value/bias": "self_attn.v_proj.bias",
    "out/kernel": "self_attn.o_proj.weight",
    "mlp_norm/scale": "post_attention_layernorm.weight",
    "gate/kernel": "mlp.gate_proj.weight",
    "up/kernel": "mlp.up_proj.weight",
    "down/kernel": "mlp.down_proj.weight",
}
TOP_NAMES = {
    "embedding": "model.embed_tokens.weight",
    "final_norm/scale": "model.norm.weight",
    "head": "lm_head.weight",
    "score": "score.weight",
}


def _published_shape(path: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Shape of one layer's tensor as published: matrices are [out, in], heads are merged."""
    leaf, layer = path.rsplit("/", 1)[-1], path.split("/")[0]
    if leaf == "bias":
        return (int(np.prod(shape)),)
    if leaf == "head":
        return shape[::-1]
    if leaf == "score":
        return (1, *shape)
    if leaf != "kernel":
        return shape
    inputs = shape[:-1] if layer == "out" else shape[:1]
    return (int(np.prod(shape[len(inputs) :])), int(np.prod(inputs)))


def _from_published(path: str, tensor: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    transposed = path.endswith("kernel") or path == "head"
    return (tensor.T if transposed else tensor).reshape(shape)


def _to_published(path: str, array: np.ndarray) -> np.ndarray:
    rows, *columns = published = _published_shape(path, array.shape)
    if path.endswith("kernel") or path == "head":
        return np.ascontiguousarray(array.reshape(*columns, rows).T)
    return np.ascontiguousarray(array.reshape(published))


def _in_layer(path: str) -> str | None:
    """The path below a stack of layers; None for what is in none."""
    stack, _, below = path.partition("/")
    return below if stack in ("layers", "frozen_layers") else None


def _published_names(path: str, config: DecoderConfig) -> list[str]:
    below = _in_layer(path)
    if below is None:
        return [TOP_NAMES[path]]
    frozen = path.startswith("frozen_layers")
    numbers = range(config.frozen_layers) if frozen else range(config.frozen_layers, config.layers)
    return [f"model.layers.{i}.{LAYER_NAMES[below]}" for i in numbers]


def read_config(
    folder: str | pathlib.Path, *, field: str = "model.folder", **numerics: Any
) -> DecoderConfig:
    """The decoder that config.json describes; `numerics` are fields it does not (dtype, remat).

    Raises `ConfigError` naming the setting `field`, the folder and what it lacks.
    """
    path = pathlib.Path(folder) / "config.json"
    if not path.exists():
        raise ConfigError(
            f"config.{field} = {str(folder)!r}: has no config.json. A folder for the embedded "
            "task is made by: python -m dapo_jax.sft --config=configs/arithmetic_base.py"
        )
    values = json.loads(path.read_text())
    require(
        values.get("model_type") in MODEL_TYPES,
        field,
        f"{folder} (model_type {values.get('model_type')!r})",
        f"a folder with model_type {' or '.join(MODEL_TYPES)}",
    )
    for name, plain in UNSUPPORTED.items():
        require(
            values.get(name, plain) == plain,
            field,
            f"{folder}: {name} {values.get(name)!r}",
            f"a folder with {name} {plain!r}",
        )
    try:
        heads, embed = values["num_attention_heads"], values["hidden_size"]
        return DecoderConfig(
            vocab=values["vocab_size"],
            layers=values["num_hidden_layers"],
            embed=embed,
            heads=heads,
            kv_heads=values.get("num_key_value_heads", heads),
            head_dim=values.get("head_dim") or embed // heads,
            mlp=values["intermediate_size"],
            rope_theta=_rope_theta(values, field),
            norm_eps=values.get("rms_norm_eps", 1e-6),
            tie_embeddings=values.get("tie_word_embeddings", False),
            **numerics,
        )
    except KeyError as missing:
        raise ConfigError(f"config.{field}: {path} has no {missing}") from None


def _rope_theta(values: dict, field: str) -> float:
    """Where newer folders keep it (rope_parameters), or where older ones do."""
    rope = values.get("rope_parameters") or values
    kind = rope.get("rope_type", "default")
    require(kind == "default", field, f"rope_type {kind!r}", "a folder with the default")
    return float(rope.get("rope_theta", 10_000.0))


class _Tensors:
    """Every tensor of a folder's safetensors files by name, read one at a time."""

    def __init__(self, folder: pathlib.Path):
        self._files, problems = {}, []
        for path in sorted(folder.glob("*.safetensors")):
            file = safe_open(path, framework="numpy")
            for name in file.keys():
                if name in self._files:
                    problems.append(f"{name}: in two files")
                self._files[name] = file
        if not self._files:
            problems.append("no *.safetensors file")
        self.folder, self.problems = folder, problems

    def names(self) -> set[str]:
        return set(self._files)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._files[name].get_slice(name).get_shape())

    def read(self, name: str) -> np.ndarray:
        return self._files[name].get_tensor(name)


def _check_names(
    tensors: _Tensors, shapes: dict[str, tuple[int, ...]], config: DecoderConfig, field: str
) -> None:
    """Raises one error that names every missing, unknown or wrongly shaped tensor."""
    problems = list(tensors.problems)
    known = {TOP_NAMES["head"]}  # may be there unread: a tied embedding repeated, a critic's policy
    for path, shape in shapes.items():
        below = _in_layer(path)
        wanted = _published_shape(below or path, shape[1:] if below else shape)
        for name in _published_names(path, config):
            known.add(name)
            if name not in tensors.names():
                problems.append(f"{name}: missing")
            elif tensors.shape(name) != wanted:
                problems.append(f"{name}: shape {tensors.shape(name)}, expected {wanted}")
    problems += [f"{name}: unknown" for name in sorted(tensors.names() - known)]
    if problems:
        listed = "\n  ".join(problems)
        raise ConfigError(f"config.{field} = '{tensors.folder}': can't be read:\n  {listed}")


def _shard_reader(
    tensors: _Tensors, path: str, shape: tuple[int, ...], config: DecoderConfig
) -> Callable:
    """A function from a shard's index to its float32 values."""
    names, below = _published_names(path, config), _in_layer(path)
    if below is None:
        return lambda index: _from_published(path, tensors.read(names[0]), shape)[index].astype(
            np.float32
        )

    def read(index):
        chosen = names[index[0]]
        parts = (_from_published(below, tensors.read(n), shape[1:])[index[1:]] for n in chosen)
        first = next(parts)
        out = np.empty((len(chosen), *first.shape), np.float32)
        out[0] = first
        for i, part in enumerate(parts, 1):
            out[i] = part
        return out

    return read


def fingerprint(folder: str | pathlib.Path) -> str:
    """Tells one set of weights from another without reading gigabytes.

    From the names, sizes, first and last bytes of the *.safetensors files.
    """
    digest = hashlib.sha256()
    for path in sorted(pathlib.Path(folder).glob("*.safetensors")):
        size = path.stat().st_size
        with path.open("rb") as file:
            digest.update(f"{path.name} {size}".encode() + file.read(FINGERPRINT_BYTES))
            file.seek(max(0, size - FINGERPRINT_BYTES))
            digest.update(file.read())
    return digest.hexdigest()[:16]


def load_params(
    folder: str | pathlib.Path,
    config: DecoderConfig,
    mesh: jax.sharding.Mesh,
    *,
    field: str = "model.folder",
    fresh_score: bool = False,
) -> Any:
    """Parameters of a model folder, float32, each shard read straight onto its device.

    Args:
        field: the setting that names the folder, for the error message.
        fresh_score: a folder without a scalar head (a policy's) gets one of zeros.
    """
    tensors = _Tensors(pathlib.Path(folder))
    boxed = abstract_params(config)
    places = traverse_util.flatten_dict(sharding.tree_shardings(mesh, boxed), sep="/")
    abstract = traverse_util.flatten_dict(sharding.unbox(boxed), sep="/")
    shapes = {path: leaf.shape for path, leaf in abstract.items()}
    fresh = {}
    if fresh_score and TOP_NAMES["score"] not in tensors.names():
        zeros = np.zeros(shapes.pop("score"), np.float32)
        fresh["score"] = jax.device_put(zeros, places["score"])
    _check_names(tensors, shapes, config, field)
    arrays = {
        path: jax.make_array_from_callback(
            shape, places[path], _shard_reader(tensors, path, shape, config)
        )
        for path, shape in shapes.items()
    }
    return traverse_util.unflatten_dict(arrays | fresh, sep="/")


def save_folder(
    folder: str | pathlib.Path, params: Any, config: DecoderConfig, end_ids: tuple[int, ...]
) -> None:
    """Writes model.safetensors (float32), config.json and generation_config.json."""
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    published = {}
    for path, leaf in traverse_util.flatten_dict(params, sep="/").items():
        array, below = np.asarray(leaf, np.float32), _in_layer(path)
        names = _published_names(path, config)
        published |= {
            name: _to_published(below or path, part)
            for name, part in zip(names, array if below else [array], strict=True)
        }
    save_file(published, folder / "model.safetensors", metadata={"format": "pt"})
    ids = {"eos_token_id": list(end_ids), "pad_token_id": 0}
    (folder / "config.json").write_text(json.dumps(_config_json(config) | ids, indent=2))
    (folder / "generation_config.json").write_text(json.dumps(ids, indent=2))


def _config_json(config: DecoderConfig) -> dict[str, Any]:
    return {
        "architectures": [
            "Qwen2ForSequenceClassification" if config.scalar_head else "Qwen2ForCausalLM"
        ],
        "model_type": "qwen2",
        "hidden_act": "silu",
        "vocab_size": config.vocab,
        "num_hidden_layers": config.layers,
        "hidden_size": config.embed,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.mlp,
        "rope_theta": config.rope_theta,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tie_embeddings,
        "max_position_embeddings": 32_768,
        "torch_dtype": str(jnp.dtype(jnp.float32)),
    }
