"""Engine of a server: every response has a sampling rule of its own, and perhaps a seed.

Training draws all responses by one rule, which its programs know; here rules are data beside the
keys, so that one program serves all of them.
"""

from typing import Any, NamedTuple, cast

import jax
import numpy as np

from dapo_jax.model.caches import DecodeState, Prefix
from dapo_jax.rollout.engine import PolicyEngine
from dapo_jax.rollout.jetstream_api import ResultTokens
from dapo_jax.rollout.sampling import SAMPLE_BY_SEED, repeat_rule, sample_key
from dapo_jax.structs import SamplingRule


class Draws(NamedTuple):
    """Sampling rule and key of a response.

    Attributes:
        seed: from 0 to 2^64 - 1; the same one, prompt and rule give the same response. None: the
            engine's seed and the order of arrival.
        number: of the response, among those to one seed.
    """

    rule: SamplingRule
    seed: int | None = None
    number: int = 0

    def key(self) -> jax.Array | None:
        """Key of the response; None: the engine makes one."""
        if self.seed is None:
            return None
        high, low = divmod(self.seed, 2**32)
        return sample_key(low, SAMPLE_BY_SEED, np.uint32(high), self.number)


class DrawnPrompt(NamedTuple):
    """Prompt with its `Draws`, handed through JetStream as if it were the tokens."""

    tokens: jax.Array | np.ndarray
    draws: Draws


class ServedEngine(PolicyEngine):
    """Engine of a server: every response has its own sampling rule.

    Attributes:
        rule: of prompts that come without one.
        longest_prompt: most tokens of a prompt; padded, it may be longer.
        context: most tokens of a prompt and its response together.
        fullest: most tokens that a slot has in its cache now.
    """

    RULE_PER_SLOT = True
    rule = SamplingRule()
    longest_prompt: int
    context: int
    fullest = 0

    def generate(
        self,
        params: Any,
        decode_state: DecodeState,
        *,
        rule: SamplingRule = SamplingRule(),  # noqa: B008
        longest: int | None = None,
    ) -> tuple[DecodeState, ResultTokens]:
        """`generate` of `PolicyEngine`; JetStream does not say how full slots are: `fullest` does.

        A slot that is free may run past the cache: what it would write there is dropped.
        """
        longest = None if self.pages else self.fullest
        return super().generate(params, decode_state, rule=rule, longest=longest)

    def shrink(self, state: DecodeState) -> DecodeState:
        """State with caches as short as at the beginning; for one without a taken slot."""
        first = self.layout.window(1)
        grown = not self.pages and self.layout.longest(cast(Any, state.caches)) > first
        return self.init_decode_state() if grown else state

    def prefill(self, *, padded_tokens: Any, **options: Any) -> Prefix:
        """Prefill of `PolicyEngine`; a `DrawnPrompt` brings a rule and a key."""
        draws = Draws(self.rule)
        if isinstance(padded_tokens, DrawnPrompt):
            padded_tokens, draws = padded_tokens
            options["key"] = draws.key()
        prefix = super().prefill(padded_tokens=padded_tokens, **options)
        return prefix.replace(rules=repeat_rule(draws.rule, len(prefix.true_length)))
