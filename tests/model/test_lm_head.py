"""Output head and divergence of two, sharded and in chunks, against whole softmaxes."""

import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from teachers import divergence_by_definition

from dapo_jax.extras.distillation.divergence import Divergence, head_divergence
from dapo_jax.model import lm_head
from dapo_jax.model.lm_head import Scale, head_logprobs
from dapo_jax.runtime import sharding
from dapo_jax.runtime.sharding import make_mesh

ROWS, LENGTH, WIDTH, VOCAB = 8, 7, 16, 48
RNG = np.random.default_rng(5)
HIDDEN = RNG.normal(size=(ROWS, LENGTH, WIDTH)).astype("f")
HEAD = RNG.normal(size=(WIDTH, VOCAB)).astype("f")
TARGETS = RNG.integers(0, VOCAB, (ROWS, LENGTH)).astype(np.int32)
WEIGHTS = RNG.normal(size=(2, ROWS, LENGTH)).astype("f")
MESHES = [(2, 2, 1, 2), (1, 2, 2, 2), (1, 1, 1, 8)]
# Tokens that need the head: all, some, those of one device, none.
NEEDED = {
    "all": np.ones((ROWS, LENGTH), bool),
    "some": RNG.uniform(size=(ROWS, LENGTH)) < 0.4,
    "uneven": np.arange(ROWS)[:, None] < np.full(LENGTH, 2),
    "none": np.zeros((ROWS, LENGTH), bool),
}


def by_definition(hidden, head, targets, needed, temperature):
    logprobs = jax.nn.log_softmax(hidden @ head / temperature)
    drawn = jnp.take_along_axis(logprobs, targets[..., None], axis=-1)[..., 0]
    entropy = -jnp.sum(jnp.exp(logprobs) * logprobs, axis=-1)
    return jnp.where(needed, drawn, 0), jnp.where(needed, entropy, 0)


def with_gradients(function, *options, needed=NEEDED["all"]):
    """Values, and gradients with respect to hidden states and head of a loss of both values."""

    def loss(hidden, head):
        values = function(hidden, head, TARGETS, needed, *options)
        return jnp.sum(jnp.stack(values) * WEIGHTS), values

    return jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))


def assert_same(actual, expected, atol=4e-6, rtol=1e-5):
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=rtol, atol=atol)


@pytest.mark.parametrize("needed", NEEDED)
@pytest.mark.parametrize("chunk_tokens", [1, 14, 10**6])
def test_values_and_gradients_equal_those_of_the_softmax(needed, chunk_tokens, monkeypatch):
    monkeypatch.setattr(lm_head, "MIN_PIECE_TOKENS", 16)  # four pieces
    in_float64 = types.SimpleNamespace(**vars(jnp) | {"float32": jnp.float64})
    monkeypatch.setattr(lm_head, "jnp", in_float64)
    wanted, exact = NEEDED[needed], (HIDDEN.astype(float), HEAD.astype(float))
    with jax.enable_x64(True):
        actual = with_gradients(head_logprobs, Scale(0.6), chunk_tokens, needed=wanted)(*exact)
        expected = with_gradients(by_definition, 0.6, needed=wanted)(*exact)
        assert_same(actual, expected, atol=1e-13, rtol=1e-12)


def test_products_with_the_head_are_made_for_needed_tokens_only(monkeypatch):
    monkeypatch.setattr(lm_head, "MIN_PIECE_TOKENS", 14)
    hidden = HIDDEN.copy()
    hidden[2:] = np.nan  # which a product would spread
    compute = with_gradients(head_logprobs, Scale(), 14, needed=NEEDED["uneven"])
    (_, gradient), _ = compute(hidden, HEAD)
    assert np.isfinite(gradient).all()


# Most targets lie below their edges, and are kept; a sixth of the tokens keep the vocabulary.
KEEPS_ALL = RNG.uniform(size=(ROWS, LENGTH)) < 1 / 6
EDGES = np.where(KEEPS_ALL, -np.inf, -RNG.uniform(0, 9, (ROWS, LENGTH))).astype("f")


def loop_over_supports(scale):
    """Values and gradients of `with_gradients` token by token, in float64."""
    back, gradient = np.zeros(HIDDEN.shape), np.zeros(HEAD.shape)
    values = np.zeros((2, ROWS, LENGTH))
    for place in np.ndindex(ROWS, LENGTH):
        hidden, head = np.float64(HIDDEN[place]), np.float64(HEAD)
        bent = np.tanh(hidden @ head / (scale.cap or 1))
        logits = (scale.cap * bent if scale.cap else hidden @ head) / scale.temperature
        support = logits - logits.max() >= EDGES[place]
        support[TARGETS[place]] = True
        logprobs = logits[support] - np.log(np.exp(logits[support]).sum())
        powers, hit = np.exp(logprobs), np.flatnonzero(support) == TARGETS[place]
        entropy = -(powers * logprobs).sum()
        values[(slice(None), *place)] = logprobs[hit].item(), entropy
        first, second = WEIGHTS[(slice(None), *place)]
        slope = first * (hit - powers) - second * powers * (logprobs + entropy)
        slope *= (1 - bent[support] ** 2 if scale.cap else 1) / scale.temperature
        back[place] = head[:, support] @ slope
        gradient[:, support] += np.outer(hidden, slope)
    return (back, gradient), tuple(values)


