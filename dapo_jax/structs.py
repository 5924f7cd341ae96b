"""The objects that pass between rooms, with their shapes.

Dimension letters, everywhere: N prompts, G samples per prompt, B = N*G responses, U optimizer
updates per rollout batch, M microbatches, R packed rows of a microbatch, T tokens of a row,
P prompt tokens, V vocabulary, L layers, D embed, H query heads, K key/value heads, E head
dimension, F mlp, S decode slots.

Alignment rule: entry t of a per-token array speaks of `tokens[..., t]`, and
`logprobs[..., t] = log p(tokens[t] | tokens[<t])`.
"""

import dataclasses
import functools
import math
import re
import unicodedata
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
from flax import struct
from jaxtyping import Array, Float, Int

MAX_SHOWN_CHARACTERS = 200  # characters
_BLANKS = re.compile(r"\s|\$|\\[()\[\]]")  # and the signs that only say where mathematics begins

Value = TypeVar("Value")


def present(value: Value | None, name: str) -> Value:
    """The value of an optional field that the algorithm at hand needs. Raises ValueError."""
    if value is None:
        raise ValueError(f"{name} is missing")
    return value


# --- host, ragged ---------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Problem:
    """A question with its answer, as its source has it; what a source lacks is empty."""

    id: str
    text: str
    answer: str
    source: str
    subject: str = ""
    level: str = ""
    solution: str = ""  # worked, as few-shot examples show it
    metadata: str = ""  # JSON, for a source that scores answers itself
    system: str = ""  # message of the problem's own
    turns: tuple[tuple[str, str], ...] = ()  # (role, text) of a conversation before it

    @property
    def fingerprint(self) -> str:
        """Key under which texts that differ only in case, blanks and dollar signs are equal."""
        text = "".join([*(said for _, said in self.turns), self.text])
        return _BLANKS.sub("", unicodedata.normalize("NFKC", text)).casefold()


@dataclasses.dataclass(frozen=True)
class Prompt:
    """A problem ready to be sampled. `index` is its position in the endless data order."""

    index: int
    id: str
    text: str
    tokens: np.ndarray  # [P] int32
    answer: str
    source: str
    subject: str = ""  # where the data says it
    level: str = ""
    problem: str = ""  # without the template
    metadata: str = ""  # the problem's
    truncated: bool = False  # its start was cut off
    skipped: int = 0  # places of the order passed over just before it


class Turn(NamedTuple):
    """Turn of a trajectory: drawn by the policy, or an observation from its environment."""

    drawn: bool
    tokens: int
    text: str


@dataclasses.dataclass(frozen=True)
class Completion:
    """A response, or the trajectory of a policy in an environment.

    An end token, where drawn, is trained on. Observations stand between the drawn tokens: they are
    context, and count in no length.
    """

    tokens: np.ndarray  # [n] int32, observations included
    sampler_logprobs: np.ndarray  # [n] float32, untruncated, temperature-scaled; 0 if observed
    truncated: bool  # the budget ran out before the end token
    policy_step: int
    text: str  # of the last turn that was drawn; empty until it is decoded
    sample: int = 0  # its place among the responses to the prompt, which keys its draws
    earlier: tuple[tuple[int, int], ...] = ()  # (policy step, tokens) of older policies, in order
    turns: tuple[Turn, ...] = ()  # none where nothing was observed
    rewards: tuple[float, ...] = ()  # from the environment, a step each
    failures: tuple[str, ...] = ()  # of the environment's steps
    routes: np.ndarray | None = None  # [m, L, k] experts of the first tokens, from the prompt on

    def __len__(self) -> int:
        """Drawn tokens."""
        return len(self.tokens) - sum(turn.tokens for turn in self.turns if not turn.drawn)

    @functools.cached_property
    def drawn(self) -> np.ndarray:
        """[n] bool, false on observations."""
        if not self.turns:
            return np.ones(len(self.tokens), bool)
        flags, counts = zip(*((turn.drawn, turn.tokens) for turn in self.turns), strict=True)
        return np.repeat(flags, counts)

    @property
    def drawn_tokens(self) -> np.ndarray:
        """Tokens without the observations."""
        return self.tokens[self.drawn]

    @property
    def last_turn(self) -> np.ndarray:
        """Tokens after the last observation."""
        observed = np.flatnonzero(~self.drawn)
        return self.tokens[observed[-1] + 1 :] if observed.size else self.tokens

    @property
    def drawn_by(self) -> tuple[tuple[int, int], ...]:
        """(policy step, tokens) of every policy that drew some of it, in order."""
        last = len(self) - sum(tokens for _, tokens in self.earlier)
        return (*self.earlier, (self.policy_step, last)) if last else self.earlier


