"""Qwen2 and Qwen2.5."""

from dapo_jax.model.families.family import Family, Windows

QWEN2 = Family(
    model_type="qwen2",
    class_name="Qwen2",
    fixed={"qkv_bias": True},
    windows=Windows(switch=True, by_layer=True, first=28),
)
