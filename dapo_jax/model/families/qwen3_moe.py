"""Qwen3 with a mixture of experts in every layer."""

from dapo_jax.model.families.family import EXPERT_TENSORS, Family, Windows

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
