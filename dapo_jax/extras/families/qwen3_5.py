"""Qwen3.5 (dense and with experts) and Qwen3-Next, text only: mostly gated delta-net layers."""

from dapo_jax.model.family import EXPERT_TENSORS, LAYER_TENSORS, Family

_DELTA_FIELDS = {
    "delta_key_heads": "linear_num_key_heads",
    "delta_value_heads": "linear_num_value_heads",
    "delta_key_dim": "linear_key_head_dim",
    "delta_value_dim": "linear_value_head_dim",
    "delta_kernel": "linear_conv_kernel_dim",
}
_DELTA_DEFAULTS = {
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}
_DELTA_TENSORS = {
    "delta/conv": "linear_attn.conv1d.weight",
    "delta/log_decay": "linear_attn.A_log",
    "delta/step_bias": "linear_attn.dt_bias",
    "delta/norm/scale": "linear_attn.norm.weight",
    "delta/out/kernel": "linear_attn.out_proj.weight",
}
_SEPARATE = {
    f"delta/{name}/kernel": f"linear_attn.in_proj_{name}.weight" for name in ("qkv", "z", "b", "a")
}
_FUSED = {f"delta/{name}/kernel": f"linear_attn.in_proj_{name}.weight" for name in ("qkvz", "ba")}
_EXPERT_FIELDS = {
    "mlp": "moe_intermediate_size",
    "shared_mlp": "shared_expert_intermediate_size",
    "experts": "num_experts",
    "experts_per_token": "num_experts_per_tok",
}
_EXPERT_DEFAULTS = _DELTA_DEFAULTS | {
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
}
_SHARED_TENSORS = EXPERT_TENSORS | {
    "shared_router/kernel": "mlp.shared_expert_gate.weight",
    "shared_gate/kernel": "mlp.shared_expert.gate_proj.weight",
    "shared_up/kernel": "mlp.shared_expert.up_proj.weight",
    "shared_down/kernel": "mlp.shared_expert.down_proj.weight",
}
_FIXED = {"qk_norm": True, "norm_offset": True, "output_gate": True}
_QWEN3_5_MOE = LAYER_TENSORS | _SHARED_TENSORS | _DELTA_TENSORS | _SEPARATE
_QWEN3_NEXT = LAYER_TENSORS | _SHARED_TENSORS | _DELTA_TENSORS | _FUSED

QWEN3_5 = Family(
    model_type="qwen3_5_text",
    class_name="Qwen3_5",
    classifier_name="Qwen3_5Text",
    fixed=_FIXED,
    fields=_DELTA_FIELDS,
    biases=("attention_bias",),
    defaults=_DELTA_DEFAULTS,
    delta_interval=4,
    partial_rotary=0.25,
    tensors=LAYER_TENSORS | _DELTA_TENSORS | _SEPARATE,
)
QWEN3_5_MOE = Family(
    model_type="qwen3_5_moe_text",
    class_name="Qwen3_5Moe",
    classifier_name="Qwen3_5MoeText",
    fixed=_FIXED | {"normalise_experts": True},
    fields=_DELTA_FIELDS | _EXPERT_FIELDS,
    biases=("attention_bias",),
    defaults=_EXPERT_DEFAULTS | {"num_experts": 256, "num_experts_per_tok": 8},
    delta_interval=4,
    partial_rotary=0.25,
    tensors=_QWEN3_5_MOE,
)
QWEN3_NEXT = Family(
    model_type="qwen3_next",
    class_name="Qwen3Next",
    fixed=_FIXED | {"delta_fused": True},
    fields=_DELTA_FIELDS | _EXPERT_FIELDS | {"normalise_experts": "norm_topk_prob"},
    biases=("attention_bias",),
    defaults=_EXPERT_DEFAULTS
    | {"num_experts": 512, "num_experts_per_tok": 10, "norm_topk_prob": True},
    required={"hidden_act": "silu", "decoder_sparse_step": 1, "mlp_only_layers": []},
    delta_interval=4,
    partial_rotary=0.25,
    tensors=_QWEN3_NEXT,
)
