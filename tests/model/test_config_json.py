"""config.json of every family: what it means, what is written back, and what is rejected."""

import dataclasses
import json
import math

import pytest
from row_files import read_table

from dapo_jax.model.config_json import NUMBERS, check_number, decoder_from_json, decoder_to_json
from dapo_jax.model.families import family_names
from dapo_jax.model.rotary import RopeScaling
from dapo_jax.types.errors import ConfigError

BASE = {
    "vocab_size": 32,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
}
QWEN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768}
LLAMA = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA |= {"original_max_position_embeddings": 8192}


def parse(values):
    return decoder_from_json(BASE | values, "folder", "model.folder")


def scaled(rope):
    """Fields of a Qwen2 with these rotations."""
    shape = {"rope_theta": 1e6, "max_position_embeddings": 32_768}
    return {"model_type": "qwen2", "rope_scaling": rope} | shape


FULL, SLIDING = "full_attention", "sliding_attention"


@pytest.mark.parametrize(("kind", "values", "expected"), read_table(__file__, "layers"))
def test_fields_and_layers_are_those_of_transformers(kind, values, expected):
    """A list of layers takes precedence over the number that it usually follows from."""
    config = parse(values | {"model_type": kind})
    assert {name: getattr(config, name) for name in expected} == expected
    for number, layer in enumerate(config.each_layer):
        slides = config.sliding[number] if config.sliding else True
        assert layer.window == (config.window if slides else None)
        assert layer.rotated == config.rotated[number : number + 1]
    assert parse(json.loads(json.dumps(decoder_to_json(config)))) == config


def test_only_full_layers_of_olmo_scale_their_rotations():
    """The published folders' older fields, and the tables of newer ones."""
    old = {"model_type": "olmo3", "num_hidden_layers": 4, "rope_theta": 5e5, "rope_scaling": QWEN}
    full = QWEN | {"rope_theta": 5e5}
    new = {"model_type": "olmo3", "num_hidden_layers": 4}
    new["rope_parameters"] = {FULL: full, SLIDING: {"rope_type": "default", "rope_theta": 5e5}}
    config = parse(old)
    assert parse(new) == config == parse(decoder_to_json(config))
    assert config.sliding == (True, True, True, False) and config.window == 4096
    assert [config.of_layer(i).rope_scaling is None for i in range(4)] == [True, True, True, False]
    assert {config.of_layer(i).rope_theta for i in range(4)} == {5e5}
    assert config.norm_eps == 1e-5


@pytest.mark.parametrize(("several", "one"), read_table(__file__, "as one"))
def test_fields_that_complete_each_other_are_read_together(several, one):
    """What two fields say together and one alone, as `transformers` 5.24 merges them."""
    assert parse(several) == parse(one)


@pytest.mark.parametrize("kind", family_names())
def test_a_config_that_only_names_its_class_has_the_defaults_of_the_class(kind):
    config = decoder_from_json({"model_type": kind}, "folder", "model.folder")
    assert config.kv_heads == {"llama": 32, "qwen3": 32, "mistral": 8}.get(kind, config.kv_heads)
    assert decoder_from_json(decoder_to_json(config), "folder", "model.folder") == config


def test_a_nested_config_may_leave_out_what_its_class_defaults():
    """All that the published Gemma 3 4B states of its text model."""
    text: dict = {"hidden_size": 2560, "intermediate_size": 10_240, "num_hidden_layers": 34}
    text |= {"model_type": "gemma3_text", "sliding_window": 1024}
    text["rope_scaling"] = {"factor": 8.0, "rope_type": "linear"}
    config = decoder_from_json({"model_type": "gemma3", "text_config": text}, "f", "model.folder")
    assert (config.vocab, config.heads, config.kv_heads, config.head_dim) == (262_208, 8, 4, 256)
    assert config.tie_embeddings and config.window == 1024 and config.rope_theta == 1e6
    del text["model_type"]
    nameless = {"model_type": "gemma3", "text_config": text}
    assert decoder_from_json(nameless, "f", "model.folder") == config


@pytest.mark.parametrize(
    ("rope", "expected"),
    [
        (QWEN, RopeScaling(4.0, 1.0, 32.0, 32_768, "yarn", 0.1 * math.log(4) + 1)),
        (QWEN | {"attention_factor": 0.9}, RopeScaling(4.0, 1, 32, 32_768, "yarn", 0.9)),
        (
            QWEN | {"mscale": 0.7, "mscale_all_dim": 1.4, "beta_slow": 2},
            RopeScaling(
                4.0, 2.0, 32.0, 32_768, "yarn", (0.07 * math.log(4) + 1) / (0.14 * math.log(4) + 1)
            ),
        ),
        ({"type": "yarn", "factor": 0.5}, RopeScaling(0.5, 1.0, 32.0, 32_768, "yarn", 1.0)),
        ({"rope_type": "linear", "factor": 2}, RopeScaling(2.0, kind="linear")),
        (LLAMA, RopeScaling(8.0, 1.0, 4.0, 8192)),
    ],
)
def test_scaling_of_rotations_is_read(rope, expected):
    scaling = parse(scaled(rope)).rope_scaling
    assert scaling is not None
    assert dataclasses.replace(scaling, attention_factor=expected.attention_factor) == expected
    assert scaling.attention_factor == pytest.approx(expected.attention_factor, rel=1e-12)


@pytest.mark.parametrize("name", NUMBERS)
def test_a_number_is_checked_like_a_setting(name):
    """The message has the field, its value and what is allowed."""
    kind, allowed = NUMBERS[name]
    wrong = [-1, -math.inf, math.nan, math.inf, 10**18, 1e300, "1", True, [1], {}]
    most = allowed.at_most or 0
    wrong += [most * 2] if kind is float else [most + 1, 2.0]
    wrong += [0] * (not allowed(0))
    for value in wrong:
        with pytest.raises(ValueError, match=f"^{name} = .*: must be ") as caught:
            check_number(name, value)
        assert str(allowed) in str(caught.value)


WRONG_VALUES = read_table(__file__, "wrong_values")


@pytest.mark.parametrize(("values", "words"), WRONG_VALUES, ids=str)
def test_unsupported_settings_are_rejected(values, words):
    with pytest.raises(ConfigError, match=f"config.model.folder.*{words}"):
        parse(values)
