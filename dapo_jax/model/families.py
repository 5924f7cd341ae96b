"""Model families by `model_type`: fields of config.json, names of tensors, rotations."""

import dataclasses
from typing import Any

from dapo_jax.model.layers import GATE_LIMIT, GATE_SHARPNESS

# Names of published tensors below `model.layers.N`, by path below a stack of layers.
LAYER_TENSORS = {
    "attention_norm/scale": "input_layernorm.weight",
    "query/kernel": "self_attn.q_proj.weight",
    "query/bias": "self_attn.q_proj.bias",
    "query_norm/scale": "self_attn.q_norm.weight",
    "key/kernel": "self_attn.k_proj.weight",
    "key/bias": "self_attn.k_proj.bias",
    "key_norm/scale": "self_attn.k_norm.weight",
    "value/kernel": "self_attn.v_proj.weight",
    "value/bias": "self_attn.v_proj.bias",
    "out/kernel": "self_attn.o_proj.weight",
    "out/bias": "self_attn.o_proj.bias",
    "mlp_norm/scale": "post_attention_layernorm.weight",
    "gate/kernel": "mlp.gate_proj.weight",
    "gate/bias": "mlp.gate_proj.bias",
    "up/kernel": "mlp.up_proj.weight",
    "up/bias": "mlp.up_proj.bias",
    "down/kernel": "mlp.down_proj.weight",
    "down/bias": "mlp.down_proj.bias",
}
# Tensors of experts; {} is the expert's number. PEFT names adapters of experts like this.
EXPERT_TENSORS = LAYER_TENSORS | {
    "moe/router/kernel": "mlp.gate.weight",
    "moe/expert_gate/kernel": "mlp.experts.{}.gate_proj.weight",
    "moe/expert_up/kernel": "mlp.experts.{}.up_proj.weight",
    "moe/expert_down/kernel": "mlp.experts.{}.down_proj.weight",
}


@dataclasses.dataclass(frozen=True)
class Windows:
    """Fields of config.json that describe a family's sliding windows."""

    default: int | None = 4096  # `sliding_window` if it is missing; None: no window
    switch: bool = False  # windows need `use_sliding_window`
    by_layer: bool = False  # `layer_types` selects the sliding layers; otherwise all layers slide
    first: int | None = None  # default of `max_window_layers`, first layers with full attention
    period: int | None = None  # default of `sliding_window_pattern`; None: the field is not read


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """How `transformers` reads the config.json and the tensors of a model family.

    A family has many attributes because each feature is independent of the others.
    """

    model_type: str
    class_name: str  # prefix of its classes in `transformers`
    classifier_name: str = ""  # prefix of its class with a scalar head, if it differs
    fixed: dict[str, Any] = dataclasses.field(default_factory=dict)  # fields of DecoderConfig
    fields: dict[str, str] = dataclasses.field(default_factory=dict)  # more, from config.json
    aliases: dict[str, str] = dataclasses.field(default_factory=dict)  # names in newer folders
    biases: tuple[str, ...] = ()  # fields of config.json, from `config_json.BIASES`, that are read
    defaults: dict[str, Any] = dataclasses.field(default_factory=dict)  # of config.json
    # The only supported values of fields that would change the computed numbers.
    required: dict[str, Any] = dataclasses.field(default_factory=lambda: {"hidden_act": "silu"})
    activation_field: str = "hidden_act"  # field of `required` that names the activation function
    quantisation: str = ""  # `quant_method` of quantised folders that can be loaded; empty: none
    windows: Windows | None = None  # None: config.json has no such fields
    query_growth: bool = False  # queries grow with the logarithm of their position (Llama 4)
    local_rope: bool = False  # sliding layers rotate by their own base, `rope_local_base_freq`
    # Experts with a name without {} are fused: one tensor [experts, in, out] holds all of a layer,
    # and parameters with the same name alternate along its last axis.
    tensors: dict[str, str] = dataclasses.field(default_factory=lambda: LAYER_TENSORS)
    # PEFT derives the names of adapters from these.
    adapter_tensors: dict[str, str] = dataclasses.field(default_factory=lambda: LAYER_TENSORS)


