"""OLMo 3: norms after attention and MLP only, and one norm over the queries of all heads."""

from dapo_jax.model.families.family import LAYER_TENSORS, Family, Windows

_NO_TENSORS = ("attention_norm/scale", "mlp_norm/scale")

OLMO3 = Family(
    model_type="olmo3",
    class_name="Olmo3",
    fixed={"qk_norm": True, "whole_qk_norm": True, "in_norms": False, "out_norms": True},
    biases=("attention_bias",),
    windows=Windows(by_layer=True, period=4),
    local_rope=True,
    tensors={path: name for path, name in LAYER_TENSORS.items() if path not in _NO_TENSORS}
    | {
        "attention_out_norm/scale": "post_attention_layernorm.weight",
        "mlp_out_norm/scale": "post_feedforward_layernorm.weight",
    },
)
