"""Requests in the scheduler: responses that wait or resume, trajectories.

A response that an earlier step started is pending on its own. Its prompt is the problem's prompt
followed by the known tokens, and its key is the key of the step that started it, so that sampling
continues with the same random numbers.

The reply to a trajectory is requested when a turn ends and placed a fixed number of bursts later;
decoding waits for a reply that takes longer. So every decision depends on burst counts, never on
the clock.
"""

import collections
import dataclasses
import time
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from dapo_jax.data.prompts.tokenizer import TextStream, Tokenizer
from dapo_jax.model.caches import Prefix
from dapo_jax.types.structs import Completion, NewTokens, PartialGroup, Request, Turn, TurnCounts

MIN_BUCKET_TOKENS = 16
RESUMED_BUCKET_FACTOR = 4  # resumed responses have many lengths: use fewer, larger buckets


class SlotOutput(NamedTuple):
    """Arrays of one decode slot; entries past the end of the response are undefined."""

    tokens: np.ndarray  # [C] int32
    logprobs: np.ndarray  # [C] float32
    routes: np.ndarray | None  # [T, L, k] of prompt and response, if the engine records them
    supports: np.ndarray | None = None  # [C, 2], if training truncates


class Reader:
    """Text of a response as its tokens arrive; finds its end tokens and stop texts."""

    def __init__(self, tokenizer: Tokenizer, request: Request, end_ids: Sequence[int]):
        self._stops = request.stop.texts
        special = any(name in text for name in tokenizer.special.values() for text in self._stops)
        self._stream = TextStream(tokenizer, request.prompt.tokens.tolist(), special)
        self._ids = {*end_ids, *request.stop.ids}
        self._watch = request.watch
        self._held = ""  # text that may be the start of a stop
        self.seen = 0  # tokens
        self.stopped = False

    def read(self, sample: int, ids: list[int], last: bool) -> bool:
        """Read new tokens up to a stop, and show them; `last` ones end the response otherwise."""
        text, stop = self._held, None
        for count, token in enumerate(ids, 1):
            self.seen += 1
            self.stopped = token in self._ids
            text += "" if self.stopped else self._stream.add([token])
            stop = self._find(text)
            if self.stopped or stop is not None:
                del ids[count:]
                break
        if stop is None and (last or self.stopped):
            text += self._stream.rest()
            stop = self._find(text)
        self.stopped |= stop is not None
        last |= self.stopped
        starts = [n for stop in self._stops for n in range(1, len(stop)) if text.endswith(stop[:n])]
        size = len(text) - (0 if last else max(starts, default=0)) if stop is None else stop
        self._held = text[size:]
        if self._watch:
            self._watch(NewTokens(sample, ids, text[:size], last, self.stopped))
        return self.stopped

    def _find(self, text: str) -> int | None:
        """Return the start of the first stop text."""
        places = [place for stop in self._stops if (place := text.find(stop)) >= 0]
        return min(places, default=None)


@dataclasses.dataclass(eq=False)
class PendingResponses:
    """Responses of a request that start with the same tokens."""

    group: Request  # of responses to one prompt; a `Group` only once they are scored
    waiting: collections.deque[int]  # sample numbers of the responses that have no slot yet
    prefix_id: int  # names the cache entries that these responses share
    padded: np.ndarray  # tokens to prefill, padded on the right
    resumed: Completion | None = None  # the response so far, if this is one response that resumes
    fed: int = 0  # number of its last tokens that decode steps are fed because prefill lacks them
    prefilled: tuple[Prefix, int] | None = None  # prefilled prompts, and the row of this one
    # By sample; they last until the response ends, also if it is sampled a second time.
    readers: dict[int, Reader] = dataclasses.field(default_factory=dict)

    @property
    def known_tokens(self) -> int:
        """Number of response tokens known before it starts here, observations included."""
        return len(self.resumed.tokens) if self.resumed else 0

    @property
    def prefilled_response_tokens(self) -> int:
        """Number of response tokens in the prefill."""
        return self.known_tokens - self.fed

    @property
    def length(self) -> int:
        """Number of tokens to prefill, of prompt and response."""
        return len(self.group.prompt.tokens) + self.prefilled_response_tokens

    def extended(self, resumed: Completion, prefix_id: int) -> "PendingResponses":
        """Return the same response further on; decode steps are fed its new tokens."""
        return dataclasses.replace(
            self,
            waiting=collections.deque([resumed.sample]),
            prefix_id=prefix_id,
            resumed=resumed,
            fed=len(resumed.tokens) - self.prefilled_response_tokens,
            prefilled=None,
        )


