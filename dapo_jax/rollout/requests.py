"""What a rollout is asked for: groups, each by requests whose responses begin with the same tokens.

A response that an earlier step has begun is a request of its own: its prompt is the problem's with
what was drawn, and its key that of the step which began it, so that the same draws follow.
"""

import collections
import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from dapo_jax.model.caches import Prefix
from dapo_jax.structs import Carried, Completion, Prompt

SMALLEST_PROMPT_BUCKET = 16
COARSE = 4  # between padded lengths of responses that go on, which have many


@dataclasses.dataclass(eq=False)
class PendingGroup:
    """A group on its way, and those of its responses that are finished."""

    prompt: Prompt
    samples: Sequence[int]
    whole: bool  # all samples are handed back together
    step: int  # keys its draws
    finished: dict[int, Completion] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(eq=False)
class PendingResponses:
    """Responses of a group that begin with the same tokens; `waiting` are those without a slot."""

    asked: PendingGroup
    waiting: collections.deque[int]
    number: int  # names what its responses share in the cache
    padded: np.ndarray
    begun: Completion | None = None  # the only one of them, as far as it was drawn
    prefilled: tuple[Prefix, int] | None = None  # with other prompts; its row there

    @property
    def drawn(self) -> int:
        """Tokens that its response has before it starts here."""
        return len(self.begun) if self.begun else 0

    @property
    def length(self) -> int:
        """Tokens to prefill."""
        return len(self.asked.prompt.tokens) + self.drawn


def pad_prompt(tokens: np.ndarray, limit: int, pad_id: int, factor: int = 2) -> np.ndarray:
    """Right-padded to 16 times a power of `factor` (or to `limit`), so that few lengths compile."""
    length = SMALLEST_PROMPT_BUCKET
    while length < len(tokens):
        length *= factor
    padded = np.full(max(len(tokens), min(length, limit)), pad_id, np.int32)
    padded[: len(tokens)] = tokens
    return padded


def split_group(
    asked: PendingGroup, carried: Carried | None
) -> Iterator[tuple[Completion | None, list]]:
    """The requests of a group: (what the response has so far, numbers of the responses)."""
    begun = {one.sample: one for one in carried.begun} if carried else {}
    for sample, one in begun.items():
        yield one, [sample]
    rest = [one for one in asked.samples if one not in begun and one not in asked.finished]
    if rest:
        yield None, rest


def completion_of(
    request: PendingResponses,
    sample: int,
    tokens: np.ndarray,
    logprobs: np.ndarray,
    policy_step: int,
    **known: Any,
) -> Completion:
    """A response with what it had before it started here.

    Args:
        tokens, logprobs: of the whole response; what stands where it was not drawn here is ignored.
        known: the other fields.
    """
    before = request.begun
    fields: dict[str, Any] = {"truncated": False, "text": ""} | known
    if before:
        tokens = np.concatenate([before.tokens, tokens[len(before) :]])
        logprobs = np.concatenate([before.sampler_logprobs, logprobs[len(before) :]])
        if len(tokens) == len(before):
            return before
        fields["earlier"] = before.drawn_by
    return Completion(tokens, logprobs, policy_step=policy_step, sample=sample, **fields)


def carry_groups(parts: Iterable[tuple[PendingGroup, Completion | None]]) -> list[Carried]:
    """The groups of those unfinished responses, in data order; None: of one nothing was drawn."""
    begun: dict[PendingGroup, list[Completion]] = {}
    for asked, one in parts:
        begun.setdefault(asked, []).extend([one] if one else [])
    groups = [
        Carried(
            asked.prompt,
            asked.step,
            tuple(asked.finished[sample] for sample in sorted(asked.finished)),
            tuple(sorted(found, key=lambda one: one.sample)),
        )
        for asked, found in begun.items()
    ]
    return sorted(groups, key=lambda group: group.prompt.index)
