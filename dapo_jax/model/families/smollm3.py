"""SmolLM3: a Llama without rotary embedding in every fourth layer."""

from dapo_jax.model.families.family import Family

SMOLLM3 = Family(
    model_type="smollm3",
    class_name="SmolLM3",
    biases=("attention_bias", "mlp_bias"),
    required={"hidden_act": "silu", "use_sliding_window": False},
    rotary_interval=4,
)