QWEN2 = Family(
    model_type="qwen2",
    class_name="Qwen2",
    fixed={"qkv_bias": True},
    windows=Windows(switch=True, by_layer=True, first=28),
)
QWEN3 = Family(
    model_type="qwen3",
    class_name="Qwen3",
    fixed={"qk_norm": True},
    biases=("attention_bias",),
    defaults={"head_dim": 128},
    windows=Windows(switch=True, by_layer=True, first=28),
)
QWEN3_MOE = Family(
    model_type="qwen3_moe",
    class_name="Qwen3Moe",
    fixed={"qk_norm": True},
    fields={
        "mlp": "moe_intermediate_size",
        "experts": "num_experts",
        "experts_per_token": "num_experts_per_tok",
        "normalise_experts": "norm_topk_prob",
    },
    aliases={"num_experts": "num_local_experts"},
    biases=("attention_bias",),
    required={"hidden_act": "silu", "decoder_sparse_step": 1, "mlp_only_layers": []},
    windows=Windows(switch=True),
    tensors=EXPERT_TENSORS,
    adapter_tensors=EXPERT_TENSORS,
)
# Llama 3, 3.1, 3.2 and 3.3.
LLAMA = Family(model_type="llama", class_name="Llama", biases=("attention_bias", "mlp_bias"))
MISTRAL = Family(model_type="mistral", class_name="Mistral", windows=Windows())
MINISTRAL = Family(model_type="ministral", class_name="Ministral", windows=Windows(by_layer=True))
MINISTRAL3 = Family(
    model_type="ministral3",
    class_name="Ministral3",
    defaults={"head_dim": 128},
    windows=Windows(default=None),
    query_growth=True,
)
# Text only.
GEMMA3 = Family(
    model_type="gemma3_text",
    class_name="Gemma3",
    classifier_name="Gemma3Text",
    fixed={
        "qk_norm": True,
        "out_norms": True,
        "norm_offset": True,
        "scale_embeddings": True,
        "activation": "gelu_tanh",
    },
    fields={"query_scalar": "query_pre_attn_scalar"},
    biases=("attention_bias",),
    defaults={
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "tie_word_embeddings": True,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
    },
    required={
        "hidden_activation": "gelu_pytorch_tanh",
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "use_bidirectional_attention": False,
    },
    activation_field="hidden_activation",
    windows=Windows(by_layer=True, period=6),
    local_rope=True,
    tensors=LAYER_TENSORS
    | {
        "attention_out_norm/scale": "post_attention_layernorm.weight",
        "mlp_norm/scale": "pre_feedforward_layernorm.weight",
        "mlp_out_norm/scale": "post_feedforward_layernorm.weight",
    },
)
# Defaults are those of GptOssConfig in transformers 5.23; openai/gpt-oss-20b and 120b state all but
# the pattern.
GPT_OSS = Family(
    model_type="gpt_oss",
    class_name="GptOss",
    fixed={
        "sinks": True,
        "expert_bias": True,
        "activation": "clipped_swish",
        # A softmax over the chosen logits equals one over all logits with normalised weights.
        "normalise_experts": True,
    },
    fields={"experts": "num_local_experts", "experts_per_token": "num_experts_per_tok"},
    biases=("attention_bias",),
    defaults={
        "head_dim": 64,
        "attention_bias": True,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150_000.0,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 32.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
    },
    required={"hidden_act": "silu", "swiglu_alpha": GATE_SHARPNESS, "swiglu_limit": GATE_LIMIT},
    quantisation="mxfp4",
    windows=Windows(default=128, by_layer=True, period=2),
    tensors=LAYER_TENSORS
    | {
        "sinks": "self_attn.sinks",
        "moe/router/kernel": "mlp.router.weight",
        "moe/router/bias": "mlp.router.bias",
        "moe/expert_gate/kernel": "mlp.experts.gate_up_proj",
        "moe/expert_gate/bias": "mlp.experts.gate_up_proj_bias",
        "moe/expert_up/kernel": "mlp.experts.gate_up_proj",
        "moe/expert_up/bias": "mlp.experts.gate_up_proj_bias",
        "moe/expert_down/kernel": "mlp.experts.down_proj",
        "moe/expert_down/bias": "mlp.experts.down_proj_bias",
    },
    adapter_tensors=EXPERT_TENSORS,
)

_ALL = (QWEN2, QWEN3, QWEN3_MOE, LLAMA, MISTRAL, MINISTRAL, MINISTRAL3, GEMMA3, GPT_OSS)
FAMILIES: dict[str, Family] = {family.model_type: family for family in _ALL}
