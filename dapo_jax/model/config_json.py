"""Conversion of config.json to `DecoderConfig` and back, as the model's family declares."""

import math
import reprlib
from typing import Any

from dapo_jax.model.decoder import DecoderConfig
from dapo_jax.model.families import family_names, family_of
from dapo_jax.model.family import Family, Windows, same_value
from dapo_jax.model.rotary import RopeScaling
from dapo_jax.types.errors import ConfigError
from dapo_jax.types.rules import TYPE_NAMES, Range

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
# Names that folders of different ages and makers give to one setting.
SPELLINGS = (
    ("dtype", "torch_dtype"),
    ("hidden_act", "hidden_activation"),
    ("num_experts", "num_local_experts"),
    ("num_experts_per_tok", "experts_per_token"),
)
# Fields beside `text_config` that describe the text model too.
OUTER = ("tie_word_embeddings", "quantization_config", "compression_config")
OUTER_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")  # they take precedence
BIASES = {"attention_bias": ("qkv_bias", "out_bias"), "mlp_bias": ("mlp_bias",)}
# Ranges of the numbers in config.json. The upper limits are far above every published model. A
# larger value is a mistake or an attack: a list of 10^18 layers fills the memory, and a rotation by
# NaN trains to the end.
_COUNTS = {  # names by the largest number
    2**10: "num_hidden_layers sliding_window_pattern no_rope_layer_interval "
    "full_attention_interval linear_conv_kernel_dim",
    2**14: "num_attention_heads num_key_value_heads num_experts num_local_experts "
    "num_experts_per_tok num_global_key_value_heads linear_num_key_heads linear_num_value_heads "
    "linear_key_head_dim linear_value_head_dim",
    2**20: "hidden_size query_pre_attn_scalar",
    2**22: "intermediate_size moe_intermediate_size shared_expert_intermediate_size",
    2**24: "vocab_size",
    2**31 - 1: "sliding_window max_position_embeddings original_max_position_embeddings",
}
_FACTORS = (
    "factor low_freq_factor high_freq_factor beta_fast beta_slow attention_factor mscale "
    "mscale_all_dim final_logit_softcapping"
)
NUMBERS: dict[str, tuple[type, Range]] = {
    "head_dim": (int, Range(at_least=2, at_most=2**14)),
    "global_head_dim": (int, Range(at_least=2, at_most=2**14)),
    "max_window_layers": (int, Range(at_least=0, at_most=2**10)),
    "num_kv_shared_layers": (int, Range(at_least=0, at_most=2**10)),
    "hidden_size_per_layer_input": (int, Range(at_least=0, at_most=2**20)),
    "partial_rotary_factor": (float, Range(above=0, at_most=1)),
    "rms_norm_eps": (float, Range(above=0, at_most=1)),
    "rope_theta": (float, Range(at_least=1, at_most=1e15)),
    "rope_local_base_freq": (float, Range(at_least=1, at_most=1e15)),
    "llama_4_scaling_beta": (float, Range(at_least=0, at_most=1e6)),
    **dict.fromkeys(_FACTORS.split(), (float, Range(above=0, at_most=1e6))),
    **{
        name: (int, Range(at_least=1, at_most=largest))
        for largest, names in _COUNTS.items()
        for name in names.split()
    },
}
# Kinds of layers in config.json; linear ones are gated delta-net layers.
FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"
# Fields of a scaling in config.json by its type: attribute of RopeScaling, and default.
_FACTOR = {"factor": ("factor", None)}
_ORIGINAL = {"original_max_position_embeddings": ("original_tokens", None)}
_FIELDS: dict[str, dict[str, tuple[str, Any]]] = {
    "linear": _FACTOR,
    "proportional": {"factor": ("factor", 1.0), "partial_rotary_factor": ("rotated", 1.0)},
    "llama3": _FACTOR
    | {"low_freq_factor": ("low_turns", None), "high_freq_factor": ("high_turns", None)}
    | _ORIGINAL,
    "yarn": _FACTOR
    | {"beta_slow": ("low_turns", 1.0), "beta_fast": ("high_turns", 32.0)}
    | _ORIGINAL
    | {"attention_factor": ("attention_factor", None), "truncate": ("truncate", None)},
}
_OUTSIDE = ("rope_theta", "partial_rotary_factor")  # of older folders, outside of tables
_LOCAL = "rope_local_base_freq"
_QUERY_GROWTH = {"llama_4_scaling_beta": ("query_growth", None)}


