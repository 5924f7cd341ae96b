"""Mistral, Ministral and Ministral 3."""

from dapo_jax.model.families.family import Family, Windows

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