@pytest.mark.parametrize("scale", [Scale(0.6), Scale(0.7, 2.0)], ids=["plain", "capped"])
@pytest.mark.parametrize("chunk_tokens", [5, 10**6])
def test_truncated_values_and_gradients_equal_a_loop_over_the_supports(scale, chunk_tokens):
    expected = loop_over_supports(scale)
    actual = with_gradients(head_logprobs, scale, chunk_tokens, EDGES)(HIDDEN, HEAD)
    assert_same(actual, expected, 1e-5)
    mesh = make_mesh(1, 2, 2, decode_tensor=2)
    head = jax.device_put(HEAD, sharding.sharding(mesh, "embed", "vocab"))
    edges = sharding.put(mesh, EDGES, "batch")
    with sharding.activate(mesh):
        sharded = with_gradients(head_logprobs, scale, chunk_tokens, edges)
        assert_same(sharded(sharding.put(mesh, HIDDEN, "batch"), head), expected, 1e-5)


@pytest.mark.parametrize("sizes", MESHES, ids=str)
@pytest.mark.parametrize(("chunk_tokens", "needed"), [(3, "uneven"), (10**6, "all")])
def test_sharding_does_not_change_the_results(sizes, chunk_tokens, needed):
    data, fsdp, decode_tensor, tensor = sizes
    mesh = make_mesh(data, fsdp, tensor, decode_tensor=decode_tensor)
    head = jax.device_put(HEAD, sharding.sharding(mesh, "embed", "vocab"))
    hidden = sharding.put(mesh, HIDDEN, "batch")
    with sharding.activate(mesh):
        options = Scale(0.8), chunk_tokens
        actual = with_gradients(head_logprobs, *options, needed=NEEDED[needed])(hidden, head)
    expected = with_gradients(by_definition, 0.8, needed=NEEDED[needed])
    assert_same(actual, expected(HIDDEN, HEAD))


def test_the_head_is_gathered_and_its_gradient_reduced_once_however_many_chunks():
    mesh = make_mesh(2, 2, 2)
    head = jax.device_put(HEAD, sharding.sharding(mesh, "embed", "vocab"))
    hidden = sharding.put(mesh, HIDDEN.astype(jnp.bfloat16), "batch")
    with sharding.activate(mesh):
        lowered = with_gradients(head_logprobs, Scale(), 2).lower(hidden, head)
    text = lowered.as_text()
    assert text.count("stablehlo.while") == 2  # over the chunks, forward and backward
    gathers = re.findall(r"stablehlo.all_gather.*?-> tensor<(\S+)>", text, re.S)
    assert gathers == ["16x24xbf16"] * 2
    scatters = re.findall(r"stablehlo.reduce_scatter.*?-> tensor<(\S+)>", text, re.S)
    assert scatters == ["8x24xf32"]


def test_a_frozen_head_costs_no_gradient():
    mesh = make_mesh(2, 2, 2)

    def loss(hidden, head):
        return jnp.sum(head_logprobs(hidden, head, TARGETS, NEEDED["all"], Scale(), 2)[0])

    head = jax.device_put(HEAD, sharding.sharding(mesh, "embed", "vocab"))
    with sharding.activate(mesh):
        both, frozen = (
            jax.jit(jax.grad(loss, argnums)).lower(sharding.put(mesh, HIDDEN, "batch"), head)
            for argnums in ((0, 1), 0)
        )
    whole = "f32[16,24]"
    assert f"{whole}{{1,0}} dot" in both.compile().as_text()
    assert f"{whole}{{1,0}} dot" not in frozen.compile().as_text()
    assert "reduce-scatter" not in frozen.compile().as_text()


# --- divergence of two heads -------------------------------------------------------------------

TEACHER = RNG.normal(size=(ROWS, LENGTH, 24)).astype("f")
TEACHER_HEAD = RNG.normal(size=(24, VOCAB)).astype("f") / 4
COUNTED = WEIGHTS[0].copy()
COUNTED[2, 1:3] = 0
KINDS = [Divergence(beta, 0.7) for beta in (0.0, 0.5, 1.0)]


def diverging(function):
    def loss(hidden, head):
        values = function(hidden, head)
        return jnp.sum(values * COUNTED), values

    return jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))


def chunked(kind, chunk_tokens, teacher=TEACHER, teacher_head=TEACHER_HEAD):
    return diverging(
        lambda hidden, head: head_divergence(
            (hidden, teacher), (head, teacher_head), COUNTED != 0, kind, chunk_tokens
        )
    )


def assert_divergence_of_the_paper(actual, kind):
    expected = diverging(
        lambda hidden, head: jnp.where(
            COUNTED == 0, 0, divergence_by_definition(TEACHER @ TEACHER_HEAD, hidden @ head, kind)
        )
    )
    assert_same(actual, expected(HIDDEN, HEAD / 2), 1e-5)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_divergence_and_its_gradients_equal_the_papers_equation(kind):
    actual = chunked(kind, 9)(HIDDEN, HEAD / 2)  # chunks cross rows, the last one is padded
    assert_divergence_of_the_paper(actual, kind)
    (back, _), values = actual
    assert ((np.asarray(values) > 0) == (COUNTED != 0)).all() and not back[2, 1:3].any()


@pytest.mark.parametrize("sizes", [MESHES[0], MESHES[2]], ids=str)
def test_sharding_does_not_change_a_divergence(sizes):
    data, fsdp, decode_tensor, tensor = sizes
    mesh, kind = make_mesh(data, fsdp, tensor, decode_tensor=decode_tensor), Divergence(0.3)
    heads = (sharding.sharding(mesh, "embed", "vocab"),) * 2
    head, teacher_head = jax.device_put((HEAD / 2, TEACHER_HEAD), heads)
    hidden, teacher = sharding.put(mesh, (HIDDEN, TEACHER), "batch")
    with sharding.activate(mesh):
        assert_divergence_of_the_paper(chunked(kind, 3, teacher, teacher_head)(hidden, head), kind)
