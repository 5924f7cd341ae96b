"""Llama 3, 3.1, 3.2 and 3.3."""

from dapo_jax.model.families.family import Family

LLAMA = Family(model_type="llama", class_name="Llama", biases=("attention_bias", "mlp_bias"))
