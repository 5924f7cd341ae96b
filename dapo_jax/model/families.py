"""Model families by `model_type` of config.json: the table that a new family is added to."""

import dataclasses
import functools

from dapo_jax.model.family import EXPERT_TENSORS, LAYER_TENSORS, OUT_NORM_TENSORS, Family, Windows
from dapo_jax.model.layers import GATE_LIMIT, GATE_SHARPNESS
from dapo_jax.runtime import registry

# Llama 3, 3.1, 3.2 and 3.3.
LLAMA = Family(model_type="llama", class_name="Llama", biases=("attention_bias", "mlp_bias"))

# Qwen2 and Qwen2.5.
QWEN2 = Family(
    model_type="qwen2",
    class_name="Qwen2",
    fixed={"qkv_bias": True},
    windows=Windows(switch=True, by_layer=True, first=28),
)

# Qwen3.
QWEN3 = Family(
    model_type="qwen3",
    class_name="Qwen3",
    fixed={"qk_norm": True},
    biases=("attention_bias",),
    windows=Windows(switch=True, by_layer=True, first=28),
)

# Qwen3 with a mixture of experts in every layer.
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
    biases=("attention_bias",),
    defaults={"moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8},
    required={"hidden_act": "silu", "decoder_sparse_step": 1, "mlp_only_layers": []},
    windows=Windows(switch=True),
    tensors=EXPERT_TENSORS,
)

# Mistral, Ministral and Ministral 3.
_ROPE = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "attention_factor": 1.0}
_ROPE |= {"original_max_position_embeddings": 16_384, "llama_4_scaling_beta": 0.1}
MISTRAL = Family(model_type="mistral", class_name="Mistral", windows=Windows())
MINISTRAL = Family(model_type="ministral", class_name="Ministral", windows=Windows(by_layer=True))
MINISTRAL3 = Family(
    model_type="ministral3",
    class_name="Ministral3",
    defaults={"rope_parameters": _ROPE},
    windows=Windows(default=None),
    query_growth=True,
)

# SmolLM3: a Llama without rotary embedding in every fourth layer.
SMOLLM3 = Family(
    model_type="smollm3",
    class_name="SmolLM3",
    biases=("attention_bias", "mlp_bias"),
    required={"hidden_act": "silu", "use_sliding_window": False},
    rotary_interval=4,
)

# OLMo 3: norms after attention and MLP only, and one norm over the queries of all heads.
_IN_NORMS = ("attention_norm/scale", "mlp_norm/scale")

OLMO3 = Family(
    model_type="olmo3",
    class_name="Olmo3",
    fixed={"qk_norm": True, "whole_qk_norm": True, "in_norms": False, "out_norms": True},
    biases=("attention_bias",),
    windows=Windows(by_layer=True, period=4),
    local_rope=True,
    tensors={path: name for path, name in OUT_NORM_TENSORS.items() if path not in _IN_NORMS},
)

# Gemma 3, text only: norms around both halves of a layer, GeGLU, scaled embeddings.
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
    defaults={"query_pre_attn_scalar": 256, "rope_local_base_freq": 1e4},
    required={
        "hidden_activation": "gelu_pytorch_tanh",
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "use_bidirectional_attention": False,
    },
    activation_field="hidden_activation",
    windows=Windows(by_layer=True, period=6),
    local_rope=True,
    tensors=OUT_NORM_TENSORS,
)

# gpt-oss: attention sinks, and experts with biases and clipped gates.
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
        "num_local_experts": 128,
        "num_experts_per_tok": 4,
        "attention_bias": True,
        "rope_parameters": {
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

# Defaults of the configuration classes in transformers 5.24, which config.json may leave out.
_NAMES = "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads".split()
_NAMES += "num_key_value_heads head_dim max_position_embeddings rms_norm_eps".split()
_NAMES += ["tie_word_embeddings", "rope_theta"]
_VALUES = {  # None: derived from other fields
    "qwen2": (151936, 4096, 22016, 32, 32, 32, None, 32768, 1e-6, False, 1e4),
    "qwen3": (151936, 4096, 22016, 32, 32, 32, 128, 32768, 1e-6, False, 1e4),
    "qwen3_moe": (151936, 2048, 6144, 24, 32, 4, None, 32768, 1e-6, False, 1e4),
    "qwen3_5_text": (248320, 4096, 12288, 32, 16, 4, 256, 32768, 1e-6, False, 1e4),
    "qwen3_5_moe_text": (248320, 2048, None, 40, 16, 2, 256, 32768, 1e-6, False, 1e4),
    "qwen3_next": (151936, 2048, 5632, 48, 16, 2, 256, 32768, 1e-6, False, 1e4),
    "llama": (32000, 4096, 11008, 32, 32, None, None, 2048, 1e-6, False, 1e4),
    "mistral": (32000, 4096, 14336, 32, 32, 8, None, 131072, 1e-6, False, 1e4),
    "ministral": (32000, 4096, 14336, 32, 32, 8, None, 131072, 1e-6, False, 1e4),
    "ministral3": (131072, 4096, 14336, 34, 32, 8, 128, 262144, 1e-5, False, 1e4),
    "gemma3_text": (262208, 2304, 9216, 26, 8, 4, 256, 131072, 1e-6, True, 1e6),
    "gemma4_text": (262144, 2304, 9216, 30, 8, 4, 256, 131072, 1e-6, True, 1e6),
    "gemma4_unified_text": (262144, 2304, 9216, 30, 8, 4, 256, 262144, 1e-6, True, 1e6),
    "gpt_oss": (201088, 2880, 2880, 36, 64, 8, 64, 131072, 1e-5, False, 1.5e5),
    "olmo3": (50304, 4096, 11008, 32, 32, None, None, 2048, 1e-5, False, 5e5),
    "smollm3": (128256, 2048, 11008, 36, 16, 4, None, 32768, 1e-6, True, 2e6),
}
DEFAULTS = {
    kind: {name: value for name, value in zip(_NAMES, row, strict=True) if value is not None}
    for kind, row in _VALUES.items()
}

_FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in (
        *(QWEN2, QWEN3, QWEN3_MOE, LLAMA, MISTRAL, MINISTRAL, MINISTRAL3),
        *(GEMMA3, GPT_OSS, OLMO3, SMOLLM3),
    )
}


def family_names() -> list[str]:
    """Return the `model_type`s of all families."""
    return [*_FAMILIES, *registry.names("families")]


@functools.cache
def family_of(model_type: str) -> Family:
    """Return the family of one of the `family_names`."""
    family = _FAMILIES.get(model_type) or registry.find("families", model_type)
    return dataclasses.replace(family, defaults=DEFAULTS.get(model_type, {}) | family.defaults)
