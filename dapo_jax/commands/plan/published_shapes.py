"""Published shapes of models of all families but Mistral's, for plans without weights.

The values are those of each model's config.json (huggingface.co/Qwen, huggingface.co/meta-llama,
huggingface.co/google, huggingface.co/openai, huggingface.co/allenai,
huggingface.co/HuggingFaceTB); for multimodal Gemma, those of its text part.
"""

import difflib
import pathlib
import re
from typing import Any

from dapo_jax.data.policies import model_path
from dapo_jax.model import load_huggingface
from dapo_jax.model.config_json import decoder_from_json
from dapo_jax.model.decoder import DecoderConfig
from dapo_jax.runtime.settings import ConfigError
from dapo_jax.runtime.storage.paths import is_remote

_COLUMNS = (
    "hidden_size num_hidden_layers num_attention_heads num_key_value_heads intermediate_size "
    "vocab_size tie_word_embeddings"
).split()
_QWEN2 = {"model_type": "qwen2", "rope_theta": 1e6, "rms_norm_eps": 1e-6}
_QWEN3 = {"model_type": "qwen3", "rope_theta": 1e6, "rms_norm_eps": 1e-6, "head_dim": 128}
_QWEN3_5 = {"model_type": "qwen3_5_text", "rope_theta": 1e7}  # the rest as by default
_QWEN3_5_A3B = _QWEN3_5 | {"model_type": "qwen3_5_moe_text", "num_experts": 256}
_QWEN3_5_A3B |= {"num_experts_per_tok": 8, "moe_intermediate_size": 512}
_QWEN3_5_A3B |= {"shared_expert_intermediate_size": 512}
_QWEN3_NEXT = _QWEN3_5_A3B | {"model_type": "qwen3_next"}
_QWEN3_NEXT |= {"num_experts": 512, "num_experts_per_tok": 10}
_LLAMA = {"model_type": "llama", "rope_theta": 5e5, "rms_norm_eps": 1e-5}
_QWEN3_MOE = _QWEN3 | {"model_type": "qwen3_moe", "norm_topk_prob": True}
_QWEN3_MOE |= {"num_experts": 128, "num_experts_per_tok": 8}
_A3B = _QWEN3_MOE | {"moe_intermediate_size": 768}
_A22B = _QWEN3_MOE | {"moe_intermediate_size": 1536}
_GEMMA_1B = {"model_type": "gemma3_text", "head_dim": 256, "sliding_window": 512}
_GEMMA = _GEMMA_1B | {
    "sliding_window": 1024,
    "rope_scaling": {"rope_type": "linear", "factor": 8.0},
}
_GPT_OSS_20B = {"model_type": "gpt_oss", "num_local_experts": 32, "num_experts_per_tok": 4}
_GPT_OSS_120B = _GPT_OSS_20B | {"num_local_experts": 128}
_YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8192}
_OLMO3 = {"model_type": "olmo3", "rope_theta": 5e5, "rope_scaling": _YARN}
_SMOLLM3 = {"model_type": "smollm3", "rope_theta": 5e6}
_GEMMA4 = {"model_type": "gemma4_text", "final_logit_softcapping": 30.0}
_SLIDES, _FULL = "sliding_attention", "full_attention"
_GEMMA4_E2B = _GEMMA4 | {"num_kv_shared_layers": 20, "use_double_wide_mlp": True}
_GEMMA4_E2B |= {"layer_types": [*[_SLIDES] * 4, _FULL] * 7}
_GEMMA4_E4B = _GEMMA4 | {"num_kv_shared_layers": 18}
_GEMMA4_31B = _GEMMA4 | {"sliding_window": 1024, "hidden_size_per_layer_input": 0}
_GEMMA4_31B |= {"attention_k_eq_v": True, "num_global_key_value_heads": 4}
_GEMMA_27B = _GEMMA | {"head_dim": 128, "query_pre_attn_scalar": 168}


def _scaled(factor: float) -> dict[str, Any]:
    scaling = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "factor": factor}
    scaling |= {"rope_type": "llama3", "original_max_position_embeddings": 8192}
    return _LLAMA | {"rope_scaling": scaling}


