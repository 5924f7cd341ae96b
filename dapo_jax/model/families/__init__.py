"""Model families by `model_type` of config.json, one file each."""

import dataclasses

from dapo_jax.model.families.family import Family
from dapo_jax.model.families.gemma3 import GEMMA3
from dapo_jax.model.families.gemma4 import GEMMA4, GEMMA4_UNIFIED
from dapo_jax.model.families.gpt_oss import GPT_OSS
from dapo_jax.model.families.llama import LLAMA
from dapo_jax.model.families.mistral import MINISTRAL, MINISTRAL3, MISTRAL
from dapo_jax.model.families.olmo3 import OLMO3
from dapo_jax.model.families.published_defaults import DEFAULTS
from dapo_jax.model.families.qwen2 import QWEN2
from dapo_jax.model.families.qwen3 import QWEN3
from dapo_jax.model.families.qwen3_5 import QWEN3_5, QWEN3_5_MOE, QWEN3_NEXT
from dapo_jax.model.families.qwen3_moe import QWEN3_MOE
from dapo_jax.model.families.smollm3 import SMOLLM3

_QWEN = (QWEN2, QWEN3, QWEN3_MOE, QWEN3_5, QWEN3_5_MOE, QWEN3_NEXT)
_MISTRAL = (MISTRAL, MINISTRAL, MINISTRAL3)
_GEMMA = (GEMMA3, GEMMA4, GEMMA4_UNIFIED)
_ALL = (*_QWEN, LLAMA, *_MISTRAL, *_GEMMA, GPT_OSS, OLMO3, SMOLLM3)
FAMILIES: dict[str, Family] = {
    f.model_type: dataclasses.replace(f, defaults=DEFAULTS[f.model_type] | f.defaults) for f in _ALL
}