def pad_prompt(tokens: np.ndarray, limit: int, pad_id: int, factor: int = 2) -> np.ndarray:
    """Pad on the right to 16 times a power of `factor` (or to `limit`): few lengths compile."""
    length = MIN_BUCKET_TOKENS
    while length < len(tokens):
        length *= factor
    padded = np.full(max(len(tokens), min(length, limit)), pad_id, np.int32)
    padded[: len(tokens)] = tokens
    return padded


def make_completion(
    pending: PendingResponses, sample: int, output: SlotOutput, length: int, **fields: Any
) -> Completion:
    """Join the output of a slot with the tokens that were known before."""
    before = pending.resumed
    fields = {"truncated": False, "text": "", "sample": sample} | fields
    if output.routes is not None:  # the last token was not fed
        routes = output.routes[: len(pending.group.prompt.tokens) + length - 1].copy()
        if before and before.routes is not None:
            routes[: len(before.routes)] = before.routes
        fields["routes"] = routes
    tokens = output.tokens[:length]
    logprobs = output.logprobs[:length]
    if output.supports is not None:
        fields["supports"] = output.supports[:length].copy()
    if before is None:
        return Completion(tokens, logprobs, **fields)
    known = len(before.tokens)
    if length <= known:
        return before
    if before.supports is not None and output.supports is not None:
        fields["supports"][:known] = before.supports
    turns = before.turns
    if turns and turns[-1].is_sampled:
        turns = (*turns[:-1], Turn(True, turns[-1].tokens + length - known, ""))
    elif turns:  # the first turn after an observation
        turns = (*turns, Turn(True, length - known, ""))
    same_policy = before.policy_step == fields["policy_step"]
    return Completion(
        np.concatenate([before.tokens, tokens[known:]]),
        np.concatenate([before.sampler_logprobs, logprobs[known:]]),
        earlier=before.earlier if same_policy else before.sampled_by,
        rewards=before.rewards,
        failures=before.failures,
        turns=turns,
        **fields,
    )


def carry_groups(parts: Iterable[tuple[Request, Completion | None]]) -> list[PartialGroup]:
    """Return the groups to carry over, in data order."""
    partial: dict[Request, list[Completion]] = {}
    for group, response in parts:
        partial.setdefault(group, []).extend([response] if response else [])
    carried = [
        PartialGroup(
            group.prompt,
            group.step,
            tuple(group.finished[sample] for sample in sorted(group.finished)),
            tuple(sorted(responses, key=lambda response: response.sample)),
        )
        for group, responses in partial.items()
    ]
    return sorted(carried, key=lambda group: group.prompt.index)


@dataclasses.dataclass
class Trajectory:
    """Trajectory that waits for the reply of its environment, or that has received it."""

    burst: int  # its turn ended after this burst
    group: Request
    completion: Completion
    request: Any
    pending: PendingResponses | None = None  # what its slot resumes; None: it keeps no slot
    slot: int | None = None  # that it keeps between turns, until its cache pages are taken
    continues: bool = False  # whether another turn follows the reply


