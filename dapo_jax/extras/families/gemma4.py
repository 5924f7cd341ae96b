"""Gemma 4, text only: full layers have wider heads, last layers share keys and values.

The variant with experts beside each MLP (26B-A4B) is not supported.
"""

import dataclasses
from typing import Any

from dapo_jax.model.config_json import read_table
from dapo_jax.model.family import OUT_NORM_TENSORS, Family, Windows, same_value

_FULL, _PERIOD, _MAX_LAYERS = "full_attention", 6, 2**10
_ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    _FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
}


def _prepare(values: dict[str, Any]) -> dict[str, Any]:
    """Return a config.json with the published names of the sizes of full layers.

    `transformers` writes them layer by layer. The last layer is full if `layer_types` is missing.
    Attention in both directions is that of images, but for 'all'. Raises ValueError.
    """
    values = dict(values)
    if values.get("use_bidirectional_attention") == "vision":
        del values["use_bidirectional_attention"]
    words = values.get("vocab_size_per_layer_input")
    if values.get("hidden_size_per_layer_input") and words not in (None, values.get("vocab_size")):
        raise ValueError(f"vocab_size_per_layer_input {words!r}: must be vocab_size")
    layers, types = values.get("num_hidden_layers"), values.get("layer_types")
    if types is None and type(layers) is int and 0 < layers <= _MAX_LAYERS:
        types = [_FULL if (i + 1) % _PERIOD == 0 else "sliding_attention" for i in range(layers)]
        types[-1] = _FULL
    if isinstance(types, list) and types[-1:] != [_FULL]:
        raise ValueError(f"layer_types: must end with {_FULL!r}")
    if not values.get("attention_k_eq_v"):  # only these models have another number of heads
        values["num_global_key_value_heads"] = None
    return values | {"layer_types": types} | _sizes_of_full_layers(values, types)


def _sizes_of_full_layers(values: dict[str, Any], types: Any) -> dict[str, Any]:
    # Numbers of layers are padded: '05' beside '11'.
    table = read_table(values, "per_layer_config").items()
    table = {name.lstrip("0") or "0": sizes for name, sizes in table}
    if not table:
        return {}
    names = {"head_dim": "global_head_dim", "num_key_value_heads": "num_global_key_value_heads"}
    full = [str(i) for i, kind in enumerate(types or []) if kind == _FULL]
    sizes = table.get(full[0]) if full else None
    if not isinstance(sizes, dict) or table != dict.fromkeys(full, sizes) or sizes.keys() - names:
        raise ValueError(f"per_layer_config: must be the same {' and '.join(names)} in {_FULL}")
    return {
        outer: same_value({f"per_layer_config.{name}": sizes[name], outer: values.get(outer)})
        for name, outer in names.items()
        if name in sizes
    }


GEMMA4 = Family(
    model_type="gemma4_text",
    class_name="Gemma4",
    prepare=_prepare,
    fixed={
        "qk_norm": True,
        "out_norms": True,
        "value_norm": True,
        "scale_embeddings": True,
        "activation": "gelu_tanh",
        "query_scalar": 1,
        "multiplied": True,
    },
    fields={
        "full_head_dim": "global_head_dim",
        "full_kv_heads": "num_global_key_value_heads",
        "keys_as_values": "attention_k_eq_v",
        "sharing_layers": "num_kv_shared_layers",
        "wide_sharing_mlp": "use_double_wide_mlp",
        "layer_inputs": "hidden_size_per_layer_input",
        "logit_cap": "final_logit_softcapping",
    },
    optional=("num_global_key_value_heads", "final_logit_softcapping"),
    biases=("attention_bias",),
    defaults={
        "global_head_dim": 512,
        "num_kv_shared_layers": 0,
        "hidden_size_per_layer_input": 256,
        "rope_parameters": _ROPE,
    },
    required={
        "hidden_activation": "gelu_pytorch_tanh",
        "use_bidirectional_attention": None,
        "enable_moe_block": False,
    },
    activation_field="hidden_activation",
    windows=Windows(default=512, by_layer=True, period=_PERIOD),
    local_rope=True,
    tensors=OUT_NORM_TENSORS
    | {
        "input_gate/kernel": "per_layer_input_gate.weight",
        "input_out/kernel": "per_layer_projection.weight",
        "input_out_norm/scale": "post_per_layer_input_norm.weight",
        "multiplier": "layer_scalar",
    },
)
# The size of 12B, whose config.json has no fields of inputs of single layers.
GEMMA4_UNIFIED = dataclasses.replace(
    GEMMA4,
    model_type="gemma4_unified_text",
    class_name="Gemma4Unified",
    defaults=GEMMA4.defaults | {"hidden_size_per_layer_input": 0},
    windows=Windows(default=1024, by_layer=True, period=_PERIOD),
)