def with_texts(
    completions: Sequence[Completion], decode_all: Callable[[list[list[int]]], list[str]]
) -> tuple[Completion, ...]:
    """Responses, each with the text of its last turn; those that have one keep it."""
    missing = [completion for completion in completions if not completion.text]
    texts = iter(decode_all([completion.last_turn.tolist() for completion in missing]))

    def with_text(completion: Completion) -> Completion:
        if completion.text:
            return completion
        text, turns = next(texts), completion.turns
        if turns and turns[-1].drawn:
            turns = (*turns[:-1], Turn(True, turns[-1].tokens, text))
        return dataclasses.replace(completion, text=text, turns=turns)

    return tuple(with_text(completion) for completion in completions)


class Interrupted(Exception):
    """Rollouts or an evaluation were asked to stop; nothing of what was under way is used."""


@dataclasses.dataclass(frozen=True)
class Verdict:
    """A reward worker's verdict on a response."""

    correct: bool
    extracted: str | None  # the answer that was found, None where there was none
    failure: str | None = None  # what kept the worker from finishing
    parts: dict[str, float] = dataclasses.field(default_factory=dict)  # unweighted, by name
    token_rewards: list[float] | None = None  # [n], weighted sum of the parts that reward tokens
    broken: str | None = None  # the reward part that raised or gave no number, and how
    decided: str = ""  # direct, algebra, remembered; or why there was nothing to decide


@dataclasses.dataclass(frozen=True)
class Group:
    """The G responses to one prompt with their verdicts and rewards; kept or dropped whole."""

    prompt: Prompt
    completions: tuple[Completion, ...]
    verdicts: tuple[Verdict, ...]
    reward_parts: dict[str, np.ndarray]  # each [G] float64, weighted, by name
    rewards: np.ndarray  # [G] float64, their sum
    raw_rewards: np.ndarray  # [G] float64, without the parts that only shape
    correct: np.ndarray  # [G] bool, by the verifier or by the raw reward

    @functools.cached_property
    def token_rewards(self) -> tuple[np.ndarray, ...] | None:
        """Rewards of single tokens, a part of `rewards`: [n] float64 each, weighted.

        None where no function gave any.
        """
        given = [verdict.token_rewards for verdict in self.verdicts]
        if all(own is None for own in given):
            return None
        pairs = zip(given, self.completions, strict=True)
        return tuple(np.zeros(len(c)) if own is None else np.array(own) for own, c in pairs)

    @functools.cached_property  # asked after every burst
    def broken(self) -> str | None:
        """Which reward part failed on which response; None where every reward is a number."""
        for i, verdict in enumerate(self.verdicts):
            if not math.isfinite(self.rewards[i]):
                cause = verdict.broken or verdict.failure or "the reward is not a finite number"
                tail = self.completions[i].text[-MAX_SHOWN_CHARACTERS:]
                return f"{cause}; prompt {self.prompt.id}, response {i}, which ends in {tail!r}"
        return None


@dataclasses.dataclass(frozen=True)
class PartialGroup:
    """A group that a step leaves to the next, begun or judged; without a token it is asked anew."""

    prompt: Prompt
    step: int  # that began it, which keys its draws
    finished: tuple[Completion, ...] = ()
    begun: tuple[Completion, ...] = ()  # as far as they were drawn
    judged: Group | None = None  # then it holds the responses

    @property
    def tokens(self) -> int:
        """Drawn so far."""
        judged = self.judged.completions if self.judged else ()
        return sum(map(len, (*self.finished, *self.begun, *judged)))


