"""Rotary position embedding (arXiv 2104.09864), its scalings, and their fields in config.json."""

import dataclasses
import math
import reprlib
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from dapo_jax.model.config_fields import read_number, read_switch, read_table

FULL, SLIDING = "full_attention", "sliding_attention"  # kinds of layers in config.json
# Fields of a scaling in config.json by its type, with the attributes of RopeScaling they set.
_ORIGINAL = {"original_max_position_embeddings": "original_tokens"}
_FIELDS: dict[str, dict[str, str]] = {
    "linear": {"factor": "factor"},
    "dynamic": {"factor": "factor"},
    "llama3": {
        "factor": "factor",
        "low_freq_factor": "low_turns",
        "high_freq_factor": "high_turns",
        **_ORIGINAL,
    },
    "yarn": {
        "factor": "factor",
        "beta_slow": "low_turns",
        "beta_fast": "high_turns",
        **_ORIGINAL,
        "attention_factor": "attention_factor",
        "truncate": "truncate",
    },
}
_QUERY_GROWTH = {"llama_4_scaling_beta": "query_growth"}
_DEFAULTS = {"beta_slow": 1.0, "beta_fast": 32.0}


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """Slower rotations for positions beyond the context length of pretraining.

    'linear' slows all of them. 'llama3' (Llama 3.1) and 'yarn' (arXiv 2309.00071) slow the long
    wavelengths, keep the short ones and interpolate in between. 'dynamic' slows none up to
    `original_tokens`; longer contexts are rejected, since rotations would depend on the longest
    sequence of a batch.
    """

    factor: float  # by which slow rotations are slowed
    low_turns: float = 0.0  # turns over `original_tokens` below which a wavelength is long
    high_turns: float = 0.0  # turns above which a wavelength is kept
    original_tokens: int = 0
    kind: str = "llama3"  # 'linear', 'llama3', 'yarn' or 'dynamic'
    attention_factor: float = 1.0  # multiplies rotated queries and rotated keys
    truncate: bool = True  # yarn: round both ends of the ramp to whole frequency numbers
    query_growth: float = 0.0  # queries grow after each `original_tokens` (Llama 4)


# --- rotations -----------------------------------------------------------------------------------


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
    if scaling is None or scaling.kind == "dynamic":
        return frequencies
    factor = np.float32(scaling.factor)
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
    """Rotate vectors by position and multiply by `factor`; pairs are halves, as published."""
    half = x.shape[-1] // 2
    angles = positions[..., None, None].astype(jnp.float32) * frequencies
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    if not isinstance(factor, float) or factor != 1:
        cos, sin = cos * factor, sin * factor
    left, right = x[..., :half].astype(jnp.float32), x[..., half:].astype(jnp.float32)
    return jnp.concatenate([left * cos - right * sin, right * cos + left * sin], -1).astype(x.dtype)


def query_growth(positions: Int[Array, "B T"], scaling: RopeScaling) -> Float[Array, "B T 1 1"]:
    """Return the factor of queries; it grows with the logarithm of their position (Llama 4)."""
    contexts = jnp.floor(positions.astype(jnp.float32) / scaling.original_tokens)
    return (1 + scaling.query_growth * jnp.log1p(contexts))[..., None, None]


# --- config.json ---------------------------------------------------------------------------------


def _attention_factor(rope: dict[str, Any], factor: float) -> float:
    """Return YaRN's factor of rotated vectors (equation 22 of the paper)."""

    def growth(mscale: float) -> float:
        return 0.1 * mscale * math.log(factor) + 1 if factor > 1 else 1.0

    if rope.get("attention_factor") is not None:
        return read_number(rope, "attention_factor")
    names = ("mscale", "mscale_all_dim")
    if all(rope.get(name) is not None for name in names):
        numerator, denominator = (growth(read_number(rope, name)) for name in names)
        return numerator / denominator
    return growth(1.0)