_SHAPES: dict[str, tuple[dict[str, Any], tuple]] = {
    "Qwen2.5-0.5B": (_QWEN2, (896, 24, 14, 2, 4_864, 151_936, True)),
    "Qwen2.5-1.5B": (_QWEN2, (1_536, 28, 12, 2, 8_960, 151_936, True)),
    "Qwen2.5-3B": (_QWEN2, (2_048, 36, 16, 2, 11_008, 151_936, True)),
    "Qwen2.5-7B": (_QWEN2, (3_584, 28, 28, 4, 18_944, 152_064, False)),
    "Qwen2.5-14B": (_QWEN2, (5_120, 48, 40, 8, 13_824, 152_064, False)),
    "Qwen2.5-32B": (_QWEN2, (5_120, 64, 40, 8, 27_648, 152_064, False)),
    "Qwen2.5-72B": (_QWEN2, (8_192, 80, 64, 8, 29_568, 152_064, False)),
    "Qwen3-0.6B": (_QWEN3, (1_024, 28, 16, 8, 3_072, 151_936, True)),
    "Qwen3-1.7B": (_QWEN3, (2_048, 28, 16, 8, 6_144, 151_936, True)),
    "Qwen3-4B": (_QWEN3, (2_560, 36, 32, 8, 9_728, 151_936, True)),
    "Qwen3-8B": (_QWEN3, (4_096, 36, 32, 8, 12_288, 151_936, False)),
    "Qwen3-14B": (_QWEN3, (5_120, 40, 40, 8, 17_408, 151_936, False)),
    "Qwen3-32B": (_QWEN3, (5_120, 64, 64, 8, 25_600, 151_936, False)),
    "Qwen3-30B-A3B": (_A3B, (2_048, 48, 32, 4, 6_144, 151_936, False)),
    "Qwen3-235B-A22B": (_A22B, (4_096, 94, 64, 4, 12_288, 151_936, False)),
    "Qwen3.5-9B": (_QWEN3_5, (4_096, 32, 16, 4, 12_288, 248_320, False)),
    "Qwen3.5-35B-A3B": (_QWEN3_5_A3B, (2_048, 40, 16, 2, 512, 248_320, False)),
    "Qwen3-Next-80B-A3B": (_QWEN3_NEXT, (2_048, 48, 16, 2, 5_120, 151_936, False)),
    "Llama-3-8B": (_LLAMA, (4_096, 32, 32, 8, 14_336, 128_256, False)),
    "Llama-3-70B": (_LLAMA, (8_192, 80, 64, 8, 28_672, 128_256, False)),
    "Llama-3.1-8B": (_scaled(8.0), (4_096, 32, 32, 8, 14_336, 128_256, False)),
    "Llama-3.1-70B": (_scaled(8.0), (8_192, 80, 64, 8, 28_672, 128_256, False)),
    "Llama-3.2-1B": (_scaled(32.0), (2_048, 16, 32, 8, 8_192, 128_256, True)),
    "Llama-3.2-3B": (_scaled(32.0), (3_072, 28, 24, 8, 8_192, 128_256, True)),
    "Llama-3.3-70B": (_scaled(8.0), (8_192, 80, 64, 8, 28_672, 128_256, False)),
    "gemma-3-1b": (_GEMMA_1B, (1_152, 26, 4, 1, 6_912, 262_144, True)),
    "gemma-3-4b": (_GEMMA, (2_560, 34, 8, 4, 10_240, 262_208, True)),
    "gemma-3-12b": (_GEMMA, (3_840, 48, 16, 8, 15_360, 262_208, True)),
    "gemma-3-27b": (_GEMMA_27B, (5_376, 62, 32, 16, 21_504, 262_208, True)),
    "gemma-4-E2B": (_GEMMA4_E2B, (1_536, 35, 8, 1, 6_144, 262_144, True)),
    "gemma-4-E4B": (_GEMMA4_E4B, (2_560, 42, 8, 2, 10_240, 262_144, True)),
    "gemma-4-31B": (_GEMMA4_31B, (5_376, 60, 32, 16, 21_504, 262_144, True)),
    "gpt-oss-20b": (_GPT_OSS_20B, (2_880, 24, 64, 8, 2_880, 201_088, False)),
    "gpt-oss-120b": (_GPT_OSS_120B, (2_880, 36, 64, 8, 2_880, 201_088, False)),
    "Olmo-3-7B": (_OLMO3, (4_096, 32, 32, 32, 11_008, 100_278, False)),
    "Olmo-3-32B": (_OLMO3, (5_120, 64, 40, 8, 27_648, 100_278, False)),
    "SmolLM3-3B": (_SMOLLM3, (2_048, 36, 16, 4, 11_008, 128_256, True)),
}
NAMES = tuple(_SHAPES)
# Parts of a name that do not change the shape: Qwen2.5-Math-7B, Meta-Llama-3.1-8B-Instruct.
_VERSIONS = re.compile(r"^meta-|-(math|coder|instruct|base|think|it)(?=-|$)", re.IGNORECASE)


def config_values(model: str) -> dict[str, Any] | None:
    """Return the config.json values of a published model, or of a path that ends in its name.

    None if the model is unknown.
    """
    name = _VERSIONS.sub("", pathlib.PurePath(model).name)
    known = {model.lower(): model for model in NAMES}.get(name.lower())
    if known is None:
        return None
    shared, sizes = _SHAPES[known]
    return shared | dict(zip(_COLUMNS, sizes, strict=True))


def read_shape(model: str, **numerics: Any) -> DecoderConfig:
    """Return the decoder of a folder with a config.json, or of a published model.

    Raises `ConfigError`, with the nearest names, if it is neither.
    """
    values = config_values(model)
    # A plan does not download the config.json of a published model.
    published = values is not None and is_remote(model)
    if not published and (model_path(model) / "config.json").exists():
        return load_huggingface.read_config(model, **numerics)
    if values is None:
        near = difflib.get_close_matches(pathlib.PurePath(model).name, NAMES, n=3, cutoff=0.3)
        hint = f" (near: {', '.join(near)})" if near else ""
        raise ConfigError(
            f"config.model.folder = {model!r}: must be a folder with a config.json, or one of "
            f"{', '.join(NAMES)}{hint}"
        )
    return decoder_from_json(values, model, "model.folder", **numerics)
