"""The engine where every response has a rule of its own, and perhaps a seed: that of a server.

Training draws all responses by one rule, which its programs know; here rules are data beside the
keys, so that one program serves all of them.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dapo_jax.model.caches import DecodeState, Prefix
from dapo_jax.rollout.engine import PolicyEngine
from dapo_jax.rollout.sampling import SAMPLE_BY_SEED, SamplingRule, SamplingRules, sample_key

SMALLEST_TOP_P = 1e-6  # below, float32 could leave no token at all; the likeliest one is kept


class Draws(NamedTuple):
    """How a response is drawn.

    Attributes:
        seed: from 0 to 2^64 - 1; the same one, prompt and rule give the same response. None: the
            engine's seed and the order of arrival.
        number: of the response, among those to one seed.
    """

    rule: SamplingRule
    seed: int | None = None
    number: int = 0

    def key(self) -> jax.Array | None:
        """The key of the response; None: the engine makes one."""
        if self.seed is None:
            return None
        high, low = divmod(self.seed, 2**32)
        return sample_key(low, SAMPLE_BY_SEED, np.uint32(high), self.number)


class DrawnPrompt(NamedTuple):
    """A prompt with what belongs to it, handed through JetStream as if it were the tokens."""

    tokens: jax.Array | np.ndarray
    draws: Draws


def rules_of(rule: SamplingRule, count: int) -> SamplingRules:
    """That rule `count` times."""
    return SamplingRules(
        temperature=jnp.full(count, rule.temperature, jnp.float32),
        top_p=jnp.full(count, max(rule.top_p, SMALLEST_TOP_P), jnp.float32),
        top_k=jnp.full(count, rule.top_k, jnp.int32),
    )


class ServedEngine(PolicyEngine):
    """Attributes:
    rule: of prompts that come without one.
    """

    def prefill(self, *, padded_tokens: Any, **options: Any) -> Prefix:
        """As of `PolicyEngine`; a `DrawnPrompt` says its rule and key."""
        draws = Draws(self.rule)
        if isinstance(padded_tokens, DrawnPrompt):
            padded_tokens, draws = padded_tokens
            options["key"] = draws.key()
        prefix = super().prefill(padded_tokens=padded_tokens, **options)
        return prefix.replace(rules=rules_of(draws.rule, len(prefix.true_length)))

    def _empty_fn(self, *, window: int) -> DecodeState:
        return super()._empty_fn(window=window).replace(rules=rules_of(self.rule, self._slots))