class Trajectories:
    """Trajectories that wait for their environments, ordered by the end of their turns."""

    def __init__(self, environments: Any, max_tokens: int, key: Sequence[int] = ()):
        self.counts = TurnCounts()
        self._environments = environments
        self._max_tokens = max_tokens
        self._key = key
        self._awaiting: collections.deque[Trajectory] = collections.deque()

    def __len__(self) -> int:
        return len(self._awaiting)

    @property
    def sampled_limit(self) -> int:
        """Maximum number of tokens that a trajectory samples."""
        limit = self._environments.settings.max_sampled_tokens if self._environments else 0
        return min(limit or self._max_tokens, self._max_tokens)

    @property
    def held_slots(self) -> list[int]:
        """Slots that trajectories keep, the oldest first."""
        return [waiting.slot for waiting in self._awaiting if waiting.slot is not None]

    def evict(self, slots: Sequence[int]) -> None:
        """Take slots away; their trajectories will be prefilled and fed again."""
        for waiting in self._awaiting:
            if waiting.slot in slots:
                waiting.slot = None

    def unfinished(self) -> list[tuple[Request, Completion]]:
        """Return all trajectories as far as they were sampled."""
        return [(waiting.group, waiting.completion) for waiting in self._awaiting]

    def cancel(self, group: Request) -> list[int]:
        """Forget the trajectories of a request; return the slots that they held."""
        cancelled = [waiting for waiting in self._awaiting if waiting.group is group]
        self._awaiting = collections.deque(w for w in self._awaiting if w.group is not group)
        return [waiting.slot for waiting in cancelled if waiting.slot is not None]

    def clear(self) -> None:
        self._awaiting.clear()

    def request(self, group: Request, completion: Completion, burst: int, **kept: Any) -> bool:
        """Request the reply to a turn; return False if the response ends here.

        Args:
            kept: fields `pending` and `slot` of a trajectory that keeps its slot.
        """
        if self._environments is None or completion.truncated:
            return False
        prompt = group.prompt
        key = [*self._key, group.step, prompt.index, completion.sample]
        seed = int(np.random.SeedSequence(key).generate_state(1)[0])
        texts = [turn.text for turn in completion.turns if turn.is_sampled] or [completion.text]
        request = self._environments.submit(prompt, seed, texts, completion.failures)
        self.counts.turns += 1
        self._awaiting.append(Trajectory(burst, group, completion, request, **kept))
        return True

    def due(self, burst: int, idle: bool) -> list[Trajectory]:
        """Return the trajectories to place after a burst, with their replies.

        If nothing else can be decoded (`idle`), wait for the next replies now.
        """
        if self._environments is None or not self._awaiting:
            return []
        last = burst - self._environments.settings.wait_bursts
        if idle:
            last = max(last, self._awaiting[0].burst)
        due = []
        while self._awaiting and self._awaiting[0].burst <= last:
            due.append(self._awaiting.popleft())
        start = time.perf_counter()
        replies = self._environments.steps([waiting.request for waiting in due]) if due else []
        self.counts.wait_seconds += time.perf_counter() - start
        for waiting, reply in zip(due, replies, strict=True):
            self._append(waiting, reply)
        return due

    def _append(self, waiting: Trajectory, reply: Any) -> None:
        """Append the reply, such as a `sessions.TokenizedReply`, unless the trajectory ends."""
        counts = self.counts
        counts.failed_steps += bool(reply.failure)
        counts.late_steps += reply.late
        counts.cut_observations += reply.cut
        completion = dataclasses.replace(
            waiting.completion,
            rewards=(*waiting.completion.rewards, reply.reward),
            failures=(*waiting.completion.failures, reply.failure),
            lost_environment=reply.lost,
        )
        turns = completion.turns or (Turn(True, len(completion.tokens), completion.text),)
        if not reply.tokens:
            counts.ended_by_tokens += reply.cut
            waiting.completion = dataclasses.replace(completion, truncated=reply.cut)
            return
        by_turns = sum(turn.is_sampled for turn in turns) >= self._environments.settings.max_turns
        remaining = self._max_tokens - len(completion.tokens) - len(reply.tokens)
        by_tokens = remaining <= 0 or len(completion) >= self.sampled_limit
        if by_turns or by_tokens:
            counts.ended_by_turns += by_turns
            counts.ended_by_tokens += not by_turns
            waiting.completion = dataclasses.replace(completion, truncated=True)
            return
        counts.observation_tokens += len(reply.tokens)
        logprobs, supports = completion.sampler_logprobs, completion.supports
        if supports is not None:
            whole = np.full((len(reply.tokens), 2), (0, -np.inf), supports.dtype)
            supports = np.concatenate([supports, whole])
        waiting.continues = True
        waiting.completion = dataclasses.replace(
            completion,
            tokens=np.append(completion.tokens, np.asarray(reply.tokens, np.int32)),
            sampler_logprobs=np.append(logprobs, np.zeros(len(reply.tokens), logprobs.dtype)),
            turns=(*turns, Turn(False, len(reply.tokens), reply.text)),
            supports=supports,
        )
