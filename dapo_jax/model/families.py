"""Model families: config.json of a model folder to switches of the decoder, and back.

Qwen2 and Qwen2.5, Qwen3, and Llama 3.x differ in which projections have a bias, in the norm of
queries and keys, and in the scaling of rotations.
"""

import reprlib
from typing import Any

from dapo_jax.model.config_fields import check_number, read_number, read_switch, read_table
from dapo_jax.model.decoder import DecoderConfig, RopeScaling
from dapo_jax.runtime.settings import ConfigError

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
    sizes = {name: read_number(values, key) for name, key in SIZES.items()}
    heads = sizes["heads"]
    sizes["kv_heads"] = read_number(values, "num_key_value_heads", heads)
    if heads % sizes["kv_heads"]:
        raise ValueError(f"num_key_value_heads = {sizes['kv_heads']}: must divide {heads} heads")
    usual = QWEN3_HEAD_DIM if values["model_type"] == "qwen3" else sizes["embed"] // heads
    sizes["head_dim"] = check_number("head_dim", read_number(values, "head_dim", usual))
    if sizes["head_dim"] % 2:
        raise ValueError(f"head_dim = {sizes['head_dim']}: must be even")
    return sizes


def _switches(values: dict[str, Any]) -> dict[str, bool]:
    """Optional parts: biases, norms of queries and keys, one matrix for embedding and head."""
    kind, bias = values["model_type"], read_switch(values, "attention_bias")
    return {
        "qk_norm": kind == "qwen3",
        "qkv_bias": kind == "qwen2" or bias,
        "out_bias": kind != "qwen2" and bias,
        "mlp_bias": kind == "llama" and read_switch(values, "mlp_bias"),
        "tie_embeddings": read_switch(values, "tie_word_embeddings"),
    }


def _rope(values: dict[str, Any]) -> dict[str, Any]:
    """Base and scaling of rotations; newer folders keep both in rope_parameters, older apart."""
    rope = read_table(values, "rope_parameters") or read_table(values, "rope_scaling")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "llama3"):
        raise ValueError(f"rope_scaling of type {kind!r}: must be 'default' or 'llama3'")
    theta = read_number(values | rope, "rope_theta", 10_000.0)
    if kind == "default":
        return {"rope_theta": theta}
    factors = {name: read_number(rope, name) for name in ROPE_FACTORS}
    low, high = factors["low_freq_factor"], factors["high_freq_factor"]
    if low >= high:
        raise ValueError(f"high_freq_factor = {high}: must be above low_freq_factor = {low}")
    original_tokens = read_number(rope, "original_max_position_embeddings")
    scaling = RopeScaling(**factors, original_tokens=original_tokens)
    return {"rope_theta": theta, "rope_scaling": scaling}


def _check_supported(values: dict[str, Any]) -> None:
    """Raises ValueError for a family or a setting that is not supported."""
    kind = values.get("model_type")
    if not isinstance(kind, str) or kind not in CLASSES:
        allowed = " or ".join(CLASSES)
        raise ValueError(f"model_type {reprlib.repr(kind)}: must be {allowed}")
    newer = read_table(values, "rope_parameters")
    for name, plain in UNSUPPORTED.items():
        value = values.get(name, newer.get(name, plain))
        if value != plain:
            raise ValueError(f"{name} {reprlib.repr(value)}: must be {plain!r}")
    layers = values.get("layer_types") or []
    if not isinstance(layers, list) or any(kind != "full_attention" for kind in layers):
        raise ValueError(f"layer_types {reprlib.repr(layers)}: must be full_attention, each")


def decoder_config(
    values: dict[str, Any], folder: str, field: str, **numerics: Any
) -> DecoderConfig:
    """Decoder that the fields of a config.json describe; `numerics` are all other fields.

    Raises:
        ConfigError: a field is missing, wrong or not supported; names the setting `field` too.
    """
    try:
        _check_supported(values)
        return DecoderConfig(
            **_sizes(values),
            norm_eps=read_number(values, "rms_norm_eps", 1e-6),
            **_rope(values),
            **_switches(values),
            **numerics,
        )
    except KeyError as missing:
        raise ConfigError(f"config.{field}: {folder}/config.json has no {missing}", field) from None
    except ValueError as error:
        raise ConfigError(f"config.{field}: {folder}/config.json: {error}", field) from None


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