@dataclasses.dataclass(frozen=True)
class Trace:
    """Trace of a response through the updates of a step: its advantage, ratios and clips."""

    advantage: float  # mean over its tokens
    ratios: np.ndarray | None = None  # [n] as the last update saw them, where that was asked for
    clipped: np.ndarray | None = None  # [n] the bound that cut a token there: see learner.traces


# --- device, packed -------------------------------------------------------------------------


@dataclasses.dataclass
class CollectedGroups:
    """Rollout batch of a step: its groups in data order, and counts of what they cost."""

    groups: list[Group]  # the kept ones, at most prompts_per_step
    judged: list[Group]  # every group before next_position; with carry-over all but the surplus
    surplus: list[Group]  # judged and not used: those that finish fast, no fair sample
    with_signal: int  # how many of `judged` could teach
    broken: list[Group]  # those that a failing reward took out, wherever; in neither list
    asked_prompts: int
    kept_fraction: float  # the estimate for the next step
    next_position: int  # where the data goes on; surplus prompts are asked again
    dropped_prompts: int  # over the limit or held out, before next_position
    truncated_prompts: int  # cut to the limit, before next_position
    starved: bool
    carried: tuple[PartialGroup, ...] = ()  # what the next step begins with, in data order
    expired: int = 0  # groups of them that were too old, and are drawn anew
    reused: frozenset[int] = frozenset()  # places of groups that an earlier step judged
    # Of the responses of each group that was trained, by the group's place in the data.
    traces: dict[int, list[Trace]] = dataclasses.field(default_factory=dict)

    @property
    def all_right(self) -> int:
        return sum(bool(group.correct.all()) for group in self.judged)

    @property
    def all_wrong(self) -> int:
        return sum(not group.correct.any() for group in self.judged)


class PackedRows(struct.PyTreeNode):
    """Responses packed into rows of one length, before anything was computed on them.

    `segment_ids` is 0 on padding and counts from 1 inside a row; a segment is one prompt with
    one response and never crosses a row. `response_index` is the response's place in the rollout
    batch, -1 off the response. `routes` is None unless the algorithm replays them.
    """

    tokens: Int[Array, "*M R T"]
    segment_ids: Int[Array, "*M R T"]
    positions: Int[Array, "*M R T"]
    response_index: Int[Array, "*M R T"]
    sampler_logprobs: Float[Array, "*M R T"]
    routes: Int[Array, "*M R T L k"] | None = None  # experts to replay, -1 where not known


class ScoredBatch(struct.PyTreeNode):
    """Rollouts with the log-probs of the models that score them, and the values, before the update.

    `old_logprobs` is None where the policy is still the one that will be differentiated (a single
    update per rollout batch): the ratio is then exactly 1 and no score pass is needed. The others
    are None where the algorithm has no reference, no critic or no teacher of drawn tokens.
    """

    rollouts: PackedRows
    old_logprobs: Float[Array, "*M R T"] | None
    reference_logprobs: Float[Array, "*M R T"] | None = None
    values: Float[Array, "*M R T"] | None = None
    teacher_logprobs: Float[Array, "*M R T"] | None = None


class TrainBatch(struct.PyTreeNode):
    """Input of one optimizer update. Its loss is `sum(loss_weights * token_loss)`.

    The value loss and the negative log-prob of right responses have weights of their own; what an
    algorithm has not is None.
    """

    scored: ScoredBatch
    advantages: Float[Array, "*M R T"]
    loss_weights: Float[Array, "*M R T"]
    nll_weights: Float[Array, "*M R T"] | None = None
    returns: Float[Array, "*M R T"] | None = None
    value_weights: Float[Array, "*M R T"] | None = None


class TrainState(struct.PyTreeNode):
    """Parameters and optimizer state. `update_count` counts optimizer steps, not rollout steps."""

    params: Any
    opt_state: Any
    update_count: Int[Array, ""]


class Mean(struct.PyTreeNode):
    """A sum with its weight, so that means of parts add up to the mean of the whole."""

    total: Float[Array, ""]
    weight: Float[Array, ""]

    def __add__(self, other: "Mean") -> "Mean":
        return Mean(self.total + other.total, self.weight + other.weight)

    def value(self) -> float:
        """The mean; 0 where nothing was counted."""
        weight = float(self.weight)
        return float(self.total) / weight if weight else 0.0
