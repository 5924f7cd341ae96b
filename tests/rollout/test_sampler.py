"""The engine behind JetStream's interface, its scheduler, token sampling, and caches as rings."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from conftest import TINY
from learners import token_logprobs
from samplers import (
    GREEDY,
    PROMPTS,
    TOKENIZER,
    finish,
    forward,
    greedy_loop,
    make_engine,
    make_sampler,
    place,
    sample,
    tokens_of,
)

from dapo_jax.config.experiment import Sampler
from dapo_jax.model.caches import KVCache, PageCache
from dapo_jax.model.decode_attention import in_ring
from dapo_jax.model.decoder import init_params
from dapo_jax.model.logprobs import Rows
from dapo_jax.rollout.proposals import propose
from dapo_jax.rollout.sampling import (
    SamplingRules,
    invert_cdf,
    sample_keys,
    sample_tokens,
    sample_tokens_by_slot,
    truncate,
)
from dapo_jax.rollout.scheduler import Scheduler
from dapo_jax.run import memory
from dapo_jax.runtime.sharding import make_mesh, unbox
from dapo_jax.types.errors import ConfigError
from dapo_jax.types.structs import RolloutKey, SamplingRule


def test_recorded_logprobs_equal_those_of_the_trainer_and_slots_stay_full(tiny_params, one_device):
    sampler, rule = make_sampler(one_device), SamplingRule(temperature=0.8)
    score = jax.jit(
        functools.partial(token_logprobs, config=TINY, temperature=0.8, chunk_tokens=999)
    )
    groups, counts = sample(sampler, tiny_params, rule=rule), sampler.counts
    for prompt in PROMPTS:
        for done in groups[prompt.index]:
            length = len(prompt.tokens) + len(done)
            row = jnp.array([[*prompt.tokens, *done.tokens] + [0] * (28 - length)])
            segments = (jnp.arange(28) < length).astype(jnp.int32)[None]
            logprobs, _ = score(tiny_params, rows=Rows(row, segments, jnp.arange(28)[None]))
            expected = logprobs[0, len(prompt.tokens) : length]
            np.testing.assert_allclose(done.sampler_logprobs, expected, atol=1e-4)
    assert (counts.prefills, counts.responses) == (len(PROMPTS), 3 * len(PROMPTS))
    assert counts.slot_steps > 0 and counts.occupancy >= 0.85


def test_sizes_that_do_not_fit_are_rejected(one_device, eight_devices):
    with pytest.raises(ConfigError, match="sampler.slots = 6.*multiple of data x fsdp = 4"):
        make_sampler(eight_devices, slots=6)
    layer = {"recurrent": (True, False), "delta_key_heads": 1, "delta_value_heads": 1}
    config = dataclasses.replace(TINY, **layer)  # its states can't take back a token
    with pytest.raises(ConfigError, match="sampler.speculate = 2.*delta-net"):
        make_engine(one_device, config=config, speculate=2)


def rule_by_definition(logits: np.ndarray, rule: SamplingRule) -> tuple[np.ndarray, np.ndarray]:
    """Return the softmax at the temperature, and its renormalised top-k and top-p part."""
    full = np.exp(logits / rule.temperature) / np.exp(logits / rule.temperature).sum()
    kept = np.argsort(-full)[: rule.top_k or None]
    before = np.cumsum(full[kept]) - full[kept]
    kept = kept[before < rule.top_p * full[kept].sum()]
    return full, np.where(np.isin(np.arange(len(full)), kept), full, 0) / full[kept].sum()


@pytest.fixture(scope="module")
def first_token(tiny_params, one_device):
    """Return the logits after a prompt, and a function that samples the next token n times."""
    prompt, slots = [5, 9, 14, 3], 2000
    engine = make_engine(one_device, slots=slots, burst=1, response=1, width=slots)
    params, key = engine.load_params(tiny_params), jax.random.key(7)
    padded = np.array(prompt + [0] * 4)
    prefix = engine.prefill_prompts(params, padded[None], [4], key[None])

    def draw_by(rule, count):
        state, drawn = engine.init_decode_state(), []
        for first in range(0, count, slots):
            samples = np.arange(first, first + slots)
            state = engine.insert(prefix, state, np.arange(slots), sample_index=samples)
            state, _ = engine.generate(params, state, rule=rule, longest=4)
            drawn.append((np.asarray(state.tokens)[:, 0], np.asarray(state.logprobs)[:, 0]))
        return map(np.concatenate, zip(*drawn, strict=True))

    row = jnp.array([prompt])
    hidden = forward(tiny_params, row, jnp.ones_like(row), jnp.arange(4)[None], config=TINY)
    return np.asarray(hidden[0, -1] @ tiny_params["embedding"].T, np.float64), draw_by


@pytest.mark.parametrize(
    "rule",
    [
        pytest.param(SamplingRule(temperature=0.6), marks=pytest.mark.slow),
        SamplingRule(temperature=1.3, top_p=0.9, top_k=7),
    ],
)
def test_twenty_thousand_samples_of_the_engine_follow_the_rule(first_token, rule):
    """Chi-square test; recorded log-probs are those before top-k and top-p."""
    logits, draw_by = first_token
    full, truncated = rule_by_definition(logits, rule)
    drawn, logprobs = draw_by(rule, 20_000)
    observed, expected = np.bincount(drawn, minlength=len(full)), truncated * len(drawn)
    assert observed[expected == 0].sum() == 0
    rare = expected < 5  # counted together, as the test's approximation asks
    counts, means = (np.append(x[~rare], x[rare].sum()) for x in (observed, expected))
    assert (means > 0).sum() >= 3
    assert scipy.stats.chisquare(counts[means > 0], means[means > 0]).pvalue > 1e-3
    np.testing.assert_allclose(logprobs, np.log(full[drawn]), atol=1e-4)


# --- drawing ------------------------------------------------------------------------------


def test_a_token_without_mass_is_never_sampled():
    mass = jnp.zeros((5, 300)).at[:, jnp.array([7, 200, 299])].set(1e-20)
    for uniform in (0.0, 0.3, 0.5, 0.99, 1.0):
        assert set(invert_cdf(mass, jnp.full(5, uniform)).tolist()) <= {7, 200, 299}


def test_truncation_keeps_the_nucleus_and_the_top_k():
    probabilities = jnp.array([[0.4, 0.3, 0.2, 0.1]])
    kept = lambda p, k: (truncate(probabilities, p, k)[0] > 0).tolist()  # noqa: E731
    assert kept(1.0, 0) == [True] * 4
    assert kept(0.7, 0) == [True, True, False, False]
    assert kept(0.71, 0) == [True, True, True, False]
    assert kept(1.0, 1) == [True, False, False, False]
    assert kept(0.5, 3) == [True, True, False, False]


@pytest.mark.parametrize("top_p", [1e-6, 0.3, 0.7, 0.999, 1.0])
@pytest.mark.parametrize("top_k", [0, 1, 5, 299, 300])
def test_truncation_follows_its_definition_with_ties_and_tokens_without_mass(top_p, top_k):
    counts = np.random.default_rng(0).geometric(0.004, (20, 300)) - 1  # with ties and zeros
    counts[0], counts[1, 1:], counts[2] = 7, 0, np.arange(300) % 3
    exact = counts / 2.0**20  # sums of such fractions have no rounding
    kept = exact >= np.sort(exact)[:, -min(top_k or 300, 300), None]
    mass = np.where(kept, exact, 0)
    likelier = np.einsum("sv,svw->sw", mass, exact[:, :, None] > exact[:, None])
    limit = np.float32(top_p) * mass.sum(axis=1, keepdims=True).astype(np.float32)
    expected = np.where((likelier < limit) | (top_p == 1), mass, 0)
    got = jax.jit(truncate, static_argnums=(1, 2))(jnp.float32(exact), top_p, top_k)
    np.testing.assert_array_equal(got, expected.astype(np.float32))


def test_slots_with_different_rules_sample_as_with_one_rule():
    rules = [
        SamplingRule(*r) for r in ((1, 1, 0), (0, 1, 0), (0.7, 0.8, 0), (2, 1, 5), (1, 0.9, 7))
    ]
    logits = jax.random.normal(jax.random.key(0), (200, 300)) * 3
    keys, positions = jax.random.split(jax.random.key(1), 200), jnp.arange(200)
    own = [rules[slot % len(rules)] for slot in range(200)]
    arrays = SamplingRules(*map(jnp.array, zip(*own, strict=True)))
    tokens, logprobs, _ = jax.jit(sample_tokens_by_slot)(logits, keys, positions, arrays)
    for first, rule in enumerate(rules):
        wanted, recorded, _ = jax.jit(sample_tokens, static_argnums=3)(
            logits, keys, positions, rule
        )
        mine = slice(first, None, len(rules))
        np.testing.assert_array_equal(tokens[mine], wanted[mine])
        np.testing.assert_allclose(logprobs[mine], recorded[mine], rtol=1e-5)
    free = SamplingRules(*(x[::5] for x in arrays))  # no slot truncates
    alone, *_ = jax.jit(sample_tokens_by_slot)(logits[::5], keys[::5], positions[::5], free)
    np.testing.assert_array_equal(alone, tokens[::5])


@pytest.mark.parametrize("seed", [0, 2**32 - 1])
def test_keys_of_several_prompts_equal_single_keys(seed):
    def folded(purpose, step, index):
        key = jax.random.key(seed)
        for part in (purpose, step, index):
            key = jax.random.fold_in(key, part)
        return jax.random.key_data(key)

    steps, indices = [3, 2**32 - 1, 0], [9, 4, 2**31 + 5]
    together = jax.random.key_data(
        sample_keys([(seed, 2, *pair) for pair in zip(steps, indices, strict=True)])
    )
    for i, (step, index) in enumerate(zip(steps, indices, strict=True)):
        expected = folded(2, np.uint32(step), np.uint32(index))
        np.testing.assert_array_equal(together[i], expected)


def test_host_work_overlaps_a_burst(tiny_params, one_device):
    """It starts after the burst is launched, and before its results are read."""
    engine, events = make_engine(one_device), []
    generate = engine.generate
    engine.generate = lambda *args, **named: (events.append("launch"), generate(*args, **named))[1]
    sampler = Scheduler(engine, TOKENIZER, seed=5)
    sampler.begin(tiny_params, RolloutKey(0, 2), GREEDY)
    sampler.submit(PROMPTS[0], 2)
    sampler.step(lambda: events.append(sampler.counts.bursts))
    assert events == ["launch", 0] and sampler.counts.bursts == 1


# --- rings ---------------------------------------------------------------------------------------

WINDOW = 5  # prompts are of 3 to 7 tokens, responses of 20
MIXED = dataclasses.replace(TINY, layers=3, window=WINDOW, sliding=(True, False, True))
ALL = dataclasses.replace(TINY, window=WINDOW)
LAYOUTS = {"slots": {}, "pages": {"cache": "paged", "page_tokens": 4}}
SPECULATING = LAYOUTS["pages"] | {"speculate": 3}
SOME = PROMPTS[:5]


def params_of(config):
    params = unbox(jax.jit(init_params, static_argnums=0)(config, jax.random.key(0)))
    return params | {"embedding": params["embedding"] * 20}


@pytest.mark.parametrize("length", [1, 5, 8])
def test_a_ring_holds_its_newest_tokens(length):
    for last in range(20):
        ring = {}
        for position in range(last + 1):
            ring[position % length] = position
        actual = np.asarray(in_ring(length, jnp.array([[last]])))[0]
        assert [ring.get(i, -1) for i in range(length)] == np.maximum(actual, -1).tolist()


@pytest.mark.parametrize(
    ("config", "layout"),
    [
        (TINY, "slots"),
        (MIXED, "pages"),
        pytest.param(MIXED, "slots", marks=pytest.mark.slow),
        pytest.param(ALL, "slots", marks=pytest.mark.slow),
        pytest.param(ALL, "pages", marks=pytest.mark.slow),
    ],
)
def test_greedy_decoding_equals_the_whole_forward_pass(config, layout, one_device):
    params, sampler = params_of(config), make_sampler(one_device, config=config, **LAYOUTS[layout])
    groups = sample(sampler, params, SOME, 1, GREEDY)
    for prompt in SOME:
        expected = greedy_loop(params, prompt.tokens.tolist(), 20, config)
        assert groups[prompt.index][0].tokens.tolist() == expected
    assert max(len(done) for (done,) in groups.values()) > 2 * WINDOW


@pytest.fixture(scope="module")
def tokens(one_device):
    return tokens_of(sample(make_sampler(one_device, config=MIXED), params_of(MIXED), SOME))


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(LAYOUTS["slots"], marks=pytest.mark.slow),
        pytest.param(LAYOUTS["pages"], marks=pytest.mark.slow),
        SPECULATING,
    ],
    ids=["slots", "pages", "speculating"],
)
def test_eight_devices_sample_what_one_does(settings, tokens):
    mesh, params = make_mesh(2, 2, 2), params_of(MIXED)
    sharded = make_sampler(mesh, config=MIXED, slots=8, **settings)
    assert tokens_of(sample(sharded, place(params, MIXED, mesh), SOME)) == tokens


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", ["auto", "int8"])
def test_a_ring_is_as_long_as_the_window(layout, dtype, one_device):
    engine = make_engine(one_device, config=MIXED, cache_dtype=dtype, **LAYOUTS[layout])
    caches = engine.programs.empty(window=28).caches
    first, full, last = (sum(x.nbytes for x in jax.tree.leaves(cache)) for cache in caches)
    assert first == last < full / 4
    assert [type(cache) for cache in caches[::2]] == [KVCache, KVCache]
    assert isinstance(caches[1], PageCache if layout == "pages" else KVCache)
    if layout == "slots":
        estimate = memory.cache_bytes(MIXED, Sampler(cache_dtype=dtype), one_device, 4, 8, 20)
        assert estimate == first + full + last + 4 * 20 * memory.SAMPLED_TOKEN_BYTES


# --- supports -------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", [(1, 0.7, 0), (1, 1, 20), (0.8, 0.7, 20), (1, 1, 0)])
def test_a_support_separates_the_kept_tokens_and_has_their_mass(rule):
    rule, count = SamplingRule(*rule), 50
    logits = jax.random.normal(jax.random.key(0), (count, 300)) * 3
    keys, places = jax.random.split(jax.random.key(1), count), jnp.arange(count)
    rules = SamplingRules(*(jnp.full(count, x) for x in rule))
    for _, _, supports in (
        jax.jit(sample_tokens, static_argnums=3)(logits, keys, places, rule),
        jax.jit(sample_tokens_by_slot)(logits, keys, places, rules),
    ):
        for row, (log_mass, edge) in zip(np.asarray(logits, np.float64), supports, strict=True):
            full, kept = rule_by_definition(row, rule)
            inside = np.log(full / full.max()) >= edge
            assert (inside == (kept > 0)).all()
            np.testing.assert_allclose(np.exp(log_mass), full[inside].sum(), rtol=1e-5)


def test_resumed_and_speculated_responses_have_the_same_supports(tiny_params, one_device):
    found, rule = [], SamplingRule(0.7, 0.9)
    for speculate, stops in ((0, False), (0, True), (3, True)):
        sampler = make_sampler(one_device, top_p=0.9, speculate=speculate)
        sampler.begin(tiny_params, RolloutKey(0, 2), rule)
        for prompt in SOME:
            sampler.submit(prompt, 3, rule._replace(top_k=5) if prompt is SOME[0] else None)
        groups = {}
        for _ in range(2 * stops):
            groups |= {request.prompt.index: done for request, done in sampler.step()}
        partial = sampler.stop(keep=True) if stops else []
        assert not stops or any(done.supports is not None for p in partial for done in p.begun)
        for part in partial:
            sampler.submit(part.prompt, 3, carried=part)
        groups |= finish(sampler)
        found.append([done for prompt in SOME[1:] for done in groups[prompt.index]])
    for one, *others in zip(*found, strict=True):
        assert (one.supports[:, 1] < 0).all() and one.supports.shape == (len(one), 2)
        for other in others:
            assert one.tokens.tolist() == other.tokens.tolist()
            np.testing.assert_allclose(one.supports, other.supports, atol=1e-4)


# --- speculation ----------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0, 0.3, pytest.param(1.0, marks=pytest.mark.slow)])
def test_speculation_changes_no_token_and_saves_steps(temperature, one_device):
    """With windows, whose rings the proposals must not overwrite, and a rule per request."""
    found, params, rule = [], params_of(MIXED), SamplingRule(temperature)
    for speculate in (0, 3):
        sizes = {"slots": 8, "response": 60, "first_window_tokens": 80}
        sampler = make_sampler(one_device, config=MIXED, speculate=speculate, **sizes)
        sampler.begin(params, RolloutKey(0, 2), rule)
        for number, prompt in enumerate(SOME):
            sampler.submit(prompt, 4, SamplingRule(0.5, 0.9, 9) if number == 3 else None)
        found.append((finish(sampler), sampler.counts))
    (plain, before), (groups, counts) = found
    assert tokens_of(groups) == tokens_of(plain)
    for index, group in plain.items():
        for one, other in zip(group, groups[index], strict=True):
            np.testing.assert_allclose(one.sampler_logprobs, other.sampler_logprobs, atol=1e-5)
    assert (
        counts.metrics()["tokens_per_slot_step"] > 1.0 == before.metrics()["tokens_per_slot_step"]
    )
    if temperature == 0:
        assert counts.decode_steps < 0.6 * before.decode_steps


def test_proposals_follow_the_longest_match_with_the_last_tokens():
    def proposals(text, other=(), count=4):
        texts = np.zeros((2, 1, 20), np.int32)
        texts[0, 0, : len(text)], texts[1, 0, : len(other)] = text, other
        ends = np.array([[len(text) - 1], [len(other)]])
        return propose(texts[0], ends[0], (texts[1], ends[1]), count)[0].tolist()

    assert proposals([1, 2, 3, 4, 5, 9, 2, 3]) == [4, 5, 9, 2]
    assert proposals([1, 2, 3, 4, 8, 2, 3, 5, 7, 7, 2, 3], count=2) == [5, 7]  # the latest
    assert proposals([1, 2, 3, 4, 8, 2, 3, 5, 7, 1, 2, 3], count=2) == [4, 8]  # the longest
    assert proposals([6, 7, 6, 7, 6]) == [7, 6, 7, 6]  # it repeats what it has
    assert proposals([1, 2, 3], [9, 1, 2, 3, 5, 6, 7, 8]) == [5, 6, 7, 8]
    assert proposals([2, 5, 2, 5, 3, 2], [2, 9, 9, 9, 9], count=1) == [5]  # its own text first


def test_a_window_longer_than_the_cache_uses_pages(one_device):
    wide = dataclasses.replace(MIXED, window=28)
    engine = make_engine(one_device, config=wide, **LAYOUTS["pages"])
    assert all(isinstance(c, PageCache) for c in engine.init_decode_state().caches)
