"""Training on examples or pairs: `dapo-jax sft`, `dapo-jax dpo`."""
