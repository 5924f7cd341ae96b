"""Policy terms of the newer methods as loops, written from their papers.

Every loop gives a response's coefficients: minus the derivative of the paper's loss by each
token's log-prob, without the weight that the aggregate gives the response.
"""

import dataclasses
import functools
import math
import types

import jax
import jax.numpy as jnp
import numpy as np

from dapo_jax.config.algorithms import PRESETS
from dapo_jax.learner.batches import PackedRows, ScoredBatch, TrainBatch
from dapo_jax.learner.policy import policy_objective


def cut(x, low, high):
    return min(max(x, low), high)


def bounded_exp(x):
    return math.exp(cut(x, -20, 20))


def plain(x):
    """The ratio of a log-ratio, as a weight that nothing bounds: none beyond 20 nats."""
    return math.exp(x) if abs(x) < 20 else 0.0


def differences(left, right):
    return [a - b for a, b in zip(left, right, strict=True)]


def log_ratios(response):
    return differences(response.p, response.old)


def mean(numbers):
    return math.fsum(numbers) / len(numbers)


def pushes_out(advantage, x, low, high):
    """The clipped side of PPO's min(x A, clip(x, low, high) A)."""
    return (advantage > 0 and x > high) or (advantage < 0 and x < low)


def loop_ppo(response):
    result = []
    for a, x in zip(response.advantages, log_ratios(response), strict=True):
        keep = not pushes_out(a, bounded_exp(x), 0.8, 1.2)
        result.append(a * plain(x) if keep else 0.0)
    return result


def loop_cispo(response, cap=5.0):
    """2506.13585, equation 4: sg(min(r, cap)) A log p."""
    pairs = zip(response.advantages, log_ratios(response), strict=True)
    return [a * min(bounded_exp(x), cap) for a, x in pairs]


def total_variation(p, q):
    return abs(p - q)


def binary_kl(p, q):
    """KL(q || p) of the sampled token against all others together."""
    parts = [(q, p), (1 - q, 1 - p)]
    return math.fsum(
        0.0 if a == 0 else math.inf if b == 0 else a * math.log(a / b) for a, b in parts
    )


def loop_dppo(response, divergence, delta, cap=20.0, towards_sampler=0.0, both=False):
    """2602.04879, equation 12: a truncated ratio to the sampler where the policy is near it.

    `towards_sampler` is the factor of prime-rl's log^2(p / q); `both`: what is far has no gradient,
    as in prime-rl's IPO, even on its way back.
    """
    result = []
    for a, p, q in zip(response.advantages, response.p, response.old, strict=True):
        far = divergence(math.exp(p), math.exp(q)) > delta
        outwards = (a > 0 and p > q) or (a < 0 and p < q)
        coefficient = 0.0 if far and (both or outwards) else a * min(bounded_exp(p - q), cap)
        result.append(coefficient - towards_sampler * 2 * (p - q))
    return result


def loop_sapo(response, positive=1.0, negative=1.05):
    """2511.20347, equation 6: the gate (4 / tau) sigmoid(tau (r - 1)), differentiated."""
    result = []
    for a, x in zip(response.advantages, log_ratios(response), strict=True):
        tau, r = positive if a > 0 else negative, bounded_exp(x)
        gate = 1 / (1 + math.exp(-cut(tau * (r - 1), -700, 700)))
        result.append(a * 4 * gate * (1 - gate) * r)
    return result


def loop_gmpo(response, low=0.4, high=0.4):
    """2507.20673, equation 4: A times the geometric mean of the clipped ratios, differentiated.

    Without the mean's 1 / n, which the aggregate gives.
    """
    a, kept, clipped = response.signed, [], []
    for x in log_ratios(response):
        kept.append(not pushes_out(a, x, -low, high))
        clipped.append(cut(x, -20, 20) if kept[-1] else cut(x, -low, high))
    return [a * plain(mean(clipped)) if keep else 0.0 for keep in kept]


def loop_gspo(response, low=3e-4, high=4e-4):
    """2507.18071, equations 5 and 13: the clip reads each token's advantage."""
    x = mean(log_ratios(response))
    return [
        0.0 if pushes_out(a, bounded_exp(x), 1 - low, 1 + high) else a * plain(x)
        for a in response.advantages
    ]


def loop_vespo(response):
    """2602.10693: w^c1 exp(c2 (1 - w)) of the whole response's ratio, by the sign of A."""
    power, decay = (2.0, 3.0) if response.signed > 0 else (3.0, 2.0)
    w = bounded_exp(math.fsum(log_ratios(response)))
    weight = w**power * math.exp(decay * (1 - w))
    return [a * weight for a in response.advantages]


def loop_topr(response):
    """2503.14286, equation 8: [w] from 0 to 1 on what is wrong, 1 on what is right."""
    w = bounded_exp(math.fsum(log_ratios(response)))
    return [a if a > 0 else a * min(w, 1.0) for a in response.advantages]


def loop_dro(response, beta=0.1):
    """2405.19107, equation 5, token by token: A log p - beta / 2 log^2 r."""
    pairs = zip(response.advantages, log_ratios(response), strict=True)
    return [a - beta * x for a, x in pairs]


