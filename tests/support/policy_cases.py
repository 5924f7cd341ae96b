"""Packed microbatches of ragged responses, near, far from and on the bounds of the methods."""

import dataclasses
import functools
import math
import types

import jax
import jax.numpy as jnp
import numpy as np

from dapo_jax.algorithms import PRESETS
from dapo_jax.learner.batches import PackedRows, ScoredBatch, TrainBatch
from dapo_jax.learner.policy import policy_objective

EXACT = {"rtol": 1e-6, "atol": 1e-8}  # weights below exp(-20) may be nothing

# Rows of prompts of two tokens with a response each. One-token and empty responses are among
# them; the second token of the longer ones has weight 0, and so has every token of each seventh.
ROWS, COLUMNS = 20, 48
LENGTHS = (5, 1, 3, 0, 7, 1, 4, 2, 1, 6, 1)
SIGNS = (1.3, -0.7, 0.0, -2.1, 0.4, -1.0, 1.0)


def lay_out():
    """Per response its row, segment, first column and tokens."""
    actual, row, column, segment = [], 0, 0, 1
    while row < ROWS:
        n = LENGTHS[len(actual) % len(LENGTHS)]
        if column + 2 + n > COLUMNS:
            row, column, segment = row + 1, 0, 1
            continue
        actual.append((row, segment, column + 2, n))
        column, segment = column + 2 + n, segment + 1
    return actual


LAYOUT = lay_out()


def trained_places(i):
    row, _, start, n = LAYOUT[i]
    if i % 7 == 6:
        return []
    return [(row, start + t) for t in range(n) if n < 4 or t != 1]


PLACES = [trained_places(i) for i in range(len(LAYOUT))]
COUNT = sum(map(len, PLACES))
OF_TOKEN = np.repeat(range(len(LAYOUT)), [len(own) for own in PLACES])  # the response
SIZES = np.bincount(OF_TOKEN)[OF_TOKEN]  # tokens of its response


def scatter(values, fill):
    array = np.full((ROWS, COLUMNS), fill)
    for place, value in zip([p for own in PLACES for p in own], values, strict=True):
        array[place] = value
    return array


def make_case(log_ratios, drifts, seed=0, rubbish=np.nan, per_token=False, certain=False, off=0.5):
    """Return a microbatch whose trained tokens have these log-ratios, log-probs and responses.

    `drifts` are log-ratios of the old policy to the sampler. `per_token`: advantages differ inside
    a response. `certain`: of the policy and the old one, the more likely has probability 1. `off`
    is the standard deviation of the reference's log-probs from the policy's.
    """
    rng = np.random.default_rng(seed)
    # All log-probs are at most 0: the more likely policy is near 0, the other below it.
    high = -np.abs(rng.normal(0, 1, COUNT)) - np.maximum(drifts, 0)
    high = 0 * high if certain else high
    old = np.where(log_ratios > 0, high - log_ratios, high)
    p, q = old + log_ratios, old - drifts
    q = np.minimum(q, 0)
    reference = np.minimum(p + rng.normal(0, off, COUNT), 0)
    advantages, weights = np.zeros((ROWS, COLUMNS)), np.zeros((ROWS, COLUMNS))
    for i, (row, _, start, n) in enumerate(LAYOUT):
        own = slice(start, start + n)
        advantages[row, own] = SIGNS[i % len(SIGNS)]
        if per_token:
            advantages[row, own] += rng.normal(0, 1, n)
        weight = rng.uniform(0.1, 1)
        for place in PLACES[i]:
            weights[place] = weight
    values = {"p": p, "old": old, "q": q, "reference": reference}
    cuts = np.cumsum([len(own) for own in PLACES])[:-1]
    parts = {name: np.split(array, cuts) for name, array in values.items()}
    responses = []
    for i, own in enumerate(PLACES):
        known = {name: arrays[i].tolist() for name, arrays in parts.items()}
        known["advantages"] = [advantages[place] for place in own]
        known["signed"] = SIGNS[i % len(SIGNS)]
        responses.append(types.SimpleNamespace(**known, places=own))
    integers, ids = np.zeros((ROWS, COLUMNS), int), np.zeros((ROWS, COLUMNS), int)
    for row, segment, start, n in LAYOUT:
        ids[row, start - 2 : start + n] = segment
    rollouts = PackedRows(integers, ids, integers, integers - 1, scatter(q, rubbish))
    scored = ScoredBatch(rollouts, scatter(old, rubbish), scatter(reference, rubbish))
    return TrainBatch(scored, advantages, weights), scatter(p, rubbish), responses


def gradient(algorithm, batch, logprobs):
    """Minus the gradient of the whole objective by the log-probs."""

    def total(x):
        return policy_objective(algorithm, batch, x, jnp.zeros_like(x))[0]

    with jax.enable_x64(True):
        return -np.asarray(jax.grad(total)(np.float64(logprobs)))


def spread_coefficients(loop, batch, responses):
    """The loop's coefficients times the weights, at their places."""
    expected = np.zeros((ROWS, COLUMNS))
    for response in responses:
        if response.places:
            for place, value in zip(response.places, loop(response), strict=True):
                expected[place] = value * batch.loss_weights[place]
    return expected


def changed(name, **changes):
    return dataclasses.replace(PRESETS[name](), **changes)


# Just inside and outside of every bound above, and far beyond what exp survives.
BOUNDS = [0.8, 1.2, 1 - 3e-4, 1 + 4e-4, math.exp(-0.4), math.exp(0.4), 5.0, 20.0, 0.5, 2.0, 0.9]
BOUNDS += [1 - 2e-3, 1 + 2.5e-3, 0.999, 1.001, 1e-4, 1.0]
EDGES = [math.log(b) + e for b in BOUNDS for e in (-1e-6, 1e-6)]
OF_DRIFTS = [math.log(b) + e for b in BOUNDS for e in (-3e-6, 3e-6)]  # sums are on no bound
EXTREMES = [-700.0, -25.0, -20.7, -19.5, -8.0, 8.0, 19.5, 20.7, 25.0, 700.0, 0.05]


def of_responses(values, seed=0):
    """One value on all tokens of a response, cycling through the values and the signs."""
    order = np.random.default_rng(seed).permutation(len(LAYOUT))
    return np.resize(values, len(LAYOUT))[order][OF_TOKEN]


def random_ratios(seed, scale):
    return np.random.default_rng(seed).normal(0, scale, COUNT)


CASES = {
    "near": (random_ratios(1, 5e-4), random_ratios(2, 2e-3)),
    "apart": (random_ratios(3, 0.3), random_ratios(4, 0.5)),
    "far": (random_ratios(5, 3.0), random_ratios(6, 3.0)),
    "edges": (of_responses(EDGES), of_responses(OF_DRIFTS, 1)),
    "edges of products": (of_responses(EDGES) / SIZES, of_responses(OF_DRIFTS, 1) / SIZES),
    "extremes": (np.resize(EXTREMES, COUNT), np.resize(EXTREMES[::-1], COUNT)),
    "whole extremes": (of_responses(EXTREMES), of_responses(EXTREMES, 1)),
}


@functools.lru_cache
def case(name, of_sampler=False, **options):
    log_ratios, drifts = CASES[name]
    return make_case(log_ratios, 0 * drifts if of_sampler else drifts, **options)
