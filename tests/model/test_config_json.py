"""config.json of every family: what it means, what is written back, and what is rejected."""

import dataclasses
import json
import math

import pytest

from dapo_jax.model.config_json import decoder_from_json, decoder_to_json
from dapo_jax.model.rotary import RopeScaling
from dapo_jax.runtime.settings import ConfigError

BASE = {
    "vocab_size": 32,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
}
LLAMA = {"model_type": "llama", "num_hidden_layers": 2}
MOE = {
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
}
GPT_OSS = {"model_type": "gpt_oss", "num_local_experts": 4, "num_experts_per_tok": 2}
QWEN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768}


def parse(values):
    return decoder_from_json(BASE | values, "folder", "model.folder")


def scaled(rope):
    """Fields of a Qwen2 with these rotations."""
    shape = {"rope_theta": 1e6, "max_position_embeddings": 32_768}
    return {"model_type": "qwen2", "rope_scaling": rope} | shape


FULL, SLIDING = "full_attention", "sliding_attention"


@pytest.mark.parametrize(
    ("values", "window", "sliding"),
    [
        ({"model_type": "qwen2", "sliding_window": 8}, None, ()),
        ({"model_type": "qwen2", "use_sliding_window": True}, None, ()),  # of 28 layers and more
        ({"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 0}, 4096, ()),
        (
            {"model_type": "qwen3", "use_sliding_window": True, "max_window_layers": 2},
            4096,
            (False, False, True),
        ),
        (
            {
                "model_type": "qwen3",
                "use_sliding_window": True,
                "sliding_window": 8,
                "layer_types": [SLIDING, FULL, FULL],
            },
            8,
            (True, False, False),
        ),
        ({"model_type": "mistral"}, 4096, ()),
        ({"model_type": "mistral", "sliding_window": None}, None, ()),
        ({"model_type": "ministral", "layer_types": [FULL, FULL, FULL]}, None, ()),
        ({"model_type": "ministral", "sliding_window": 8}, 8, ()),
        ({"model_type": "ministral3", "rope_scaling": None}, None, ()),
        ({"model_type": "llama", "sliding_window": 8}, None, ()),  # nothing reads it
        ({"model_type": "gemma3_text"}, 4096, ()),  # every sixth layer is full
        ({"model_type": "gemma3_text", "sliding_window_pattern": 2}, 4096, (True, False, True)),
    ],
)
def test_windows_equal_those_of_transformers(values, window, sliding):
    config = parse(values)
    assert (config.window, config.sliding) == (window, sliding)
    assert [config.of_layer(i).window for i in range(3)] == [
        window if slides else None for slides in sliding or (True,) * 3
    ]
    written = json.loads(json.dumps(decoder_to_json(config)))
    assert parse(written) == config


def test_older_and_newer_folders_of_gemma_give_the_same_decoder():
    old = {"model_type": "gemma3_text", "sliding_window": 8, "sliding_window_pattern": 2}
    old |= {"rope_theta": 5e5, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    tables = {FULL: old["rope_scaling"] | {"rope_theta": 5e5}, SLIDING: {"rope_type": "default"}}
    new = {"model_type": "gemma3_text", "sliding_window": 8, "rope_parameters": tables}
    new["layer_types"] = [SLIDING, FULL, SLIDING]
    config = parse(old)
    assert parse(new) == config
    assert config.tie_embeddings and config.head_dim == 256 and config.query_scalar == 256
    full, sliding = config.of_layer(1), config.of_layer(0)
    assert (full.rope_theta, full.rope_scaling) == (5e5, RopeScaling(8.0, kind="linear"))
    assert (sliding.rope_theta, sliding.rope_scaling) == (1e4, None)


def test_older_names_of_settings_give_the_same_decoder():
    """Llama 3.1's own config.json, and that of Qwen3 without the width of a head."""
    shape = {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "rope_theta": 500000.0,
    }
    scaling = {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    old = shape | {"model_type": "llama", "rope_scaling": scaling | {"rope_type": "llama3"}}
    llama = parse(old)
    assert llama.rope_scaling == RopeScaling(8.0, 1.0, 4.0, 8192) and llama.rope_theta == 5e5
    assert not (llama.qkv_bias or llama.out_bias or llama.qk_norm or llama.tie_embeddings)
    parameters = scaling | {"rope_type": "llama3", "rope_theta": 500000.0}
    new = shape | {"model_type": "llama", "rope_parameters": parameters}
    new.pop("rope_theta")
    assert parse(new) == llama
    qwen3 = parse(shape | {"model_type": "qwen3"})
    assert qwen3.head_dim == 128 and qwen3.qk_norm and not qwen3.qkv_bias


def test_missing_fields_have_the_defaults_of_transformers():
    decoder = parse(GPT_OSS | {"rope_theta": None})
    assert (
        decoder.window == 128 and decoder.sliding == (True, False, True) and decoder.head_dim == 64
    )
    assert decoder.qkv_bias and decoder.out_bias and not decoder.tie_embeddings
    scaling = decoder.rope_scaling
    assert scaling.kind == "yarn" and scaling.factor == 32 and not scaling.truncate
    assert decoder.rope_theta == 150_000 and scaling.original_tokens == 4096
    for values in (GPT_OSS, GPT_OSS | {"rope_parameters": {"rope_type": "default"}}):
        decoder = parse(values)
        assert parse(decoder_to_json(decoder)) == decoder


@pytest.mark.parametrize(
    ("rope", "changes", "expected"),
    [
        (QWEN, {}, RopeScaling(4.0, 1.0, 32.0, 32_768, "yarn", 0.1 * math.log(4) + 1)),
        (QWEN | {"attention_factor": 0.9}, {}, RopeScaling(4.0, 1, 32, 32_768, "yarn", 0.9)),
        (
            QWEN | {"mscale": 0.7, "mscale_all_dim": 1.4, "beta_slow": 2, "truncate": False},
            {"original_max_position_embeddings": 100},
            RopeScaling(
                4.0,
                2.0,
                32.0,
                100,
                "yarn",
                (0.07 * math.log(4) + 1) / (0.14 * math.log(4) + 1),
                truncate=False,
            ),
        ),
        ({"type": "yarn", "factor": 0.5}, {}, RopeScaling(0.5, 1.0, 32.0, 32_768, "yarn", 1.0)),
        ({"rope_type": "linear", "factor": 2}, {}, RopeScaling(2.0, kind="linear")),
        (
            {"rope_type": "dynamic", "factor": 2},
            {},
            RopeScaling(2.0, original_tokens=32_768, kind="dynamic"),
        ),
    ],
)
def test_scaling_of_rotations_is_read(rope, changes, expected):
    scaling = parse(scaled(rope) | changes).rope_scaling
    assert dataclasses.replace(scaling, attention_factor=expected.attention_factor) == expected
    assert scaling.attention_factor == pytest.approx(expected.attention_factor, rel=1e-12)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (
            LLAMA | {"rope_parameters": {"rope_type": "longrope", "factor": 4.0}},
            "longrope.*'default' or",
        ),
        (LLAMA | {"rope_parameters": {"rope_type": "yarn"}}, "no 'factor'"),
        (
            LLAMA | {"rope_parameters": {"rope_type": "llama3", "factor": 4.0}},
            "no 'low_freq_factor'",
        ),
        (LLAMA | {"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
        (
            LLAMA | {"model_type": "qwen2", "use_sliding_window": "yes"},
            "use_sliding_window = 'yes'",
        ),
        (
            LLAMA
            | {"model_type": "mistral", "layer_types": ["full_attention", "sliding_attention"]},
            "each",
        ),
        (LLAMA | {"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        (LLAMA | {"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        (LLAMA | {"model_type": "gemma2"}, "gemma2.*qwen2 or qwen3.* or llama"),
        (
            LLAMA | {"num_attention_heads": 0},
            "num_attention_heads = 0: must be a whole number from 1",
        ),
        (LLAMA | {"num_hidden_layers": 2.0}, "num_hidden_layers = 2.0: must be a whole"),
        (LLAMA | {"vocab_size": None}, "vocab_size = None: must be a whole number"),
        (
            LLAMA | {"num_attention_heads": 4, "num_key_value_heads": 3},
            "num_key_value_heads = 3: must div",
        ),
        (LLAMA | {"head_dim": 7}, "head_dim = 7: must be even"),
        (LLAMA | {"rope_parameters": "fast"}, "rope_parameters = 'fast'.*an object"),
        (LLAMA | {"rope_parameters": {"rope_theta": "x"}}, "rope_theta = 'x': must be a number"),
        ({"model_type": "gemma3_text", "final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ({"model_type": "gemma3_text", "attn_logit_softcapping": 50}, "attn_logit_softcapping 50"),
        ({"model_type": "gemma3_text", "hidden_activation": "gelu"}, "hidden_activation 'gelu'"),
        ({"model_type": "gemma3_text", "use_bidirectional_attention": True}, "bidirectional"),
        (
            {"model_type": "gemma3_text", "rope_parameters": {SLIDING: {"rope_type": "yarn"}}},
            "no 'factor'",
        ),
        (
            {
                "model_type": "gemma3_text",
                "rope_parameters": {SLIDING: {"rope_type": "linear", "factor": 2}},
            },
            "of sliding_attention: must be of type 'default'",
        ),
        ({"model_type": "qwen2", "layer_types": [SLIDING] * 3}, "must be full_attention, each"),
        ({"model_type": "mistral", "layer_types": [FULL] * 3}, "must be sliding_attention, each"),
        ({"model_type": "ministral", "layer_types": [FULL] * 2}, "or sliding_attention, each of 3"),
        ({"model_type": "ministral", "layer_types": [FULL, "linear", FULL]}, "'linear'"),
        ({"model_type": "ministral", "sliding_window": 0}, "sliding_window = 0: must be a whole"),
        (MOE | {"decoder_sparse_step": 2}, "decoder_sparse_step 2: must be 1"),
        (MOE | {"mlp_only_layers": [0]}, r"mlp_only_layers \[0\]: must be \[\]"),
        (
            MOE | {"num_experts_per_tok": 5},
            "num_experts_per_tok = 5: must be at most num_experts = 4",
        ),
        (MOE | {"num_experts": 0}, "num_experts = 0: must be a whole number from 1"),
        (MOE | {"norm_topk_prob": "yes"}, "norm_topk_prob = 'yes': must be true or false"),
        (GPT_OSS | {"swiglu_limit": 10.0}, "swiglu_limit 10.0: must be 7.0"),
        (GPT_OSS | {"swiglu_alpha": 1.0}, "swiglu_alpha 1.0: must be 1.702"),
        (GPT_OSS | {"quantization_config": {"quant_method": "fp8"}}, "of 'fp8': must be 'mxfp4'"),
        (GPT_OSS | {"num_local_experts": 1}, "num_experts_per_tok = 2: must be at most"),
        (GPT_OSS | {"layer_types": ["sliding_attention"]}, "each of 3"),
        (scaled(QWEN) | {"rope_theta": 1}, "rope_theta = 1.0: must be above 1 with yarn"),
        (scaled(QWEN | {"beta_fast": 0.5}), "beta_fast = 0.5: must be above beta_slow = 1.0"),
        (scaled(QWEN | {"truncate": 1}), "truncate = 1: must be true or false"),
        (scaled(QWEN | {"attention_factor": 0}), "attention_factor = 0: must be a number above 0"),
        (scaled({"type": "longrope"}), "'longrope': must be 'default' or 'linear'"),
        (scaled({"type": ["yarn"]}), "must be 'default' or 'linear'"),
        (scaled({"type": "linear"}), "no 'factor'"),
        (
            scaled({"type": "dynamic", "factor": 2}) | {"max_position_embeddings": None},
            "max_position_emb",
        ),
        (scaled(QWEN) | {"model_type": "ministral3"}, "no 'llama_4_scaling_beta'"),
    ],
    ids=str,
)
def test_unsupported_settings_are_rejected(values, words):
    assert parse(MOE).active_mlp == 32
    with pytest.raises(ConfigError, match=f"config.model.folder.*{words}"):
        parse(values)
