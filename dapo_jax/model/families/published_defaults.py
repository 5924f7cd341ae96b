"""Defaults of the configuration classes in transformers 5.24, which config.json may leave out."""

_NAMES = "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads".split()
_NAMES += "num_key_value_heads head_dim max_position_embeddings rms_norm_eps".split()
_NAMES += ["tie_word_embeddings", "rope_theta"]
_VALUES = {  # None: derived from other fields
    "qwen2": (151936, 4096, 22016, 32, 32, 32, None, 32768, 1e-6, False, 1e4),
    "qwen3": (151936, 4096, 22016, 32, 32, 32, 128, 32768, 1e-6, False, 1e4),
    "qwen3_moe": (151936, 2048, 6144, 24, 32, 4, None, 32768, 1e-6, False, 1e4),
    "qwen3_5_text": (248320, 4096, 12288, 32, 16, 4, 256, 32768, 1e-6, False, 1e4),
    "qwen3_5_moe_text": (248320, 2048, None, 40, 16, 2, 256, 32768, 1e-6, False, 1e4),
    "qwen3_next": (151936, 2048, 5632, 48, 16, 2, 256, 32768, 1e-6, False, 1e4),
    "llama": (32000, 4096, 11008, 32, 32, None, None, 2048, 1e-6, False, 1e4),
    "mistral": (32000, 4096, 14336, 32, 32, 8, None, 131072, 1e-6, False, 1e4),
    "ministral": (32000, 4096, 14336, 32, 32, 8, None, 131072, 1e-6, False, 1e4),
    "ministral3": (131072, 4096, 14336, 34, 32, 8, 128, 262144, 1e-5, False, 1e4),
    "gemma3_text": (262208, 2304, 9216, 26, 8, 4, 256, 131072, 1e-6, True, 1e6),
    "gemma4_text": (262144, 2304, 9216, 30, 8, 4, 256, 131072, 1e-6, True, 1e6),
    "gemma4_unified_text": (262144, 2304, 9216, 30, 8, 4, 256, 262144, 1e-6, True, 1e6),
    "gpt_oss": (201088, 2880, 2880, 36, 64, 8, 64, 131072, 1e-5, False, 1.5e5),
    "olmo3": (50304, 4096, 11008, 32, 32, None, None, 2048, 1e-5, False, 5e5),
    "smollm3": (128256, 2048, 11008, 36, 16, 4, None, 32768, 1e-6, True, 2e6),
}
DEFAULTS = {
    kind: {name: value for name, value in zip(_NAMES, row, strict=True) if value is not None}
    for kind, row in _VALUES.items()
}
