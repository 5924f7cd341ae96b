"""Qwen3.5 (dense and with experts) and Qwen3-Next, text only: mostly gated delta-net layers."""

import dataclasses

from dapo_jax.model.family import EXPERT_TENSORS, LAYER_TENSORS, Family


def _tensors(*projections: str) -> dict[str, str]:
    """Return tensor names of a delta-net layer, given those of its first projections."""
    return LAYER_TENSORS | {
        "delta/conv": "linear_attn.conv1d.weight",
        "delta/log_decay": "linear_attn.A_log",
        "delta/step_bias": "linear_attn.dt_bias",
        "delta/norm/scale": "linear_attn.norm.weight",
        "delta/out/kernel": "linear_attn.out_proj.weight",
        **{f"delta/{name}/kernel": f"linear_attn.in_proj_{name}.weight" for name in projections},
    }


QWEN3_5 = Family(
    model_type="qwen3_5_text",
    class_name="Qwen3_5",
    classifier_name="Qwen3_5Text",
    fixed={"qk_norm": True, "norm_offset": True, "output_gate": True},
    fields={
        "delta_key_heads": "linear_num_key_heads",
        "delta_value_heads": "linear_num_value_heads",
        "delta_key_dim": "linear_key_head_dim",
        "delta_value_dim": "linear_value_head_dim",
        "delta_kernel": "linear_conv_kernel_dim",
    },
    biases=("attention_bias",),
    defaults={
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
    },
    delta_interval=4,
    partial_rotary=0.25,
    tensors=_tensors("qkv", "z", "b", "a"),
)
_SHARED_TENSORS = EXPERT_TENSORS | {
    "shared_router/kernel": "mlp.shared_expert_gate.weight",
    "shared_gate/kernel": "mlp.shared_expert.gate_proj.weight",
    "shared_up/kernel": "mlp.shared_expert.up_proj.weight",
    "shared_down/kernel": "mlp.shared_expert.down_proj.weight",
}
QWEN3_5_MOE = dataclasses.replace(
    QWEN3_5,
    model_type="qwen3_5_moe_text",
    class_name="Qwen3_5Moe",
    classifier_name="Qwen3_5MoeText",
    fixed=QWEN3_5.fixed | {"normalise_experts": True},
    fields=QWEN3_5.fields
    | {
        "mlp": "moe_intermediate_size",
        "shared_mlp": "shared_expert_intermediate_size",
        "experts": "num_experts",
        "experts_per_token": "num_experts_per_tok",
    },
    defaults=QWEN3_5.defaults
    | {"moe_intermediate_size": 512, "shared_expert_intermediate_size": 512}
    | {"num_experts": 256, "num_experts_per_tok": 8},
    tensors=QWEN3_5.tensors | _SHARED_TENSORS,
)
QWEN3_NEXT = dataclasses.replace(
    QWEN3_5_MOE,
    model_type="qwen3_next",
    class_name="Qwen3Next",
    classifier_name="",
    fixed=QWEN3_5.fixed | {"delta_fused": True},
    fields=QWEN3_5_MOE.fields | {"normalise_experts": "norm_topk_prob"},
    defaults=QWEN3_5_MOE.defaults
    | {"num_experts": 512, "num_experts_per_tok": 10, "norm_topk_prob": True},
    required={"hidden_act": "silu", "decoder_sparse_step": 1, "mlp_only_layers": []},
    tensors=_tensors("qkvz", "ba") | _SHARED_TENSORS,
)
