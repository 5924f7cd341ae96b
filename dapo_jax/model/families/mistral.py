"""Mistral, Ministral and Ministral 3."""

from dapo_jax.model.families.family import Family, Windows

MISTRAL = Family(model_type="mistral", class_name="Mistral", windows=Windows())
MINISTRAL = Family(model_type="ministral", class_name="Ministral", windows=Windows(by_layer=True))
MINISTRAL3 = Family(
    model_type="ministral3",
    class_name="Ministral3",
    defaults={"head_dim": 128},
    windows=Windows(default=None),
    query_growth=True,
)