def _original_tokens(values: dict[str, Any], rope: dict[str, Any]) -> int:
    """Return the context length of pretraining: of config.json, of `rope`, or else the model's."""
    (name,) = _ORIGINAL
    for table in (values, rope):
        if table.get(name) is not None:
            return read_number(table, name)
    return read_number(values, "max_position_embeddings")


def _read_table(
    values: dict[str, Any], rope: dict[str, Any], grows: bool = False
) -> dict[str, Any]:
    """Return base and scaling of rotations as fields of a decoder.

    Args:
        values: fields of config.json, with the base if `rope` has none.
        rope: table `rope_parameters` of newer folders, `rope_scaling` of older ones.
        grows: queries of the family grow with their position.

    Raises KeyError for a missing field, ValueError for a wrong one.
    """
    rotated = rope.get("partial_rotary_factor", values.get("partial_rotary_factor"))
    if rotated is not None and rotated != 1:
        raise ValueError(f"partial_rotary_factor {reprlib.repr(rotated)}: must be 1.0")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default" and (not isinstance(kind, str) or kind not in _FIELDS):
        allowed = "', '".join(_FIELDS)
        raise ValueError(f"rope_scaling of type {kind!r}: must be 'default' or '{allowed}'")
    theta = read_number(values | rope, "rope_theta", 10_000.0)
    if kind == "default":
        return {"rope_theta": theta}
    fields = _FIELDS[kind] | (_QUERY_GROWTH if grows else {})
    read: dict[str, Any] = {"kind": kind}
    for name, ours in fields.items():
        if name == "attention_factor":
            read[ours] = _attention_factor(rope, read["factor"])
        elif name in _ORIGINAL:
            read[ours] = _original_tokens(values, rope)
        elif name == "truncate":
            read[ours] = rope.get(name) is None or read_switch(rope, name)
        else:
            read[ours] = read_number(rope, name, _DEFAULTS.get(name))
    if kind == "dynamic":
        read["original_tokens"] = read_number(values, "max_position_embeddings")
    if kind == "yarn" and theta <= 1:
        raise ValueError(f"rope_theta = {theta}: must be above 1 with yarn")
    scaling = RopeScaling(**read)
    if "low_turns" in read and scaling.low_turns >= scaling.high_turns:
        low, high = (name for name, ours in fields.items() if ours.endswith("turns"))
        raise ValueError(
            f"{high} = {scaling.high_turns}: must be above {low} = {scaling.low_turns}"
        )
    return {"rope_theta": theta, "rope_scaling": scaling}


def read_rope(values: dict[str, Any], grows: bool) -> dict[str, Any]:
    """Return the rotations of a family with one base for all layers; raises as `_read_table`."""
    table = read_table(values, "rope_parameters") or read_table(values, "rope_scaling")
    return _read_table(values, table, grows)


def read_local_rope(values: dict[str, Any], some_slide: bool, all_slide: bool) -> dict[str, Any]:
    """Return the rotations of a family with a separate base for sliding layers.

    Newer folders have a table for each kind of layer, older ones a scaling of full layers only.
    Raises as `_read_table`.
    """
    tables = read_table(values, "rope_parameters")
    table = read_table(tables, FULL) | read_table(values, "rope_scaling")
    full = _read_table(values | {"rope_theta": read_number(values, "rope_theta")}, table)
    base = {"rope_theta": read_number(values, "rope_local_base_freq")}
    sliding = _read_table(values | base, read_table(tables, SLIDING))
    if "rope_scaling" in sliding:
        raise ValueError(f"rope_parameters of {SLIDING}: must be of type 'default'")
    if all_slide:
        return sliding
    return full | ({"sliding_rope_theta": sliding["rope_theta"]} if some_slide else {})


def scaling_json(scaling: RopeScaling, grows: bool) -> dict[str, Any]:
    """Return the table `rope_scaling` of a config.json."""
    fields = _FIELDS[scaling.kind] | (_QUERY_GROWTH if grows else {})
    table = {name: getattr(scaling, ours) for name, ours in fields.items()}
    return {"rope_type": scaling.kind, **table}
