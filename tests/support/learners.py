"""Small learners, minibatches of uneven responses, and comparisons of trees."""

import jax
import jax.numpy as jnp
import numpy as np
from conftest import TINY, make_prompt

from dapo_jax import algorithms
from dapo_jax.config.experiment import Compute, Optimizer
from dapo_jax.learner import minibatches
from dapo_jax.learner.advantages import Estimates, broadcast_to_tokens
from dapo_jax.learner.batches import ScoredBatch
from dapo_jax.learner.packing import Segment, pack
from dapo_jax.learner.policy import PolicySettings, policy_learner
from dapo_jax.learner.update import Learner
from dapo_jax.model.lm_head import Scale
from dapo_jax.model.logprobs import Rows, hidden_states, logprobs_of
from dapo_jax.runtime.kept_programs import keep
from dapo_jax.types.structs import Completion

RNG = np.random.default_rng(1)
BUDGET = 14


def make_segments(lengths, truncated=()) -> list[Segment]:
    segments = []
    for i, length in enumerate(lengths):
        prompt = make_prompt(i // 2, RNG.integers(2, 32, 2 + i % 4).tolist())  # pairs
        tokens = RNG.integers(2, 32, length).astype(np.int32)
        logprobs = RNG.normal(-3, 0.5, length).astype(np.float32)
        segments.append(Segment(prompt, Completion(tokens, logprobs, i in truncated, 0, ""), i))
    return segments


LENGTHS = [5, 1, 0, 14, 7, 9, 3, 12, 2, 6]
SEGMENTS = make_segments(LENGTHS, truncated={3})
ADVANTAGES = RNG.normal(size=len(LENGTHS))


def make_learner(mesh, algorithm=None, **optimizer) -> Learner:
    settings = Optimizer(learning_rate=1e-3, **optimizer)
    score = PolicySettings(algorithm or algorithms.dapo(), Compute())
    return keep(policy_learner, score, settings, TINY, mesh)


def make_batch(algorithm=None, rows=4, microbatches=4, segments=SEGMENTS, row_tokens=20):
    """The batch with the sampler's log-probs as old ones, and its used microbatches."""
    algorithm = algorithm or algorithms.dapo()
    rollouts, used = pack(segments, row_tokens, rows, microbatches)
    advantages = broadcast_to_tokens(ADVANTAGES[: len(segments)], rollouts.response_index)
    scored = ScoredBatch(rollouts, rollouts.sampler_logprobs)
    batch = minibatches.make_batch(scored, segments, Estimates(advantages), algorithm, BUDGET)
    return batch, used


def assert_close(left, right, tolerance):
    """Every array within `tolerance` of the other, relative to its largest entry."""

    def check(a, b):
        a, b = np.asarray(a), np.asarray(b)
        assert np.abs(a - b).max() <= tolerance * max(np.abs(b).max(), 1e-3)

    jax.tree.map(check, left, right)


def place(params, learner):
    return jax.device_put(params, learner.shardings.params)


def token_logprobs(params, config, rows: Rows, *, temperature=1.0, chunk_tokens=10**6):
    """Return log-probs and entropies of all tokens."""
    hidden, _ = hidden_states(params, config, rows)
    scale, needed = Scale(temperature, config.logit_cap), jnp.ones(rows.tokens.shape, bool)
    return logprobs_of(params, hidden, rows.tokens, needed, scale, chunk_tokens)


@jax.jit
def logprobs_alone(params, row, length):
    """Return log-probs of a response and its prompt in a row, padded to compile once."""
    place = jnp.arange(row.shape[0])[None]
    segment = (place < length).astype(jnp.int32)
    return token_logprobs(params, TINY, Rows(row[None], segment, place))[0][0]
