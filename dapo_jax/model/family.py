"""Declaration of a model family: fields of its config.json, names of its tensors, rotations."""

import dataclasses
import reprlib
from collections.abc import Callable
from typing import Any

_PROJECTIONS = {
    "query": "self_attn.q_proj",
    "key": "self_attn.k_proj",
    "value": "self_attn.v_proj",
    "out": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
# Names of published tensors below `model.layers.N`, by path below a stack of layers.
LAYER_TENSORS = {
    "attention_norm/scale": "input_layernorm.weight",
    "query_norm/scale": "self_attn.q_norm.weight",
    "key_norm/scale": "self_attn.k_norm.weight",
    "mlp_norm/scale": "post_attention_layernorm.weight",
    **{f"{ours}/kernel": f"{name}.weight" for ours, name in _PROJECTIONS.items()},
    **{f"{ours}/bias": f"{name}.bias" for ours, name in _PROJECTIONS.items()},
}
# With norms of the outputs of attention and MLP too.
OUT_NORM_TENSORS = LAYER_TENSORS | {
    "attention_out_norm/scale": "post_attention_layernorm.weight",
    "mlp_norm/scale": "pre_feedforward_layernorm.weight",
    "mlp_out_norm/scale": "post_feedforward_layernorm.weight",
}
# Tensors of experts; {} is the expert's number. PEFT names adapters of experts like this.
EXPERT_TENSORS = LAYER_TENSORS | {
    "moe/router/kernel": "mlp.gate.weight",
    "moe/expert_gate/kernel": "mlp.experts.{}.gate_proj.weight",
    "moe/expert_up/kernel": "mlp.experts.{}.up_proj.weight",
    "moe/expert_down/kernel": "mlp.experts.{}.down_proj.weight",
}


def same_value(said: dict[str, Any]) -> Any:
    """Return the value of a setting that several fields may hold. Raises ValueError if two differ.

    Fields that are null are left out; if all are, it is None.
    """
    first, *others = [n for n, value in said.items() if value is not None] or [*said]
    for name in others:
        if said[name] != said[first]:
            values = (
                f"{first} = {reprlib.repr(said[first])} and {name} = {reprlib.repr(said[name])}"
            )
            raise ValueError(f"{values}: must be equal")
    return said[first]


@dataclasses.dataclass(frozen=True)
class Windows:
    """Fields of config.json that describe a family's sliding windows."""

    default: int | None = 4096  # tokens of a window without `sliding_window`; None: no window
    switch: bool = False  # windows need `use_sliding_window`
    by_layer: bool = False  # `layer_types` selects the sliding layers; otherwise all layers slide
    # Default of `max_window_layers`, the number of first layers with full attention; None: the
    # field is not read.
    first: int | None = None
    # Default of `sliding_window_pattern`: every so many layers one has full attention; None: the
    # field is not read.
    period: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """How `transformers` reads the config.json and the tensors of a model family.

    A family has many attributes because each feature is independent of the others. Experts with a
    name without {} in `tensors` are fused: one tensor [experts, in, out] holds all of a layer, and
    parameters with the same name alternate along its last axis.
    """

    model_type: str  # field of config.json that names the family
    class_name: str  # prefix of its classes in `transformers`
    classifier_name: str = ""  # prefix of its class with a scalar head, if it differs
    # Fields of DecoderConfig that are the same for all models of the family.
    fixed: dict[str, Any] = dataclasses.field(default_factory=dict)
    # Additional fields of config.json, by field of DecoderConfig.
    fields: dict[str, str] = dataclasses.field(default_factory=dict)
    optional: tuple[str, ...] = ()  # of these names, those that may be null or left out
    # Makes a config.json uniform before it is read; raises ValueError.
    prepare: Callable[[dict[str, Any]], dict[str, Any]] = dict
    biases: tuple[str, ...] = ()  # fields of config.json, from `config_json.BIASES`
    # Of fields left out, besides those of `published_defaults`.
    defaults: dict[str, Any] = dataclasses.field(default_factory=dict)
    # The only supported values of fields that would change the computed numbers.
    required: dict[str, Any] = dataclasses.field(default_factory=lambda: {"hidden_act": "silu"})
    activation_field: str = "hidden_act"  # field of `required` that names the activation function
    quantisation: str = ""  # `quant_method` of quantised folders that can be loaded; empty: none
    windows: Windows | None = None  # sliding windows; None: config.json has no such fields
    query_growth: bool = False  # queries grow with the logarithm of their position (Llama 4)
    # Sliding layers rotate without scaling, by `rope_local_base_freq` or else the common base.
    local_rope: bool = False
    # Default of `no_rope_layer_interval`: every so many layers one does not rotate; None: all do.
    rotary_interval: int | None = None
    # Default of `full_attention_interval`: every so many layers one has attention, all others are
    # gated delta-net layers; None: there are none.
    delta_interval: int | None = None
    partial_rotary: float = 1.0  # default of `partial_rotary_factor`
    # Published names of a layer's tensors, and those that PEFT derives names of adapters from.
    tensors: dict[str, str] = dataclasses.field(default_factory=lambda: LAYER_TENSORS)
    adapter_tensors: dict[str, str] | None = None  # None: `tensors`
