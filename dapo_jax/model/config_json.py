"""Conversion of config.json to `DecoderConfig` and back, as the model's family declares."""

import reprlib
from typing import Any

from dapo_jax.model.config_fields import (
    NUMBERS,
    check_number,
    read_number,
    read_switch,
    read_table,
)
from dapo_jax.model.decoder import DecoderConfig
from dapo_jax.model.families import FAMILIES
from dapo_jax.model.families.family import Family, Windows
from dapo_jax.model.rotary import FULL, SLIDING, read_local_rope, read_rope, scaling_json
from dapo_jax.runtime.settings import ConfigError

MAX_POSITION_EMBEDDINGS = 32_768  # of folders that are not made from another one

# Fields of config.json that all families have, by field of DecoderConfig. Their order is part of
# a folder's fingerprint.
COMMON_FIELDS = {
    "vocab": "vocab_size",
    "layers": "num_hidden_layers",
    "embed": "hidden_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "mlp": "intermediate_size",
    "rope_theta": "rope_theta",
    "norm_eps": "rms_norm_eps",
    "tie_embeddings": "tie_word_embeddings",
}
DERIVED = ("kv_heads", "head_dim", "rope_theta")  # depend on other fields if they are missing
DEFAULTS = {"rms_norm_eps": 1e-6}
BIASES = {"attention_bias": ("qkv_bias", "out_bias"), "mlp_bias": ("mlp_bias",)}


def _check_supported(values: dict[str, Any], family: Family) -> None:
    """Raise ValueError for a field that would change the numbers in an unsupported way."""
    required = {**family.required}
    if family.quantisation:
        table = read_table(values, "quantization_config")
        method = table.get("quant_method", family.quantisation)
        if method != family.quantisation:
            raise ValueError(
                f"quantization_config of {reprlib.repr(method)}: must be {family.quantisation!r}"
            )
    else:
        required["quantization_config"] = None
    for name, supported in required.items():
        value = values.get(name, supported)
        if value != supported and not (value is None and not supported):
            raise ValueError(f"{name} {reprlib.repr(value)}: must be {supported!r}")