# --- single fields --------------------------------------------------------------------------


def check_number(name: str, value: Any) -> Any:
    """Return the value of a field of `NUMBERS` as its type. Raises ValueError for a wrong one."""
    kind, allowed = NUMBERS[name]
    numbers = (int, float) if kind is float else (int,)
    if type(value) not in numbers or not allowed(value):
        raise ValueError(f"{name} = {reprlib.repr(value)}: must be {TYPE_NAMES[kind]} {allowed}")
    return kind(value)


def read_number(values: dict[str, Any], name: str, default: Any = None) -> Any:
    """Return the number of a field, or its default if the field is missing or null.

    Raises KeyError for a missing field without a default, ValueError for a wrong one.
    """
    value = values[name] if default is None else values.get(name)
    return default if value is None and default is not None else check_number(name, value)


def read_switch(values: dict[str, Any], name: str) -> bool:
    """Return a boolean field, false if missing or null. Raises ValueError for a wrong one."""
    value = values.get(name)
    if value is not None and type(value) is not bool:
        raise ValueError(f"{name} = {reprlib.repr(value)}: must be true or false")
    return bool(value)


def read_table(values: dict[str, Any], name: str) -> dict[str, Any]:
    """Return an object field, empty if missing or null. Raises ValueError for a wrong one."""
    value = values.get(name) or {}
    if not isinstance(value, dict):
        raise ValueError(f"{name} = {reprlib.repr(value)}: must be an object")
    return value


def text_part(values: dict[str, Any]) -> dict[str, Any]:
    """Return the config.json of the text model in that of a multimodal one; else the same."""
    text = read_table(values, "text_config")
    if not text:
        return values
    kind = values.get("model_type")
    outer = {n: same_value({n: values.get(n), f"text_config.{n}": text.get(n)}) for n in OUTER}
    outer |= {name: values.get(name) for name in OUTER_IDS}
    outer = {name: value for name, value in outer.items() if value is not None}
    return {"model_type": "mistral" if kind == "mistral3" else f"{kind}_text"} | text | outer


# --- rotations ------------------------------------------------------------------------------


def _attention_factor(rope: dict[str, Any], factor: float) -> float:
    """Return YaRN's factor of rotated vectors (equation 22 of the paper)."""

    def growth(mscale: float) -> float:
        return 0.1 * mscale * math.log(factor) + 1 if factor > 1 else 1.0

    if rope.get("attention_factor") is not None:
        return read_number(rope, "attention_factor")
    names = ("mscale", "mscale_all_dim")
    if all(rope.get(name) is not None for name in names):
        numerator, denominator = (growth(read_number(rope, name)) for name in names)
        return numerator / denominator
    return growth(1.0)


def _rope_table(values: dict[str, Any], name: str) -> dict[str, Any]:
    """Return a table of rotations without nulls and with `rope_type`, which was `type` once."""
    table = {field: value for field, value in read_table(values, name).items() if value is not None}
    kind = same_value(
        {f"{name}.{field}": table.pop(field, None) for field in ("rope_type", "type")}
    )
    return ({} if kind is None else {"rope_type": kind}) | table


