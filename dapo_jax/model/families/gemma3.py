"""Gemma 3, text only: norms around both halves of a layer, GeGLU, scaled embeddings."""

from dapo_jax.model.families.family import LAYER_TENSORS, Family, Windows

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
    tensors=LAYER_TENSORS
    | {
        "attention_out_norm/scale": "post_attention_layernorm.weight",
        "mlp_norm/scale": "pre_feedforward_layernorm.weight",
        "mlp_out_norm/scale": "post_feedforward_layernorm.weight",
    },
)