def _read_fields(values: dict[str, Any], family: Family) -> dict[str, Any]:
    """Return sizes and switches of the decoder.

    Raises KeyError for a missing field, ValueError for a wrong one.
    """
    read: dict[str, Any] = {}
    for ours, name in (COMMON_FIELDS | family.fields).items():
        if ours in DERIVED:
            continue
        if name not in values:
            name = family.aliases.get(name, name)
        read[ours] = read_number(values, name) if name in NUMBERS else read_switch(values, name)
    heads = read["heads"]
    if read.get("experts_per_token", 0) > read.get("experts", 0):
        raise ValueError(
            f"num_experts_per_tok = {read['experts_per_token']}: must be at most num_experts = "
            f"{read['experts']}"
        )
    read["kv_heads"] = read_number(values, "num_key_value_heads", heads)
    if heads % read["kv_heads"]:
        raise ValueError(f"num_key_value_heads = {read['kv_heads']}: must divide {heads} heads")
    head_dim = read_number(values, "head_dim", read["embed"] // heads)
    read["head_dim"] = check_number("head_dim", head_dim)
    if read["head_dim"] % 2:
        raise ValueError(f"head_dim = {read['head_dim']}: must be even")
    read["qkv_bias"] = False
    for name in family.biases:
        read |= dict.fromkeys(BIASES[name], read_switch(values, name))
    return read


def _read_window(values: dict[str, Any], windows: Windows | None) -> int | None:
    """Return the number of tokens that a sliding layer sees; None without sliding windows."""
    if windows is None or windows.switch and not read_switch(values, "use_sliding_window"):
        return None
    if values.get("sliding_window", windows.default) is None:
        return None
    return read_number(values, "sliding_window", windows.default)


def _read_windows(values: dict[str, Any], family: Family, layers: int) -> dict[str, Any]:
    """Return the window and the layers that slide. Raises ValueError for wrong `layer_types`."""
    windows = family.windows or Windows()
    window = _read_window(values, family.windows)
    first, period = 0, layers + 1
    if windows.first is not None:
        first = read_number(values, "max_window_layers", windows.first)
    if windows.period is not None:
        period = read_number(values, "sliding_window_pattern", windows.period)
    usual = [
        FULL if window is None or number < first or (number + 1) % period == 0 else SLIDING
        for number in range(layers)
    ]
    allowed = [FULL, SLIDING] if windows.by_layer and window is not None else usual[:1]
    types = values.get("layer_types") or usual
    known = isinstance(types, list) and all(kind in allowed for kind in types)
    if not known or len(types) != layers:
        expected = f"{' or '.join(allowed)}, each of {layers}"
        raise ValueError(f"layer_types {reprlib.repr(types)}: must be {expected}")
    slides = tuple(kind == SLIDING for kind in types)
    if not any(slides):
        return {}
    return {"window": window, "sliding": () if all(slides) else slides}


def _read_rotations(
    values: dict[str, Any], family: Family, windows: dict[str, Any]
) -> dict[str, Any]:
    if not family.local_rope:
        return read_rope(values, family.query_growth)
    some_slide = bool(windows.get("sliding"))
    return read_local_rope(values, some_slide, all_slide=bool(windows) and not some_slide)


def decoder_from_json(
    values: dict[str, Any], folder: str, field: str, **numerics: Any
) -> DecoderConfig:
    """Return the decoder that a config.json describes; `numerics` are all other fields.

    Raises:
        ConfigError: a field is missing, wrong or not supported; names the setting `field` too.
    """
    try:
        kind = values.get("model_type")
        if not isinstance(kind, str) or kind not in FAMILIES:
            allowed = " or ".join(FAMILIES)
            raise ValueError(f"model_type {reprlib.repr(kind)}: must be {allowed}")
        family = FAMILIES[kind]
        _check_supported(values, family)
        defaults = DEFAULTS | family.defaults
        missing = {name for name in defaults if values.get(name) is None}
        values = values | {name: defaults[name] for name in missing}
        fields = _read_fields(values, family) | family.fixed
        windows = _read_windows(values, family, fields["layers"])
        rotations = _read_rotations(values, family, windows)
        return DecoderConfig(**fields, family=kind, **windows, **rotations, **numerics)
    except KeyError as missing:
        raise ConfigError(f"config.{field}: {folder}/config.json has no {missing}", field) from None
    except ValueError as error:
        raise ConfigError(f"config.{field}: {folder}/config.json: {error}", field) from None


def decoder_to_json(config: DecoderConfig) -> dict[str, Any]:
    """Return the fields of a config.json for a decoder that was not read from a folder."""
    family, scaling = FAMILIES[config.family], config.rope_scaling
    values = {
        "architectures": [_class_name(config, family)],
        "model_type": config.family,
        family.activation_field: family.required[family.activation_field],
    }
    values |= {name: getattr(config, ours) for ours, name in COMMON_FIELDS.items()}
    values["max_position_embeddings"] = MAX_POSITION_EMBEDDINGS
    values |= {name: getattr(config, BIASES[name][0]) for name in family.biases}
    if scaling is not None:
        values["rope_scaling"] = scaling_json(scaling, family.query_growth)
        if scaling.kind == "dynamic":
            values["max_position_embeddings"] = scaling.original_tokens
    elif "rope_scaling" in family.defaults:
        values["rope_parameters"] = {"rope_type": "default", "rope_theta": config.rope_theta}
    values |= {name: getattr(config, ours) for ours, name in family.fields.items()}
    if family.local_rope:
        values["rope_local_base_freq"] = config.sliding_rope_theta or config.rope_theta
    if family.windows is not None:
        values |= _windows_json(config, family.windows)
    return values


def _windows_json(config: DecoderConfig, windows: Windows) -> dict[str, Any]:
    slides = config.sliding or (config.window is not None,) * config.layers
    types = [SLIDING if layer_slides else FULL for layer_slides in slides]
    if config.window is None:
        if windows.switch:
            return {}
        layer_types = {} if windows.period is None else {"layer_types": types}
        return {"sliding_window": None} | layer_types
    values: dict[str, Any] = {"sliding_window": config.window}
    if windows.switch:
        values["use_sliding_window"] = True
    if windows.by_layer:
        values["layer_types"] = types
    return values


def _class_name(config: DecoderConfig, family: Family) -> str:
    """Return the name of the folder's class in `transformers`."""
    if config.scalar_head:
        return f"{family.classifier_name or family.class_name}ForSequenceClassification"
    return f"{family.class_name}ForCausalLM"
