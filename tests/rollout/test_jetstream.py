"""The engine under JetStream's own calls: prefill, insert, generate, its tokenizer."""

import inspect

import jax
import numpy as np
import pytest
from samplers import make_engine
from served import BUDGET, TOKENIZER, make_serve_config

pytest.importorskip("jetstream", reason="google-jetstream is not installed")

from dapo_jax.extras.jetstream import JetStreamEngine
from dapo_jax.extras.serve import policy
from dapo_jax.types.structs import SamplingRule


def adapt(engine, tokenizer=TOKENIZER):
    return JetStreamEngine(engine, tokenizer, SamplingRule(0))


@pytest.fixture(scope="module")
def jetstream(byte_folder):
    """A served engine with bursts of one token as JetStream's, and its parameters."""
    devices, config = jax.devices()[:1], make_serve_config(byte_folder, max_prompt_tokens=32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax, "devices", lambda *args: devices)
        patch.setattr(policy, "BURST_TOKENS", 1)
        model, engine, params = policy.load_served(config)
    return adapt(engine, model.tokenizer), params


def test_an_engine_with_longer_bursts_is_rejected(one_device):
    with pytest.raises(ValueError, match="burst_tokens = 3: must be 1"):
        adapt(make_engine(one_device))


def jetstream_prefill(engine, params, text: str, **options):
    tokenizer = engine.build_tokenizer(engine.get_tokenizer())
    tokens, length = tokenizer.encode(
        text, is_bos=True, max_prefill_length=engine.max_prefill_length, **options
    )
    return engine.prefill(params=params, padded_tokens=tokens, true_length=length)


def generate(engine, params, state, slot: int, steps: int) -> list[int]:
    drawn = []
    for _ in range(steps):
        state, result = engine.generate(params, state)
        result.copy_to_host_async()
        data = result.convert_to_numpy().get_result_at_slot(slot)
        assert data.tokens.shape == data.valid.shape == (1, 1)
        drawn += data.tokens[0, data.valid[0] != 0].tolist()
    return drawn


def test_the_engine_is_jetstreams(jetstream):
    from jetstream.engine import engine_api, tokenizer_api
    from jetstream.engine.tokenizer_pb2 import TokenizerParameters

    engine, params = jetstream
    assert isinstance(engine, engine_api.Engine)
    assert isinstance(engine.get_tokenizer(), TokenizerParameters)
    _, result = engine.generate(params, engine.init_decode_state())
    assert isinstance(result, engine_api.ResultTokens)
    tokenizer = engine.build_tokenizer(engine.get_tokenizer())
    for name in tokenizer_api.Tokenizer.__abstractmethods__:
        assert inspect.getattr_static(tokenizer, name) is not None


@pytest.mark.parametrize("jax_padding", [True, False])
def test_a_prefix_may_be_deleted_after_insert(jetstream, byte_responses, jax_padding):
    engine, params = jetstream
    prefix = jetstream_prefill(engine, params, "3+4=", jax_padding=jax_padding)
    state = engine.insert(prefix, engine.init_decode_state(), slot=2)
    for leaf in jax.tree.leaves(prefix):
        leaf.delete()
    assert generate(engine, params, state, 2, 9) == byte_responses["3+4="][:9]


def test_the_token_that_jetstream_prepends_is_removed(jetstream):
    engine, params = jetstream
    tokenizer = engine.build_tokenizer(engine.get_tokenizer())
    ids = TOKENIZER.encode("Tell me!")
    padded = np.array([tokenizer.bos_id, *ids] + [0] * 7)
    key = jax.random.key(3)
    from_ids = engine.prefill(params=params, padded_tokens=padded, true_length=9, key=key)
    from_text = engine.prefill(
        params=params, padded_tokens=np.array(ids + [0] * 8), true_length=8, key=key
    )
    assert from_ids.true_length == from_text.true_length == 8
    assert from_ids.last_token == from_text.last_token
    for left, right in zip(from_ids.caches, from_text.caches, strict=True):
        np.testing.assert_array_equal(left.keys[..., :8], right.keys[..., :8])
        np.testing.assert_array_equal(left.values[..., :8, :], right.values[..., :8, :])


def test_a_slot_stops_at_its_budget(jetstream, byte_responses):
    engine, params = jetstream
    prefix = jetstream_prefill(engine, params, "3+4=")
    state = engine.insert(prefix, engine.init_decode_state(), slot=0)
    assert generate(engine, params, state, 0, BUDGET + 3) == byte_responses["3+4="]
