"""Engine of the server: every response has a separate sampling rule and an optional seed.

Training compiles one rule into its programs. Here rules are data, like the random keys, so that
one program serves all requests.
"""

from typing import Any, NamedTuple, cast

import jax
import numpy as np

from dapo_jax.model.caches import DecodeState, Prefix
from dapo_jax.rollout.engine import PolicyEngine
from dapo_jax.rollout.sampling import SAMPLE_BY_SEED, repeat_rule, sample_key
from dapo_jax.structs import SamplingRule


class ResponseSampling(NamedTuple):
    """Sampling rule and random key of a response.

    Attributes:
        seed: from 0 to 2^64 - 1; the same seed, prompt and rule give the same response. None: the
            key depends on the engine's seed and the order of arrival.
        number: index of the response among those with this seed.
    """

    rule: SamplingRule
    seed: int | None = None
    number: int = 0

    def key(self) -> jax.Array | None:
        """Return the key of the response, or None if the engine makes it."""
        if self.seed is None:
            return None
        high, low = divmod(self.seed, 2**32)
        return sample_key(low, SAMPLE_BY_SEED, np.uint32(high), self.number)


class ServedEngine(PolicyEngine):
    """Engine with a sampling rule per slot; `rule` is the default.

    Attributes:
        longest_prompt: maximum tokens of a prompt, without padding.
        context: maximum tokens of a prompt and its response together.
    """

    RULE_PER_SLOT = True
    rule = SamplingRule()
    longest_prompt: int
    context: int

    def prefill(self, *, sampling: ResponseSampling | None = None, **options: Any) -> Prefix:
        """Prefill a prompt; `sampling` overrides the default rule and key."""
        if sampling and sampling.seed is not None:
            options["key"] = sampling.key()
        prefix = super().prefill(**options)
        rule = sampling.rule if sampling else self.rule
        return prefix.replace(rules=repeat_rule(rule, len(prefix.true_length)))

    def shrink(self, state: DecodeState) -> DecodeState:
        """Return a state without occupied slots, its caches as short as initially."""
        first = self.layout.window(1)
        has_grown = not self.pages and self.layout.longest(cast(Any, state.caches)) > first
        return self.init_decode_state() if has_grown else state
