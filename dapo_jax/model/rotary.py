"""Rotary position embedding (arXiv 2104.09864) and its scalings."""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """Slower rotations for positions beyond the context length of pretraining.

    'linear' slows all of them; 'proportional' too, and stops the slowest. 'llama3' (Llama 3.1) and
    'yarn' (arXiv 2309.00071) slow the long wavelengths, keep the short ones and interpolate in
    between.
    """

    factor: float  # by which slow rotations are slowed
    low_turns: float = 0.0  # turns over `original_tokens` below which a wavelength is long
    high_turns: float = 0.0  # turns above which a wavelength is kept
    original_tokens: int = 0
    kind: str = "llama3"  # 'linear', 'llama3' or 'yarn'
    attention_factor: float = 1.0  # multiplies rotated queries and rotated keys
    truncate: bool = True  # yarn: round both ends of the ramp to whole frequency numbers
    query_growth: float = 0.0  # queries grow after each `original_tokens` (Llama 4)
    rotated: float = 1.0  # proportional: fraction of the dimensions that rotate


def _yarn_kept(theta: float, head_dim: int, scaling: RopeScaling) -> Float[np.ndarray, "E/2"]:
    """Return the fraction of each frequency that YaRN keeps: a ramp over their numbers."""

    def number_of(turns: float) -> float:
        wavelength = scaling.original_tokens / (turns * 2 * math.pi)
        return head_dim * math.log(wavelength) / (2 * math.log(theta))

    first, last = number_of(scaling.high_turns), number_of(scaling.low_turns)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    width = last - first or 0.001
    numbers = np.arange(head_dim // 2, dtype=np.float32)
    return 1 - np.clip((numbers - np.float32(first)) / np.float32(width), 0, 1)


def rope_frequencies(
    theta: float, head_dim: int, scaling: RopeScaling | None
) -> Float[np.ndarray, "E/2"]:
    """Return the frequency of each pair of a head's dimensions, in radians per position; float32.

    Every step rounds to float32, as in the published models: at position 100,000 the last bit of a
    frequency changes the logits.
    """
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    wavelengths = np.power(theta, exponents, dtype=np.float64).astype(np.float32)
    frequencies = np.float32(1.0) / wavelengths
    if scaling is None:
        return frequencies
    factor = np.float32(scaling.factor)
    if scaling.kind == "proportional":
        kept = np.arange(head_dim // 2) < int(scaling.rotated * head_dim // 2)
        return np.where(kept, frequencies / factor, np.float32(0))
    if scaling.kind == "linear":
        return frequencies / factor
    if scaling.kind == "yarn":
        kept = _yarn_kept(theta, head_dim, scaling)
        return np.float32(1.0) / (factor * wavelengths) * (1 - kept) + frequencies * kept
    low, high = scaling.low_turns, scaling.high_turns
    turns = scaling.original_tokens / (np.float32(2 * math.pi) / frequencies)
    kept = np.clip((turns - low) / (high - low), 0, 1)
    return (1 - kept) * frequencies / factor + kept * frequencies


def rotate(
    x: Float[Array, "B T H E"],
    positions: Int[Array, "B T"],
    frequencies: Float[Array | np.ndarray, "E/2"],
    factor: Array | float = 1.0,
) -> Float[Array, "B T H E"]:
    """Rotate vectors by position and multiply by `factor`; pairs are halves, as published.

    Dimensions beyond two per frequency stay as they are.
    """
    half = frequencies.shape[-1]
    angles = positions[..., None, None].astype(jnp.float32) * frequencies
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    if not isinstance(factor, float) or factor != 1:
        cos, sin = cos * factor, sin * factor
    left, right, rest = jnp.split(x, [half, 2 * half], axis=-1)
    left, right = left.astype(jnp.float32), right.astype(jnp.float32)
    turned = [left * cos - right * sin, right * cos + left * sin]
    return jnp.concatenate([*(part.astype(x.dtype) for part in turned), rest], -1)


def query_growth(positions: Int[Array, "B T"], scaling: RopeScaling) -> Float[Array, "B T 1 1"]:
    """Return the factor of queries; it grows with the logarithm of their position (Llama 4)."""
    contexts = jnp.floor(positions.astype(jnp.float32) / scaling.original_tokens)
    return (1 + scaling.query_growth * jnp.log1p(contexts))[..., None, None]
