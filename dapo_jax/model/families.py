"""Model families: config.json of a model folder to switches of the decoder, and back.

A family is a row of `FAMILIES`. Families differ in which projections have a bias, in the norm of
queries and keys, in rotations, in experts, and in which layers see a window.
"""

import reprlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from dapo_jax.model.config_fields import check_number, read_number, read_switch, read_table
from dapo_jax.model.decoder import DecoderConfig
from dapo_jax.model.layers import LIMIT, SHARPNESS
from dapo_jax.model.rope_settings import (
    FULL,
    SLIDING,
    read_one_rope,
    read_two_ropes,
    scaling_json,
)
from dapo_jax.runtime.settings import ConfigError

MAX_POSITION_EMBEDDINGS = 32_768  # of new folders, made from no other one

# GptOssConfig of transformers 5.23; openai/gpt-oss-20b and 120b state all but the pattern.
GPT_OSS_DEFAULTS = MappingProxyType(
    {
        "attention_bias": True,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150_000.0,
        "sliding_window_pattern": 2,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 32.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
    }
)


class Family(NamedTuple):
    """How `transformers` reads the config.json of a family."""

    name: str  # of its classes
    head_dim: int = 0  # where config.json has none; 0: hidden_size by the heads
    qkv_bias: bool = False
    attention_bias: bool = False  # attention_bias is read: of all four projections
    mlp_bias: bool = False  # mlp_bias is read
    qk_norm: bool = False
    slides: bool = False  # sliding_window is read
    gated: bool = False  # ... where use_sliding_window is true
    window: int | None = 4096  # where config.json has no sliding_window
    typed: bool = False  # layer_types says which layers slide; else all do
    pattern: bool = False  # sliding_window_pattern says so where layer_types does not
    query_growth: bool = False
    gemma: bool = False  # norms around both halves of a layer, GeGLU, scaled embeddings
    experts: bool = False
    sinks: bool = False  # in every softmax of attention; biased experts with clipped gates
    defaults: Mapping[str, Any] = MappingProxyType({})  # of fields that config.json lacks
    scalar_name: str = ""  # of the class with a scalar head, where it differs


_QWEN = Family("Qwen", slides=True, gated=True, typed=True)
_MISTRAL = Family("Mistral", slides=True)
FAMILIES = {  # by model_type
    "qwen2": _QWEN._replace(name="Qwen2", qkv_bias=True),
    "qwen3": _QWEN._replace(name="Qwen3", head_dim=128, attention_bias=True, qk_norm=True),
    "qwen3_moe": _QWEN._replace(
        name="Qwen3Moe", attention_bias=True, qk_norm=True, typed=False, experts=True
    ),
    "llama": Family("Llama", attention_bias=True, mlp_bias=True),
    "mistral": _MISTRAL,
    "ministral": _MISTRAL._replace(name="Ministral", typed=True),
    "ministral3": Family("Ministral3", head_dim=128, slides=True, window=None, query_growth=True),
    "gemma3_text": Family(
        "Gemma3",
        head_dim=256,
        attention_bias=True,
        qk_norm=True,
        slides=True,
        typed=True,
        pattern=True,
        gemma=True,
        scalar_name="Gemma3Text",
    ),
    "gpt_oss": Family(
        "GptOss",
        head_dim=64,
        attention_bias=True,
        slides=True,
        window=128,
        typed=True,
        pattern=True,
        experts=True,
        sinks=True,
        defaults=GPT_OSS_DEFAULTS,
    ),
}

TIED = "tie_word_embeddings"
# Ours, and theirs; gpt-oss clips whatever its field says.
ACTIVATIONS = {"silu": "silu", "gelu_tanh": "gelu_pytorch_tanh", "clipped_swish": "silu"}
SIZES = {
    "vocab": "vocab_size",
    "layers": "num_hidden_layers",
    "embed": "hidden_size",
    "heads": "num_attention_heads",
    "mlp": "intermediate_size",
}

EXPERT_SIZES = {
    "mlp": "moe_intermediate_size",
    "experts": "num_experts",
    "experts_per_token": "num_experts_per_tok",
}
BIASED_EXPERT_SIZES = EXPERT_SIZES | {"mlp": "intermediate_size", "experts": "num_local_experts"}

