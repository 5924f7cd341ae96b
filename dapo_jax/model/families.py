"""Model families: config.json of a model folder to switches of the decoder, and back.

Qwen2 and Qwen2.5, Qwen3, and Llama 3.x differ in which projections have a bias, in the norm of
queries and keys, and in the scaling of rotations.
"""

from typing import Any

from dapo_jax.model.decoder import DecoderConfig, RopeScaling
from dapo_jax.runtime.settings import ConfigError, require

CLASSES = {"qwen2": "Qwen2", "qwen3": "Qwen3", "llama": "Llama"}  # by model_type
QWEN3_HEAD_DIM = 128  # default of head_dim; other families divide hidden_size by the heads
MAX_POSITION_EMBEDDINGS = 32_768  # of new folders, made from no other one

SIZES = {
    "vocab": "vocab_size",
    "layers": "num_hidden_layers",
    "embed": "hidden_size",
    "heads": "num_attention_heads",
    "mlp": "intermediate_size",
}

ROPE_FACTORS = ("factor", "low_freq_factor", "high_freq_factor")

# Settings that would change the numbers, with the only value that is supported.
UNSUPPORTED = {
    "use_sliding_window": False,
    "hidden_act": "silu",
    "quantization_config": None,
    "partial_rotary_factor": 1.0,
}


def family(config: DecoderConfig) -> str:
    """Name of the family (`model_type`) that has the decoder's switches."""
    if config.qk_norm:
        return "qwen3"
    return "qwen2" if config.qkv_bias and not config.out_bias else "llama"


def _sizes(values: dict[str, Any]) -> dict[str, int]:
    """Sizes of the decoder. Raises KeyError for a missing one, ValueError for a wrong one."""
    sizes = {name: values[key] for name, key in SIZES.items()}
    heads, embed = sizes["heads"], sizes["embed"]
    sizes["kv_heads"] = values.get("num_key_value_heads") or heads
    head_dim = values.get("head_dim")
    for name, size in (*sizes.items(), ("head_dim", head_dim or 1)):
        if type(size) is not int or size < 1:
            raise ValueError(f"{SIZES.get(name, name)} = {size!r}: must be an integer above 0")
    if heads % sizes["kv_heads"]:
        raise ValueError(f"num_key_value_heads = {sizes['kv_heads']}: must divide {heads} heads")
    sizes["head_dim"] = head_dim or (
        QWEN3_HEAD_DIM if values["model_type"] == "qwen3" else embed // heads
    )
    if sizes["head_dim"] % 2:
        raise ValueError(f"head_dim = {sizes['head_dim']}: must be even")
    return sizes


def _switches(values: dict[str, Any]) -> dict[str, bool]:
    """Optional parts of the layers: biases, and norms of queries and keys."""
    kind, bias = values["model_type"], bool(values.get("attention_bias", False))
    return {
        "qk_norm": kind == "qwen3",
        "qkv_bias": kind == "qwen2" or bias,
        "out_bias": kind != "qwen2" and bias,
        "mlp_bias": kind == "llama" and bool(values.get("mlp_bias", False)),
    }


def _rope(values: dict[str, Any], field: str, folder: str) -> dict[str, Any]:
    """Base and scaling of rotations; newer folders keep both in rope_parameters, older apart."""
    rope = values.get("rope_parameters") or values.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    require(
        kind in ("default", "llama3"),
        field,
        f"{folder}: rope_scaling of type {kind!r}",
        "a folder with rope_scaling of type 'default' or 'llama3'",
    )
    theta = rope.get("rope_theta", values.get("rope_theta", 10_000.0))
    if kind == "default":
        return {"rope_theta": float(theta)}
    factors = {name: float(rope[name]) for name in ROPE_FACTORS}
    scaling = RopeScaling(**factors, original_tokens=rope["original_max_position_embeddings"])
    return {"rope_theta": float(theta), "rope_scaling": scaling}


def decoder_config(
    values: dict[str, Any], folder: str, field: str, **numerics: Any
) -> DecoderConfig:
    """Decoder that the fields of a config.json describe; `numerics` are all other fields.

    Raises:
        ConfigError: a field is missing, wrong or not supported; names the setting `field` too.
    """
    kind = values.get("model_type")
    allowed = f"a folder with model_type {' or '.join(CLASSES)}"
    require(kind in CLASSES, field, f"{folder} (model_type {kind!r})", allowed)
    newer = values.get("rope_parameters") or {}
    require(isinstance(newer, dict), field, f"{folder}: rope_parameters {newer!r}", "an object")
    for name, plain in UNSUPPORTED.items():
        value = values.get(name, newer.get(name, plain))
        named = f"{folder}: {name} {value!r}"
        require(value == plain, field, named, f"a folder with {name} {plain!r}")
    sliding = set(values.get("layer_types") or ()) - {"full_attention"}
    require(not sliding, field, f"{folder}: layer_types {sorted(sliding)}", "full_attention")
    try:
        return DecoderConfig(
            **_sizes(values),
            norm_eps=float(values.get("rms_norm_eps", 1e-6)),
            tie_embeddings=bool(values.get("tie_word_embeddings", False)),
            **_rope(values, field, folder),
            **_switches(values),
            **numerics,
        )
    except KeyError as missing:
        raise ConfigError(f"config.{field}: {folder}/config.json has no {missing}") from None
    except ConfigError:
        raise
    except (TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"config.{field}: {folder}/config.json: {error}") from None


def config_json(config: DecoderConfig) -> dict[str, Any]:
    """Fields of a config.json for a decoder that came from no folder."""
    kind = family(config)
    values = {
        "architectures": architectures(config),
        "model_type": kind,
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
        "max_position_embeddings": MAX_POSITION_EMBEDDINGS,
    }
    if kind != "qwen2":
        values["attention_bias"] = config.qkv_bias
    if kind == "llama":
        values["mlp_bias"] = config.mlp_bias
    scaling = config.rope_scaling
    if scaling is not None:
        values["rope_scaling"] = {
            "rope_type": "llama3",
            **{name: getattr(scaling, name) for name in ROPE_FACTORS},
            "original_max_position_embeddings": scaling.original_tokens,
        }
    return values


def architectures(config: DecoderConfig) -> list[str]:
    """Name of the class by which `transformers` loads the folder."""
    head = "ForSequenceClassification" if config.scalar_head else "ForCausalLM"
    return [CLASSES[family(config)] + head]
