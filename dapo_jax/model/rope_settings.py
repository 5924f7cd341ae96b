"""Rotations as config.json describes them, by type: read, checked, and written."""

import math
import reprlib
from typing import Any

from dapo_jax.model.config_fields import read_number, read_switch, read_table
from dapo_jax.model.rotary import RopeScaling

FULL, SLIDING = "full_attention", "sliding_attention"  # kinds of layers
# Fields of a type in config.json, and what a RopeScaling calls them.
_ORIGINAL = {"original_max_position_embeddings": "original_tokens"}
FIELDS: dict[str, dict[str, str]] = {
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
GROWTH = {"llama_4_scaling_beta": "query_growth"}  # of a family that has it
DEFAULTS = {"beta_slow": 1.0, "beta_fast": 32.0}


def _attention_factor(rope: dict[str, Any], factor: float) -> float:
    """YaRN's factor of rotated vectors, from the fields that may say it (paper, equation 22)."""

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
    """Context of the first training: beside the table, in it, or else the model's own."""
    name = next(iter(_ORIGINAL))
    for place in (values, rope):
        if place.get(name) is not None:
            return read_number(place, name)
    return read_number(values, "max_position_embeddings")


def read_rope(values: dict[str, Any], rope: dict[str, Any], grows: bool = False) -> dict[str, Any]:
    """Base and scaling of rotations, as fields of a decoder.

    Args:
        values: of config.json, with the base where `rope` has none.
        rope: table `rope_parameters` of newer folders, `rope_scaling` of older ones.
        grows: queries of the family grow with their position.

    Raises KeyError for a missing field, ValueError for a wrong one.
    """
    share = rope.get("partial_rotary_factor", values.get("partial_rotary_factor"))
    if share is not None and share != 1:
        raise ValueError(f"partial_rotary_factor {reprlib.repr(share)}: must be 1.0")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default" and (not isinstance(kind, str) or kind not in FIELDS):
        allowed = "', '".join(FIELDS)
        raise ValueError(f"rope_scaling of type {kind!r}: must be 'default' or '{allowed}'")
    theta = read_number(values | rope, "rope_theta", 10_000.0)
    if kind == "default":
        return {"rope_theta": theta}
    fields = FIELDS[kind] | (GROWTH if grows else {})
    found: dict[str, Any] = {"kind": kind}
    for name, ours in fields.items():
        if name == "attention_factor":
            found[ours] = _attention_factor(rope, found["factor"])
        elif name in _ORIGINAL:
            found[ours] = _original_tokens(values, rope)
        elif name == "truncate":
            found[ours] = rope.get(name) is None or read_switch(rope, name)
        else:
            found[ours] = read_number(rope, name, DEFAULTS.get(name))
    if kind == "dynamic":
        found["original_tokens"] = read_number(values, "max_position_embeddings")
    if kind == "yarn" and theta <= 1:
        raise ValueError(f"rope_theta = {theta}: must be above 1 with yarn")
    scaling = RopeScaling(**found)
    if "low_turns" in found and scaling.low_turns >= scaling.high_turns:
        low, high = (name for name, ours in fields.items() if ours.endswith("turns"))
        raise ValueError(
            f"{high} = {scaling.high_turns}: must be above {low} = {scaling.low_turns}"
        )
    return {"rope_theta": theta, "rope_scaling": scaling}


def read_one_rope(values: dict[str, Any], grows: bool) -> dict[str, Any]:
    """Rotations of a family whose layers all rotate alike; raises as `read_rope`."""
    table = read_table(values, "rope_parameters") or read_table(values, "rope_scaling")
    return read_rope(values, table, grows)


def read_two_ropes(values: dict[str, Any], some_slide: bool, all_slide: bool) -> dict[str, Any]:
    """Rotations of a family whose sliding layers have a base of their own; raises as `read_rope`.

    Newer folders have a table for each kind of layer, older ones a scaling of full layers only.
    """
    tables = read_table(values, "rope_parameters")
    full = read_table(tables, FULL) | read_table(values, "rope_scaling")
    base = {"rope_theta": read_number(values, "rope_theta", 1e6)}
    found = read_rope(values | base, full)
    base = {"rope_theta": read_number(values, "rope_local_base_freq", 10_000.0)}
    sliding = read_rope(values | base, read_table(tables, SLIDING))
    if "rope_scaling" in sliding:
        raise ValueError(f"rope_parameters of {SLIDING}: must be of type 'default'")
    if all_slide:
        return sliding
    return found | ({"sliding_rope_theta": sliding["rope_theta"]} if some_slide else {})


def scaling_json(scaling: RopeScaling, grows: bool) -> dict[str, Any]:
    """Table `rope_scaling` of a config.json."""
    fields = FIELDS[scaling.kind] | (GROWTH if grows else {})
    table = {name: getattr(scaling, ours) for name, ours in fields.items()}
    return {"rope_type": scaling.kind, **table}