# Settings that would change the numbers, with the only value that is supported.
UNSUPPORTED: dict[str, Any] = {"hidden_act": "silu", "quantization_config": None}
UNSUPPORTED_OF_EXPERTS: dict[str, Any] = UNSUPPORTED | {
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
UNSUPPORTED_OF_SINKS: dict[str, Any] = {
    "hidden_act": "silu",
    "swiglu_alpha": SHARPNESS,
    "swiglu_limit": LIMIT,
}
UNSUPPORTED_OF_GEMMA: dict[str, Any] = {
    "hidden_activation": "gelu_pytorch_tanh",
    "quantization_config": None,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "use_bidirectional_attention": False,
}


def _expert_sizes(family: Family) -> dict[str, str]:
    if family.sinks:
        return BIASED_EXPERT_SIZES
    return EXPERT_SIZES if family.experts else {}


def _sizes(values: dict[str, Any], family: Family) -> dict[str, int]:
    """Sizes of the decoder. Raises KeyError for a missing one, ValueError for a wrong one."""
    names = SIZES | _expert_sizes(family)
    if family.experts and "num_experts" not in values:  # as newer folders call it
        names = names | {"experts": "num_local_experts"}
    sizes = {name: read_number(values, key) for name, key in names.items()}
    heads = sizes["heads"]
    if family.experts and sizes["experts_per_token"] > sizes["experts"]:
        raise ValueError(
            f"num_experts_per_tok = {sizes['experts_per_token']}: must be at most num_experts = "
            f"{sizes['experts']}"
        )
    sizes["kv_heads"] = read_number(values, "num_key_value_heads", heads)
    if heads % sizes["kv_heads"]:
        raise ValueError(f"num_key_value_heads = {sizes['kv_heads']}: must divide {heads} heads")
    usual = family.head_dim or sizes["embed"] // heads
    sizes["head_dim"] = check_number("head_dim", read_number(values, "head_dim", usual))
    if sizes["head_dim"] % 2:
        raise ValueError(f"head_dim = {sizes['head_dim']}: must be even")
    return sizes


def _switches(values: dict[str, Any], family: Family) -> dict[str, Any]:
    """Optional parts: biases, norms of queries and keys, one matrix for embedding and head."""
    bias = family.attention_bias and read_switch(values, "attention_bias")
    tied = family.gemma if values.get(TIED) is None else read_switch(values, TIED)
    of_gemma: dict[str, Any] = dict.fromkeys(("out_norms", "norm_offset", "scale_embeddings"), True)
    if family.gemma:
        of_gemma["query_scalar"] = read_number(values, "query_pre_attn_scalar", 256)
        of_gemma["activation"] = "gelu_tanh"
    of_sinks = {"sinks": True, "expert_bias": True, "activation": "clipped_swish"}
    # A softmax over the chosen logits alone is one over all whose chosen weights are normalised.
    normalised = family.sinks or family.experts and read_switch(values, "norm_topk_prob")
    return {
        **(of_gemma if family.gemma else {}),
        **(of_sinks if family.sinks else {}),
        "qk_norm": family.qk_norm,
        "qkv_bias": family.qkv_bias or bias,
        "out_bias": bias,
        "mlp_bias": family.mlp_bias and read_switch(values, "mlp_bias"),
        "tie_embeddings": tied,
        "normalise_experts": normalised,
    }


def _window(values: dict[str, Any], family: Family) -> int | None:
    """Tokens that a sliding layer sees; None where config.json asks for no window."""
    if not family.slides or family.gated and not read_switch(values, "use_sliding_window"):
        return None
    if values.get("sliding_window", family.window) is None:
        return None
    return read_number(values, "sliding_window", family.window)


def _windows(values: dict[str, Any], family: Family) -> dict[str, Any]:
    """Window, and which layers slide. Raises ValueError for layers that are not so."""
    window, layers = _window(values, family), read_number(values, "num_hidden_layers")
    first = read_number(values, "max_window_layers", 28) if family.gated and family.typed else 0
    period = read_number(values, "sliding_window_pattern", 6) if family.pattern else layers + 1
    usual = [
        FULL if window is None or number < first or (number + 1) % period == 0 else SLIDING
        for number in range(layers)
    ]
    free = family.typed and window is not None
    allowed = [FULL, SLIDING] if free else usual[:1]
    types = values.get("layer_types") or usual
    known = isinstance(types, list) and all(kind in allowed for kind in types)
    if not known or len(types) != layers:
        expected = f"{' or '.join(allowed)}, each of {layers}"
        raise ValueError(f"layer_types {reprlib.repr(types)}: must be {expected}")
    slides = tuple(kind == SLIDING for kind in types)
    if not any(slides):
        return {}
    return {"window": window, "sliding": () if all(slides) else slides}


def _layers(values: dict[str, Any], family: Family) -> dict[str, Any]:
    """Windows and rotations of the layers."""
    windows = _windows(values, family)
    if not family.gemma:
        return windows | read_one_rope(values, family.query_growth)
    some = bool(windows.get("sliding"))
    return windows | read_two_ropes(values, some, bool(windows) and not some)


def _check_supported(values: dict[str, Any]) -> None:
    """Raises ValueError for a family or a setting that is not supported."""
    kind = values.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        allowed = " or ".join(FAMILIES)
        raise ValueError(f"model_type {reprlib.repr(kind)}: must be {allowed}")
    family = FAMILIES[kind]
    table = UNSUPPORTED_OF_EXPERTS if family.experts else UNSUPPORTED
    table = UNSUPPORTED_OF_GEMMA if family.gemma else table
    if family.sinks:
        table = UNSUPPORTED_OF_SINKS
        method = read_table(values, "quantization_config").get("quant_method", "mxfp4")
        if method != "mxfp4":
            raise ValueError(f"quantization_config of {reprlib.repr(method)}: must be 'mxfp4'")
    for name, plain in table.items():
        value = values.get(name, plain)
        if value != plain and not (value is None and not plain):
            raise ValueError(f"{name} {reprlib.repr(value)}: must be {plain!r}")


def decoder_config(
    values: dict[str, Any], folder: str, field: str, **numerics: Any
) -> DecoderConfig:
    """Decoder that the fields of a config.json describe; `numerics` are all other fields.

    Raises:
        ConfigError: a field is missing, wrong or not supported; names the setting `field` too.
    """
    try:
        _check_supported(values)
        family = FAMILIES[values["model_type"]]
        missing = {name for name in family.defaults if values.get(name) is None}
        values = values | {name: family.defaults[name] for name in missing}
        return DecoderConfig(
            **_sizes(values, family),
            family=values["model_type"],
            norm_eps=read_number(values, "rms_norm_eps", 1e-6),
            **_layers(values, family),
            **_switches(values, family),
            **numerics,
        )
    except KeyError as missing:
        raise ConfigError(f"config.{field}: {folder}/config.json has no {missing}", field) from None
    except ValueError as error:
        raise ConfigError(f"config.{field}: {folder}/config.json: {error}", field) from None


def config_json(config: DecoderConfig) -> dict[str, Any]:
    """Fields of a config.json for a decoder that came from no folder."""
    family, scaling = FAMILIES[config.family], config.rope_scaling
    values = {
        "architectures": architectures(config),
        "model_type": config.family,
        "hidden_activation" if family.gemma else "hidden_act": ACTIVATIONS[config.activation],
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
    if family.attention_bias:
        values["attention_bias"] = config.qkv_bias
    if family.mlp_bias:
        values["mlp_bias"] = config.mlp_bias
    if scaling is not None:
        values["rope_scaling"] = scaling_json(scaling, family.query_growth)
        if scaling.kind == "dynamic":
            values["max_position_embeddings"] = scaling.original_tokens
    elif family.defaults:
        values["rope_parameters"] = {"rope_type": "default", "rope_theta": config.rope_theta}
    if family.experts:
        values |= {name: getattr(config, ours) for ours, name in _expert_sizes(family).items()}
    if family.experts and not family.sinks:
        values["norm_topk_prob"] = config.normalise_experts
    if family.gemma:
        values["query_pre_attn_scalar"] = config.query_scalar
        values["rope_local_base_freq"] = config.sliding_rope_theta or config.rope_theta
    return values | _windows_json(config, family)


def _windows_json(config: DecoderConfig, family: Family) -> dict[str, Any]:
    """Fields of a config.json about windows; none where a family has none anyway."""
    slides = config.sliding or (config.window is not None,) * config.layers
    types = [SLIDING if one else FULL for one in slides]
    if config.window is None:
        found: dict[str, Any] = {"sliding_window": None}
        found |= {"layer_types": types} if family.pattern else {}
        return found if family.slides and not family.gated else {}
    return {
        "sliding_window": config.window,
        **({"use_sliding_window": True} if family.gated else {}),
        **({"layer_types": types} if family.typed else {}),
    }


def architectures(config: DecoderConfig) -> list[str]:
    """Name of the class by which `transformers` loads the folder."""
    head = "ForSequenceClassification" if config.scalar_head else "ForCausalLM"
    family = FAMILIES[config.family]
    return [(config.scalar_head and family.scalar_name or family.name) + head]
