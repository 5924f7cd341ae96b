"""Qwen3."""

from dapo_jax.model.families.family import Family, Windows

QWEN3 = Family(
    model_type="qwen3",
    class_name="Qwen3",
    fixed={"qk_norm": True},
    biases=("attention_bias",),
    windows=Windows(switch=True, by_layer=True, first=28),
)
