"""Pending groups of the scheduler, and those of their responses that begin with the same tokens.

A response that an earlier step has begun is pending on its own: its prompt is the problem's with
what was drawn, and its key that of the step which began it, so that the same draws follow.
"""

import collections
import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from dapo_jax.model.caches import Prefix
from dapo_jax.structs import Completion, PartialGroup, Prompt, Turn

SMALLEST_PROMPT_BUCKET = 16
COARSE = 4  # between padded lengths of responses that go on, which have many


class Drawn(NamedTuple):
    """A slot's response; what stands after its end, or was not drawn there, means nothing."""

    tokens: np.ndarray  # [C] int32
    logprobs: np.ndarray  # [C] float32
    routes: np.ndarray | None  # [T, L, k] of prompt and response, where they are recorded


@dataclasses.dataclass(eq=False)
class PendingGroup:
    """Group of responses under way, and those of them that are finished."""

    prompt: Prompt
    samples: Sequence[int]
    whole: bool  # all samples are handed back together
    step: int  # keys its draws
    finished: dict[int, Completion] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(eq=False)
class PendingResponses:
    """Responses of a group that begin with the same tokens; `waiting` are those without a slot."""

    group: PendingGroup
    waiting: collections.deque[int]
    number: int  # names what its responses share in the cache
    padded: np.ndarray
    begun: Completion | None = None  # the only one of them, as far as it was drawn
    fed: int = 0  # last tokens of it that decode steps are fed, since prefill lacks them
    prefilled: tuple[Prefix, int] | None = None  # with other prompts; its row there

    @property
    def drawn(self) -> int:
        """Tokens that the response has before it starts here, observations included."""
        return len(self.begun.tokens) if self.begun else 0

    def most_tokens(self, drawn_limit: int) -> int:
        """Tokens, observations included, at which the trajectory has drawn as much as it may."""
        observed = self.drawn - len(self.begun) if self.begun else 0
        return observed + drawn_limit

    @property
    def ahead(self) -> int:
        """Tokens of the response to prefill."""
        return self.drawn - self.fed

    @property
    def length(self) -> int:
        """Tokens to prefill, of prompt and response."""
        return len(self.group.prompt.tokens) + self.ahead

    def going_on(self, begun: Completion, number: int) -> "PendingResponses":
        """The response further on; what is new of it is fed."""
        more = {"fed": len(begun.tokens) - self.ahead, "prefilled": None}
        waiting = collections.deque([begun.sample])
        return dataclasses.replace(self, waiting=waiting, number=number, begun=begun, **more)


def pad_prompt(tokens: np.ndarray, limit: int, pad_id: int, factor: int = 2) -> np.ndarray:
    """Right-padded to 16 times a power of `factor` (or to `limit`), so that few lengths compile."""
    length = SMALLEST_PROMPT_BUCKET
    while length < len(tokens):
        length *= factor
    padded = np.full(max(len(tokens), min(length, limit)), pad_id, np.int32)
    padded[: len(tokens)] = tokens
    return padded


def split_group(
    group: PendingGroup, carried: PartialGroup | None
) -> Iterator[tuple[Completion | None, list[int]]]:
    """Splits a group by its responses' first tokens: (the response so far, sample numbers)."""
    begun = {response.sample: response for response in carried.begun} if carried else {}
    for sample, response in begun.items():
        yield response, [sample]
    fresh = [i for i in group.samples if i not in begun and i not in group.finished]
    if fresh:
        yield None, fresh


def completion_of(
    pending: PendingResponses,
    sample: int,
    drawn: Drawn,
    length: int,
    policy_step: int,
    **known: Any,
) -> Completion:
    """Response with what it had before it started here.

    Args:
        length: tokens of the whole response.
        known: the other fields.
    """
    before, routes = pending.begun, drawn.routes
    tokens, logprobs = drawn.tokens[:length], drawn.logprobs[:length]
    fields: dict[str, Any] = {"truncated": False, "text": ""} | known
    if routes is not None:  # the last token was not fed
        routes = routes[: len(pending.group.prompt.tokens) + length - 1].copy()
        if before and before.routes is not None:
            routes[: len(before.routes)] = before.routes
        fields["routes"] = routes
    if before:
        held = len(before.tokens)
        tokens = np.concatenate([before.tokens, tokens[held:]])
        logprobs = np.concatenate([before.sampler_logprobs, logprobs[held:]])
        if len(tokens) == held:
            return before
        same = before.policy_step == policy_step
        fields["earlier"] = before.earlier if same else before.drawn_by
        for name in ("rewards", "failures"):
            fields[name] = getattr(before, name)
        if before.turns:
            *turns, last = before.turns
            new = len(tokens) - held
            more = [last, Turn(True, new, "")]
            more = [Turn(True, last.tokens + new, "")] if last.drawn else more
            fields["turns"] = (*turns, *more)
    return Completion(tokens, logprobs, policy_step=policy_step, sample=sample, **fields)


def carry_groups(parts: Iterable[tuple[PendingGroup, Completion | None]]) -> list[PartialGroup]:
    """Groups to carry over, in data order, from their unfinished responses.

    Args:
        parts: a response as far as it was drawn, or None where nothing was.
    """
    begun: dict[PendingGroup, list[Completion]] = {}
    for group, response in parts:
        begun.setdefault(group, []).extend([response] if response else [])
    carried = [
        PartialGroup(
            group.prompt,
            group.step,
            tuple(group.finished[sample] for sample in sorted(group.finished)),
            tuple(sorted(responses, key=lambda response: response.sample)),
        )
        for group, responses in begun.items()
    ]
    return sorted(carried, key=lambda group: group.prompt.index)
