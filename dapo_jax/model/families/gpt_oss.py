"""gpt-oss: attention sinks, and experts with biases and clipped gates."""

from dapo_jax.model.families.family import EXPERT_TENSORS, LAYER_TENSORS, Family, Windows
from dapo_jax.model.layers import GATE_LIMIT, GATE_SHARPNESS

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
