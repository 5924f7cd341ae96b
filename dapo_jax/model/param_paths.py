"""Properties of a parameter by its path: products that it is in, experts, int8 scales, dtype."""

from typing import Any

import jax.numpy as jnp

from dapo_jax.model.decoder import DecoderConfig


def forward_dtype(path: str, config: DecoderConfig) -> Any:
    """Dtype of a parameter in a forward pass: float32 for norms and sinks, else the compute's."""
    return jnp.float32 if path.endswith(("scale", "sinks")) else config.dtype


def summed_axes(path: str) -> int:
    """Number of leading axes of a parameter that a matrix product sums over.

    0 for a parameter that is in no such product (norms, biases, the embedding) and for adapters.
    """
    if path.endswith("/kernel"):
        return 2 if path.endswith("/out/kernel") else 1
    return int(path == "head")


def has_experts(path: str) -> bool:
    """True for a parameter with one matrix for each expert."""
    return "/expert_" in path


def scaled_axes(path: str) -> tuple[int, ...]:
    """Axes of a layer's parameter over which an int8 one has a scale; none of one that stays.

    A router stays as it is: the nearest of its logits decide which expert a token takes.
    """
    if path.endswith("router/kernel") or not summed_axes(path):
        return ()
    return (1,) if has_experts(path) else tuple(range(summed_axes(path)))