def loop_fipo(response, discount=0.98, clip=0.2):
    """2603.19835: A times the clipped exponential of the discounted log-ratios from here on."""
    result, xs = [], log_ratios(response)
    columns = [column for _, column in response.places]
    for i, (a, x) in enumerate(zip(response.advantages, xs, strict=True)):
        pairs = list(zip(columns, xs, strict=True))[i:]
        future = math.fsum(discount ** (k - columns[i]) * later for k, later in pairs)
        a *= cut(bounded_exp(future), 1 - clip, 1 + clip)
        ratio = bounded_exp(x)
        clipped = pushes_out(a, ratio, 0.8, 1.28) or (a < 0 and ratio > 10)
        result.append(0.0 if clipped else a * plain(x))
    return result


def loop_dft(response):
    """2508.05629, equation 9: the token's loss times its own probability, a constant."""
    pairs = zip(response.advantages, response.p, strict=True)
    return [a * math.exp(p) for a, p in pairs]


def drifts_of(response):
    return differences(response.old, response.q)


def pool_ratios(pool, xs):
    """The ratio that is bounded, on each token of a response."""
    ratios = [bounded_exp(x) for x in xs]
    if pool in ("token", "worst"):
        return ratios
    if pool == "least":
        return [min(ratios)] * len(xs)
    return [bounded_exp(mean(xs) if pool == "sequence" else math.fsum(xs))] * len(xs)


def loop_corrected(response, pool, weight):
    """PPO's coefficients times a weight of the ratio of the old policy to the sampler."""
    ratios = pool_ratios(pool, drifts_of(response))
    return [c * weight(r) for c, r in zip(loop_ppo(response), ratios, strict=True)]


def loop_deepseek(response, low=0.9, beta=0.04):
    """2512.02556, equations 7 to 9: the mask is on the policy term, the KL keeps its token."""
    gap = mean(differences(response.q, response.p))
    result, xs = [], log_ratios(response)
    for i, coefficient in enumerate(loop_ppo(response)):
        masked = response.advantages[i] < 0 and gap > -math.log(low)
        toward = plain(xs[i]) * (response.p[i] - response.reference[i])
        result.append((0.0 if masked else coefficient) - beta * toward)
    return result


def dppo(divergence, delta, **options):
    return functools.partial(loop_dppo, divergence=divergence, delta=delta, **options)


def corrected(pool, weight):
    return functools.partial(loop_corrected, pool=pool, weight=weight)


LOOPS = {
    "cispo": loop_cispo,
    "dppo_tv": dppo(total_variation, 0.15),
    "dppo_kl": dppo(binary_kl, 0.05),
    "prime_rl": dppo(total_variation, 0.2, towards_sampler=1e-3),
    "ipo": dppo(total_variation, 0.1, towards_sampler=1e-3, both=True),
    "sapo": loop_sapo,
    "gmpo": loop_gmpo,
    "luspo": functools.partial(loop_gspo, low=2e-3, high=2.5e-3),
    "gspo": loop_gspo,
    "gspo_token": loop_gspo,
    "vespo": loop_vespo,
    "topr": loop_topr,
    "dro": loop_dro,
    "gpg": lambda response: response.advantages,
    "maxrl": lambda response: response.advantages,
    "lite_ppo": loop_ppo,
    "tis": corrected("token", lambda r: min(r, 2.0)),
    "sequence_tis": corrected("product", lambda r: min(r, 2.0)),
    # 2510.18855, equation 3: M(rho) = rho inside the bounds, else 0.
    "icepop": corrected("token", lambda r: r if 0.5 <= r <= 5.0 else 0.0),
    "sequence_mis": corrected("sequence", lambda r: float(0.999 <= r <= 1.001)),
    "worst_token_mis": corrected("least", lambda r: float(r >= 1e-4)),
    "deepseek_v3p2": loop_deepseek,
    "fipo": loop_fipo,
    "dft": loop_dft,
    # 2510.01161, equation 5, of the tokens that are not masked: A times the ratio to the sampler.
    "m2po": lambda response: [
        a * plain(x) * bounded_exp(y)
        for a, x, y in zip(
            response.advantages, log_ratios(response), drifts_of(response), strict=True
        )
    ],
}
OF_SAMPLER = ("dppo_tv", "dppo_kl", "prime_rl", "ipo")  # their old log-probs are the sampler's


def assert_gradient_is_the_loop(name, kind, **options):
    """Returns how many tokens have a gradient."""
    batch, logprobs, responses = case(kind, name in OF_SAMPLER, **options)
    expected = spread_coefficients(LOOPS[name], batch, responses)
    actual = gradient(PRESETS[name](), batch, logprobs)
    np.testing.assert_allclose(actual, expected, **EXACT, err_msg=kind)
    assert not actual[batch.loss_weights == 0].any()
    return np.count_nonzero(expected)


# --- cases ---------------------------------------------------------------------------------------

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
    scores = {"reference": scatter(reference, rubbish)}
    scored = ScoredBatch(rollouts, scatter(old, rubbish), scores)
    return TrainBatch(scored, advantages, weights), scatter(p, rubbish), responses


PROGRAMS = {}


def gradient(algorithm, batch, logprobs):
    """Minus the gradient of the whole objective by the log-probs."""

    def total(x, batch):
        return policy_objective(algorithm, batch, x, jnp.zeros_like(x))[0]

    program = PROGRAMS.setdefault(repr(algorithm), jax.jit(jax.grad(total)))
    with jax.enable_x64(True):
        return -np.asarray(program(np.float64(logprobs), batch))


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
KINDS = tuple(CASES)


@functools.lru_cache
def case(name, of_sampler=False, **options):
    log_ratios, drifts = CASES[name]
    return make_case(log_ratios, 0 * drifts if of_sampler else drifts, **options)
