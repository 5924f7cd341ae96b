"""Fields of a model folder's config.json, checked like settings: type and range of each.

The upper limits are far above every published model. A larger value is a mistake or an attack: a
list of 10^18 layers fills the memory, and a rotation by NaN trains to the end.
"""

import reprlib
from typing import Any

from dapo_jax.runtime.rules import Range
from dapo_jax.runtime.settings import TYPE_NAMES

_FACTOR = Range(above=0, at_most=1e6)

NUMBERS: dict[str, tuple[type, Range]] = {
    "vocab_size": (int, Range(at_least=1, at_most=2**24)),
    "num_hidden_layers": (int, Range(at_least=1, at_most=2**10)),
    "hidden_size": (int, Range(at_least=1, at_most=2**20)),
    "num_attention_heads": (int, Range(at_least=1, at_most=2**14)),
    "num_key_value_heads": (int, Range(at_least=1, at_most=2**14)),
    "head_dim": (int, Range(at_least=2, at_most=2**14)),
    "intermediate_size": (int, Range(at_least=1, at_most=2**22)),
    "moe_intermediate_size": (int, Range(at_least=1, at_most=2**22)),
    "num_experts": (int, Range(at_least=1, at_most=2**14)),
    "num_local_experts": (int, Range(at_least=1, at_most=2**14)),
    "num_experts_per_tok": (int, Range(at_least=1, at_most=2**14)),
    "rms_norm_eps": (float, Range(above=0, at_most=1)),
    "rope_theta": (float, Range(at_least=1, at_most=1e15)),
    "rope_local_base_freq": (float, Range(at_least=1, at_most=1e15)),
    "query_pre_attn_scalar": (int, Range(at_least=1, at_most=2**20)),
    "sliding_window_pattern": (int, Range(at_least=1, at_most=2**10)),
    "sliding_window": (int, Range(at_least=1, at_most=2**31 - 1)),
    "max_window_layers": (int, Range(at_least=0, at_most=2**10)),
    "max_position_embeddings": (int, Range(at_least=1, at_most=2**31 - 1)),
    "factor": (float, _FACTOR),
    "low_freq_factor": (float, _FACTOR),
    "high_freq_factor": (float, _FACTOR),
    "beta_fast": (float, _FACTOR),
    "beta_slow": (float, _FACTOR),
    "attention_factor": (float, _FACTOR),
    "mscale": (float, _FACTOR),
    "mscale_all_dim": (float, _FACTOR),
    "llama_4_scaling_beta": (float, Range(at_least=0, at_most=1e6)),
    "original_max_position_embeddings": (int, Range(at_least=1, at_most=2**31 - 1)),
}


def check_number(name: str, value: Any) -> Any:
    """Return the value of a field of `NUMBERS` as its type. Raises ValueError for a wrong one."""
    kind, allowed = NUMBERS[name]
    numbers = (int, float) if kind is float else (int,)
    if type(value) not in numbers or not allowed(value):
        raise ValueError(f"{name} = {reprlib.repr(value)}: must be {TYPE_NAMES[kind]} {allowed}")
    return kind(value)


def read_number(values: dict[str, Any], name: str, default: Any = None) -> Any:
    """Return the number of a field, or its default if the field is missing or null.

    Raises KeyError for a missing field without a default, ValueError for a wrong one.
    """
    value = values[name] if default is None else values.get(name)
    return default if value is None and default is not None else check_number(name, value)


def read_switch(values: dict[str, Any], name: str) -> bool:
    """Return a boolean field, false if missing or null. Raises ValueError for a wrong one."""
    value = values.get(name)
    if value is not None and type(value) is not bool:
        raise ValueError(f"{name} = {reprlib.repr(value)}: must be true or false")
    return bool(value)


def read_table(values: dict[str, Any], name: str) -> dict[str, Any]:
    """Return an object field, empty if missing or null. Raises ValueError for a wrong one."""
    value = values.get(name) or {}
    if not isinstance(value, dict):
        raise ValueError(f"{name} = {reprlib.repr(value)}: must be an object")
    return value
