"""Host objects that pass between the stages of a step, with their shapes.

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
class Observation:
    """Reply of an environment to a turn.

    Attributes:
        text: shown to the policy before its next turn, as a message of `role` in a chat.
        messages: chat messages, each with role and content; they replace `text`.
        reward: reward of this step.
        done: whether the trajectory ends. It also ends on an empty observation.
        role: role of `text`.
        failure: error that the policy is shown, for the count of failed steps.
    """

    text: str = ""
    messages: Sequence[dict[str, Any]] = ()
    reward: float = 0.0
    done: bool = False
    role: str = "user"
    failure: str = ""


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


class SamplingRule(NamedTuple):
    """Temperature and truncation of draws; hashable, so that each rule compiles once."""

    temperature: float = 1.0  # 0 takes the likeliest token
    top_p: float = 1.0
    top_k: int = 0


@dataclasses.dataclass
class TurnCounts:
    """Counts of the trajectories of one rollout, and what ended or failed them."""

    turns: int = 0
    observation_tokens: int = 0
    prefilled_again_tokens: int = 0
    ended_by_turns: int = 0
    ended_by_tokens: int = 0
    cut_observations: int = 0
    failed_steps: int = 0
    late_steps: int = 0
    wait_seconds: float = 0.0

    def metrics(self) -> dict[str, float]:
        """Metrics of a step that are counts as they are."""
        values = dataclasses.asdict(self)
        seconds = {"seconds_environment": values.pop("wait_seconds")}
        return {f"environment_{name}": float(count) for name, count in values.items()} | seconds


@dataclasses.dataclass
class SamplerCounts:
    """Counts of one rollout. Occupancy is measured only while prompts were still waiting."""

    prefills: int = 0
    bursts: int = 0
    decode_steps: int = 0
    decode_seconds: float = 0.0  # that the host waited for bursts
    responses: int = 0
    tokens: int = 0
    abandoned_responses: int = 0
    abandoned_tokens: int = 0
    unfinished_tokens: int = 0  # of responses that the next step goes on with
    put_back_tokens: int = 0
    busy_slot_steps: int = 0
    slot_steps: int = 0
    turns: TurnCounts | None = None  # with an environment

    @property
    def drawn_tokens(self) -> int:
        """Tokens of all responses, also of those that were stopped or drawn again."""
        return self.tokens + self.abandoned_tokens + self.unfinished_tokens + self.put_back_tokens

    @property
    def occupancy(self) -> float:
        """Share of decode-slot steps that drew a token while the queue was not empty."""
        return self.busy_slot_steps / self.slot_steps if self.slot_steps else 1.0

    def metrics(self) -> dict[str, float]:
        """Metrics of a step that are counts as they are."""
        return {
            "abandoned_tokens": float(self.abandoned_tokens),
            "put_back_tokens": float(self.put_back_tokens),
            "decode_steps": float(self.decode_steps),
            "decode_bursts": float(self.bursts),
            "prefills": float(self.prefills),
            "slot_occupancy": self.occupancy,
            "seconds_decode": self.decode_seconds,
        } | (self.turns.metrics() if self.turns else {})