def _merge(tables: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return one table of rotations from several, by prefix. Raises ValueError if two differ."""
    names = {name: None for table in tables.values() for name in table}
    merged = {n: same_value({p + n: t.get(n) for p, t in tables.items()}) for n in names}
    return {name: value for name, value in merged.items() if value is not None}


def _gather_rope(values: dict[str, Any], family: Family) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return tables of the rotations of full and of sliding layers, as in `rope_parameters`.

    The second is empty for a family with the same rotations in all layers. Older folders have
    `rope_scaling` and fields outside tables. Raises ValueError if two differ.
    """
    new, old = (_rope_table(values, name) for name in ("rope_parameters", "rope_scaling"))
    new = new if new or old else family.defaults.get("rope_parameters", {})
    outside = {name: values.get(name) for name in (*_OUTSIDE, *_ORIGINAL)}
    base = family.defaults.get("rope_theta", 10_000.0)
    plain = {} if family.local_rope else new
    if any((name in (FULL, SLIDING)) != family.local_rope for name in new):
        allowed = f"{FULL} and {SLIDING}" if family.local_rope else "fields of one rotation"
        raise ValueError(f"rope_parameters {reprlib.repr(new)}: must hold {allowed}")
    if old and plain:  # `transformers` then reads only `rope_scaling`
        read = {"rope_theta": base} | _merge({"rope_scaling.": old, "": outside})
        for name, value in plain.items():
            if value != read.get(name) and (name, value) != ("rope_type", "default"):
                found = f"rope_scaling.{name} = {reprlib.repr(read.get(name))}"
                raise ValueError(f"rope_parameters.{name} = {value!r} and {found}: must be equal")
        plain = {}
    if not family.local_rope:
        tables = {"rope_parameters.": plain, "rope_scaling.": old, "": outside}
        return {"rope_theta": base} | _merge(tables), {}
    full, sliding = (_rope_table(new, kind) for kind in (FULL, SLIDING))
    if old.get("rope_type") and full.get("rope_type") == "default":
        del full["rope_type"]
    full = _merge({f"rope_parameters.{FULL}.": full, "rope_scaling.": old, "": outside})
    bases = {f"rope_parameters.{SLIDING}.rope_theta": sliding.get("rope_theta")}
    local = same_value(bases | {_LOCAL: values.get(_LOCAL)})
    local = local or family.defaults.get(_LOCAL) or values.get("rope_theta") or base
    return {"rope_theta": base} | full, sliding | {"rope_theta": local}


def _read_rope(values: dict[str, Any], rope: dict[str, Any], family: Family) -> dict[str, Any]:
    """Return base and scaling of rotations as fields of a decoder."""
    kind, rotated = rope.get("rope_type", "default"), rope.get("partial_rotary_factor", 1)
    if family.partial_rotary == 1 and kind != "proportional" and rotated != 1:
        raise ValueError(f"partial_rotary_factor {reprlib.repr(rotated)}: must be 1.0")
    if kind != "default" and (not isinstance(kind, str) or kind not in _FIELDS):
        allowed = "', '".join(_FIELDS)
        raise ValueError(f"rope_scaling of type {kind!r}: must be 'default' or '{allowed}'")
    theta = read_number(rope, "rope_theta")
    if kind == "default":
        return {"rope_theta": theta}
    fields = _FIELDS[kind] | (_QUERY_GROWTH if family.query_growth else {})
    read: dict[str, Any] = {"kind": kind}
    for name, (ours, default) in fields.items():
        if name == "attention_factor":
            read[ours] = _attention_factor(rope, read["factor"])
        elif name in _ORIGINAL:  # the context length of pretraining
            table = rope if name in rope else values
            read[ours] = read_number(table, name if name in rope else "max_position_embeddings")
        elif name == "truncate":
            read[ours] = rope.get(name) is None or read_switch(rope, name)
        else:
            read[ours] = read_number(rope, name, default)
    if kind == "yarn" and theta <= 1:
        raise ValueError(f"rope_theta = {theta}: must be above 1 with yarn")
    scaling = RopeScaling(**read)
    if "low_turns" in read and scaling.low_turns >= scaling.high_turns:
        low, high = (name for name, (ours, _) in fields.items() if ours.endswith("turns"))
        raise ValueError(
            f"{high} = {scaling.high_turns}: must be above {low} = {scaling.low_turns}"
        )
    return {"rope_theta": theta, "rope_scaling": scaling}


# --- decoders -------------------------------------------------------------------------------


def _check_supported(values: dict[str, Any], family: Family) -> None:
    """Raise ValueError for a field that would change the numbers in an unsupported way."""
    required = family.required | {"compression_config": None}
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
    """Return sizes and switches of the decoder."""
    read: dict[str, Any] = {}
    for ours, name in (COMMON_FIELDS | family.fields).items():
        if ours in DERIVED:
            continue
        if name in family.optional and values.get(name) is None:
            continue
        read[ours] = read_number(values, name) if name in NUMBERS else read_switch(values, name)
    heads = read["heads"]
    if read.get("experts_per_token", 0) > read.get("experts", 0):
        raise ValueError(
            f"num_experts_per_tok = {read['experts_per_token']}: must be at most num_experts = "
            f"{read['experts']}"
        )
    read["kv_heads"] = read_number(values, "num_key_value_heads", heads)
    for name in ("num_key_value_heads", "num_global_key_value_heads"):
        groups = read["kv_heads"] if name in COMMON_FIELDS.values() else read.get("full_kv_heads")
        if groups and heads % groups:
            raise ValueError(f"{name} = {groups}: must divide {heads} heads")
    head_dim = read_number(values, "head_dim", read["embed"] // heads)
    read["head_dim"] = check_number("head_dim", head_dim)
    for name, ours in {"head_dim": "head_dim", "global_head_dim": "full_head_dim"}.items():
        if read.get(ours, 0) % 2:
            raise ValueError(f"{name} = {read[ours]}: must be even")
    read["qkv_bias"] = False
    for name in family.biases:
        read |= dict.fromkeys(BIASES[name], read_switch(values, name))
    return read


def _read_list(values: dict[str, Any], name: str, usual: list, allowed: tuple) -> list:
    """Return a field with an entry for each layer, or `usual` if it is missing or null.

    A list takes precedence over the number that `usual` follows from, as in `transformers`.
    Raises ValueError.
    """
    entries = usual if values.get(name) is None else values[name]
    known = isinstance(entries, list) and all(
        type(entry) is type(allowed[0]) and entry in allowed for entry in entries
    )
    if not known or len(entries) != len(usual):
        expected = f"{' or '.join(map(str, allowed))}, for each of {len(usual)} layers"
        raise ValueError(f"{name} {reprlib.repr(entries)}: must be {expected}")
    return entries


def _read_windows(values: dict[str, Any], family: Family, layers: int) -> dict[str, Any]:
    """Return the window and the layers that slide. Raises ValueError for wrong `layer_types`."""
    windows = family.windows or Windows(default=None)
    is_on = not windows.switch or read_switch(values, "use_sliding_window")
    window = None  # without sliding windows
    if family.windows and is_on and values.get("sliding_window", windows.default) is not None:
        window = read_number(values, "sliding_window", windows.default)
    if window is not None and values.get("use_sliding_window") is False:
        raise ValueError(f"use_sliding_window = False and sliding_window = {window}: must agree")
    first, period = 0, layers + 1
    if windows.first is not None:
        first = read_number(values, "max_window_layers", windows.first)
    if windows.period is not None:
        period = read_number(values, "sliding_window_pattern", windows.period)
    usual = [
        FULL if window is None or number < first or (number + 1) % period == 0 else SLIDING
        for number in range(layers)
    ]
    by_layer = windows.by_layer and window is not None
    types = _read_list(values, "layer_types", usual, (FULL, SLIDING) if by_layer else (usual[0],))
    slides = tuple(kind == SLIDING for kind in types)
    if not any(slides):
        return {}
    return {"window": window, "sliding": () if all(slides) else slides}


def _read_rotated(values: dict[str, Any], family: Family, layers: int) -> dict[str, Any]:
    """Return the layers that rotate, if not all do. Raises ValueError for a wrong field."""
    if family.rotary_interval is None:
        return {}
    interval = read_number(values, "no_rope_layer_interval", family.rotary_interval)
    usual = [int((number + 1) % interval != 0) for number in range(layers)]
    flags = values.get("no_rope_layers")
    if isinstance(flags, list) and len(flags) > layers:  # of a model that was cut
        values = values | {"no_rope_layers": flags[:layers]}
    # Despite the field's name, 1 is a layer that rotates.
    rotated = tuple(flag == 1 for flag in _read_list(values, "no_rope_layers", usual, (0, 1)))
    return {} if all(rotated) else {"rotated": rotated}


def _read_rotary_dim(rope: dict[str, Any], family: Family, head_dim: int) -> dict[str, Any]:
    """Return the dimensions of a head that rotate. Raises ValueError if they are no pairs."""
    factor = read_number(rope, "partial_rotary_factor", family.partial_rotary)
    width = int(head_dim * factor)
    if width % 2 or not width:
        raise ValueError(f"partial_rotary_factor = {factor}: must be of an even number above 0")
    return {"rotary_dim": width}


def _read_recurrent(values: dict[str, Any], family: Family, layers: int) -> dict[str, Any]:
    """Return which layers are gated delta-net layers. Raises ValueError for a wrong field."""
    interval = read_number(values, "full_attention_interval", family.delta_interval)
    usual = [FULL if (number + 1) % interval == 0 else LINEAR for number in range(layers)]
    types = _read_list(values, "layer_types", usual, (FULL, LINEAR))
    if FULL not in types:
        raise ValueError(f"layer_types {reprlib.repr(types)}: must have {FULL} at least once")
    heads = [values[f"linear_num_{name}_heads"] for name in ("value", "key")]
    if heads[0] % heads[1]:
        raise ValueError(
            f"linear_num_value_heads = {heads[0]}: must be a multiple of linear_num_key_heads = "
            f"{heads[1]}"
        )
    return {"recurrent": tuple(kind == LINEAR for kind in types)}


def _check_sharing(fields: dict[str, Any], windows: dict[str, Any]) -> None:
    """Raise ValueError if a layer shares keys and values that no layer of its kind computes."""
    sharing, kinds = fields.get("sharing_layers", 0), windows.get("sliding", (True,))
    own = kinds[: fields["layers"] - sharing] if sharing < fields["layers"] else ()
    if sharing and set(own) != set(kinds):
        raise ValueError(
            f"num_kv_shared_layers = {sharing}: must leave a layer of each of layer_types"
        )


def decoder_from_json(
    values: dict[str, Any], folder: str, field: str, **numerics: Any
) -> DecoderConfig:
    """Return the decoder that a config.json describes; `numerics` are all other fields.

    Raises `ConfigError` that names the setting `field` and the wrong field.
    """
    try:
        values = text_part(values)
        kind = values.get("model_type")
        if not isinstance(kind, str) or kind not in family_names():
            allowed = " or ".join(family_names())
            raise ValueError(f"model_type {reprlib.repr(kind)}: must be {allowed}")
        family = family_of(kind)
        for names in SPELLINGS:
            value = same_value({name: values.get(name) for name in names})
            values = values | (dict.fromkeys(names, value) if value is not None else {})
        values = family.prepare(values)
        rope, sliding_rope = _gather_rope(values, family)
        _check_supported(values, family)
        given = {name: value for name, value in values.items() if value is not None}
        derived = dict.fromkeys({"num_key_value_heads"} & values.keys())  # if it is null
        values = values | family.defaults | derived | given
        fields = _read_fields(values, family) | family.fixed
        if family.delta_interval is not None:
            fields |= _read_recurrent(values, family, fields["layers"])
            fields |= _read_rotary_dim(rope, family, fields["head_dim"])
            values = values | {"layer_types": None}
        windows = _read_windows(values, family, fields["layers"])
        _check_sharing(fields, windows)
        fields |= _read_rotated(values, family, fields["layers"])
        rotations = _read_rope(values, rope, family)
        if family.local_rope:
            local = _read_rope(values, sliding_rope, family)
            if "rope_scaling" in local:
                raise ValueError(f"rope_parameters of {SLIDING}: must be of type 'default'")
            some_slide = bool(windows.get("sliding"))
            rotations |= {"sliding_rope_theta": local["rope_theta"]} if some_slide else {}
            rotations = local if windows and not some_slide else rotations
        return DecoderConfig(**fields, family=kind, **windows, **rotations, **numerics)
    except KeyError as missing:
        raise ConfigError(f"config.{field}: {folder}/config.json has no {missing}", field) from None
    except ValueError as error:
        raise ConfigError(f"config.{field}: {folder}/config.json: {error}", field) from None


def decoder_to_json(config: DecoderConfig) -> dict[str, Any]:
    """Return the fields of a config.json for a decoder that was not read from a folder."""
    family, scaling = family_of(config.family), config.rope_scaling
    name = f"{family.class_name}ForCausalLM"  # of the class in `transformers`
    if config.scalar_head:
        name = f"{family.classifier_name or family.class_name}ForSequenceClassification"
    values = {
        "architectures": [name],
        "model_type": config.family,
        family.activation_field: family.required[family.activation_field],
    }
    values |= {name: getattr(config, ours) for ours, name in COMMON_FIELDS.items()}
    values["max_position_embeddings"] = MAX_POSITION_EMBEDDINGS
    values |= {name: getattr(config, BIASES[name][0]) for name in family.biases}
    if scaling is not None:
        names = _FIELDS[scaling.kind] | (_QUERY_GROWTH if family.query_growth else {})
        table = {name: getattr(scaling, ours) for name, (ours, _) in names.items()}
        values["rope_scaling"] = {"rope_type": scaling.kind, **table}
    elif "rope_parameters" in family.defaults:
        values["rope_parameters"] = {"rope_type": "default", "rope_theta": config.rope_theta}
    values |= {name: getattr(config, ours) for ours, name in family.fields.items()}
    sliding_theta = config.sliding_rope_theta or config.rope_theta
    if family.local_rope and "rope_local_base_freq" in family.defaults:
        values["rope_local_base_freq"] = sliding_theta
    elif family.local_rope:
        bases = {FULL: config.rope_theta, SLIDING: sliding_theta}
        values["rope_parameters"] = {
            kind: {"rope_type": "default", "rope_theta": base} for kind, base in bases.items()
        }
        values["rope_parameters"][FULL] |= values.pop("rope_scaling", {})
    if family.rotary_interval is not None:
        rotated = config.rotated or (True,) * config.layers
        values["no_rope_layers"] = [int(flag) for flag in rotated]
    if family.delta_interval is not None:
        values["layer_types"] = [LINEAR if flag else FULL for flag in config.recurrent]
        assert config.rotary_dim is not None, "of every decoder of these families"
        values["partial_rotary_factor"] = config.rotary_dim / config.head_dim
    if family.windows is not None:
        values |= _windows_json(config, family.windows)
    return values


def _windows_json(config: DecoderConfig, windows: Windows) -> dict[str, Any]:
    slides, has_window = config.sliding, config.window is not None
    if windows.switch and not has_window:
        return {}
    slides = slides or (has_window,) * config.layers
    types = [SLIDING if layer_slides else FULL for layer_slides in slides]
    lists = windows.by_layer if has_window else windows.period is not None
    values: dict[str, Any] = {"sliding_window": config.window}
    values |= {"use_sliding_window": True} if windows.switch else {}
    return values | ({"layer_types": types} if lists else {})
