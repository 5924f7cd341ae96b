"""Model families by `model_type` of config.json, one file each."""

import dataclasses
import functools

from dapo_jax.model.families.family import Family
from dapo_jax.model.families.gemma3 import GEMMA3
from dapo_jax.model.families.gpt_oss import GPT_OSS
from dapo_jax.model.families.llama import LLAMA
from dapo_jax.model.families.mistral import MINISTRAL, MINISTRAL3, MISTRAL
from dapo_jax.model.families.olmo3 import OLMO3
from dapo_jax.model.families.published_defaults import DEFAULTS
from dapo_jax.model.families.qwen2 import QWEN2
from dapo_jax.model.families.qwen3 import QWEN3
from dapo_jax.model.families.qwen3_moe import QWEN3_MOE
from dapo_jax.model.families.smollm3 import SMOLLM3
from dapo_jax.runtime import registry

_QWEN = (QWEN2, QWEN3, QWEN3_MOE)
_MISTRAL = (MISTRAL, MINISTRAL, MINISTRAL3)
_OURS = (*_QWEN, LLAMA, *_MISTRAL, GEMMA3, GPT_OSS, OLMO3, SMOLLM3)
_FAMILIES: dict[str, Family] = {family.model_type: family for family in _OURS}


def family_names() -> list[str]:
    """Return the `model_type`s of all families."""
    return [*_FAMILIES, *registry.names("families")]


@functools.cache
def family_of(model_type: str) -> Family:
    """Return the family of one of the `family_names`."""
    family = _FAMILIES.get(model_type) or registry.find("families", model_type)
    return dataclasses.replace(family, defaults=DEFAULTS.get(model_type, {}) | family.defaults)
