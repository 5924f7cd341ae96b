"""Host types that pass between the stages of a step, with their shapes.

Dimension letters: N prompts, G samples per prompt, B = N*G responses, U optimizer
updates per rollout batch, M microbatches, R packed rows of a microbatch, T tokens of a row,
P prompt tokens, V vocabulary, L layers, D embed, H query heads, K key/value heads, E head
dimension, F mlp, S decode slots.

Alignment: entry t of a per-token array belongs to `tokens[..., t]`, and
`logprobs[..., t] = log p(tokens[t] | tokens[<t])`.
"""

import collections
import dataclasses
import enum
import functools
import hashlib
import json
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy as np

MAX_SHOWN_CHARACTERS = 200
DIGEST_CHARACTERS = 16
ROUNDING = 1e-6  # relative: sums of rewards, float32 ones too, differ by less if they are equal
REPEATED_WINDOW_TOKENS = 8  # a power of two

Value = TypeVar("Value")


def mean_or_zero(values: Any) -> float:
    """Return the mean of the values, 0 if there are none."""
    values = np.asarray(values, float)
    return float(values.mean()) if values.size else 0.0


def present(value: Value | None, name: str) -> Value:
    """Return the value of an optional field; raises ValueError if it is None."""
    if value is None:
        raise ValueError(f"{name} is missing")
    return value


def reaches(value: Any, bound: Any, scale: Any) -> Any:
    """Return `value >= bound`, also if sums of numbers of the size `scale` round to below it."""
    return value >= bound - ROUNDING * (np.abs(bound) + scale)


def digest_json(value: Any) -> str:
    """Return a digest of a JSON value, in hexadecimal digits."""
    text = json.dumps(value, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:DIGEST_CHARACTERS]


def repetition(tokens: np.ndarray) -> float:
    """Return the fraction of the windows of 8 tokens that repeat an earlier one of the response."""
    if len(tokens) <= REPEATED_WINDOW_TOKENS:
        return 0.0
    # Equal windows get equal numbers, made from the numbers of their halves: ten times as fast as
    # sorting whole windows.
    numbers = np.asarray(tokens, np.uint64)
    distinct = ()
    half = 1
    while half < REPEATED_WINDOW_TOKENS:
        both = numbers[:-half] << np.uint64(32) | numbers[half:]
        distinct, numbers = np.unique(both, return_inverse=True)
        numbers = numbers.astype(np.uint64)
        half *= 2
    return 1.0 - len(distinct) / len(numbers)


# --- outcomes -------------------------------------------------------------------------------


class Outcome(enum.StrEnum):
    """Outcome of a reward. The failures give no reward, not even 0."""

    RIGHT = "right"
    WRONG = "wrong"
    NO_ANSWER = "no_answer"
    TIMEOUT = "timeout"
    CRASH = "crash"
    MEMORY = "memory"
    USER_ERROR = "user_error"
    ENVIRONMENT_ERROR = "environment_error"
    JUDGE_UNAVAILABLE = "judge_unavailable"


FAILURES = tuple(Outcome)[3:]
SLOW = "slow"  # `Verdict.decided` of a text that took the verifier too long: it is wrong


class Failure(NamedTuple):
    """Failure of a reward, with the error."""

    outcome: Outcome
    text: str
    counts: dict[str, float] = {}  # such as requests to a judge, for metrics

    @classmethod
    def from_json(cls, fields: Sequence[Any] | None) -> "Failure | None":
        return None if fields is None else cls(Outcome(fields[0]), *fields[1:])


# --- host, ragged ---------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Problem:
    """A problem with its answer, as read from a source; missing fields are empty."""

    id: str
    text: str
    answer: str
    source: str
    subject: str = ""
    level: str = ""
    solution: str = ""  # worked solution, for few-shot examples
    metadata: str = ""  # JSON, for scorers of the source
    system: str = ""  # system message of this problem
    turns: tuple[tuple[str, str], ...] = ()  # (role, text) of the conversation before it
    columns: str = ""  # JSON of the row's columns that reward functions take
    messages: str = ""  # JSON of `turns`, problem and what follows, if these are not all
    tools: str = ""  # JSON of the functions that the row offers
    row: str = ""  # digest of the whole row, for a problem of a file

    @property
    def digest(self) -> str:
        """Identity: equal for equal rows, or for generated problems that equal each other."""
        return self.row or digest_json([self.source, self.text, self.answer, self.metadata])

    @property
    def fingerprint(self) -> str:
        """Text with runs of blanks collapsed, by which held-out problems are recognised."""
        return " ".join(" ".join([*(content for _, content in self.turns), self.text]).split())


class WantedColumns(NamedTuple):
    """Names of the columns of a row that reward functions take."""

    required: frozenset[str] = frozenset()
    optional: frozenset[str] = frozenset()
    every: bool = False  # `**columns` takes all there are
    check: Callable[[dict[str, Any]], Any] | None = None  # raises ValueError for a bad row


@dataclasses.dataclass(frozen=True)
class Prompt:
    """A problem as a tokenized prompt; `index` is its position in the endless data order."""

    index: int
    id: str
    text: str
    tokens: np.ndarray  # [P] int32
    answer: str
    source: str
    subject: str = ""
    level: str = ""
    problem: str = ""  # without the template
    metadata: str = ""  # the problem's
    columns: str = ""  # the problem's
    digest: str = ""  # the problem's
    truncated: bool = False  # the start was cut off
    skipped: int = 0  # number of positions skipped just before it


class Turn(NamedTuple):
    """A turn of a trajectory, sampled by the policy or returned by the environment."""

    is_sampled: bool
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
    """A response, or the trajectory of the policy in an environment.

    A sampled end token is included and trained on. Observations are context between the sampled
    tokens and count in no length.
    """

    tokens: np.ndarray  # [n] int32, observations included
    sampler_logprobs: np.ndarray  # [n] float32, before top-k and top-p; 0 if observed
    truncated: bool  # the budget ran out before the end token
    policy_step: int
    text: str  # last sampled turn; empty until it is decoded
    sample: int = 0  # index in the group; part of the random key
    earlier: tuple[tuple[int, int], ...] = ()  # (policy step, tokens) of older policies
    turns: tuple[Turn, ...] = ()  # empty without observations
    rewards: tuple[float, ...] = ()  # of the environment, one per step
    failures: tuple[str, ...] = ()  # of steps of the environment
    lost_environment: bool = False  # a step failed for good: no reward
    routes: np.ndarray | None = None  # [m, L, k] experts of the first m tokens, prompt included
    supports: np.ndarray | None = None  # [n, 2] float32 if training truncates; see rollout.sampling

    def __len__(self) -> int:
        """Return the number of sampled tokens."""
        return len(self.tokens) - sum(turn.tokens for turn in self.turns if not turn.is_sampled)

    @functools.cached_property
    def is_sampled(self) -> np.ndarray:
        """Mask [n] of sampled tokens, False on observations."""
        if not self.turns:
            return np.ones(len(self.tokens), bool)
        flags, counts = zip(*((turn.is_sampled, turn.tokens) for turn in self.turns), strict=True)
        return np.repeat(flags, counts)

    @property
    def sampled_tokens(self) -> np.ndarray:
        """The sampled tokens."""
        return self.tokens[self.is_sampled]

    @property
    def last_turn(self) -> np.ndarray:
        """The tokens after the last observation."""
        observed = np.flatnonzero(~self.is_sampled)
        return self.tokens[observed[-1] + 1 :] if observed.size else self.tokens

    @property
    def sampled_by(self) -> tuple[tuple[int, int], ...]:
        """(policy step, tokens) of every policy that sampled a part, in order."""
        last = len(self) - sum(tokens for _, tokens in self.earlier)
        return (*self.earlier, (self.policy_step, last)) if last else self.earlier


def with_texts(
    completions: Sequence[Completion], decode_all: Callable[[list[list[int]]], list[str]]
) -> tuple[Completion, ...]:
    """Decode the last turn of each response that has no text yet."""
    missing = [completion for completion in completions if not completion.text]
    texts = iter(decode_all([completion.last_turn.tolist() for completion in missing]))

    def with_text(completion: Completion) -> Completion:
        if completion.text:
            return completion
        text, turns = next(texts), completion.turns
        if turns and turns[-1].is_sampled:
            turns = (*turns[:-1], Turn(True, turns[-1].tokens, text))
        return dataclasses.replace(completion, text=text, turns=turns)

    return tuple(with_text(completion) for completion in completions)


class Interrupted(Exception):
    """Raised if rollouts or an evaluation were interrupted; partial results are discarded."""


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The verdict and reward parts of a response, from a reward worker."""

    correct: bool
    extracted: str | None  # answer found in the response, or None
    failure: Failure | None = None  # why there is no reward
    parts: dict[str, float] = dataclasses.field(default_factory=dict)  # unweighted, by name
    token_rewards: list[float] | None = None  # [n], weighted sum of per-token parts
    decided: str = ""  # direct, algebra, undecided; or why there is no answer

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> "Verdict":
        return cls(**{**fields, "failure": Failure.from_json(fields["failure"])})


class FailedResponse(NamedTuple):
    """Response without a reward, with its verdict's failure."""

    completion: Completion
    failure: Failure


@dataclasses.dataclass(frozen=True)
class Group:
    """Responses to a prompt with verdicts and rewards; kept or dropped as a whole.

    Responses whose reward failed are in `failed` only, so that they are in no statistics and in no
    loss. Without failures there are G responses.
    """

    prompt: Prompt
    completions: tuple[Completion, ...]
    verdicts: tuple[Verdict, ...]
    reward_parts: dict[str, np.ndarray]  # each [G] float64, weighted, by name
    rewards: np.ndarray  # [G] float64, their sum
    raw_rewards: np.ndarray  # [G] float64, without shaping parts
    correct: np.ndarray  # [G] bool, by the verifier or the raw reward
    failed: tuple[FailedResponse, ...] = ()

    def has_spread(self, least: float) -> bool:
        """Return whether raw rewards differ by more than `least`, and by more than rounding."""
        sizes = np.abs([self.raw_rewards, *self.reward_parts.values()]).sum(axis=0)
        return bool(np.ptp(self.raw_rewards) > least + ROUNDING * sizes.max())

    @functools.cached_property
    def token_rewards(self) -> tuple[np.ndarray, ...] | None:
        """Weighted rewards of tokens, [n] float64 each, included in `rewards`; None without any."""
        rewards = [verdict.token_rewards for verdict in self.verdicts]
        if all(values is None for values in rewards):
            return None
        return tuple(
            np.zeros(len(completion)) if values is None else np.array(values)
            for values, completion in zip(rewards, self.completions, strict=True)
        )

    @functools.cached_property
    def outcomes(self) -> list[Outcome]:
        """Outcomes of the responses, and then of the failed ones."""

        def of_scored(verdict: Verdict, correct: bool) -> Outcome:
            if correct:
                return Outcome.RIGHT
            is_missing = verdict.extracted is None and verdict.decided != SLOW
            return Outcome.NO_ANSWER if is_missing else Outcome.WRONG

        scored = map(of_scored, self.verdicts, self.correct)
        return [*scored, *(response.failure.outcome for response in self.failed)]

    @property
    def is_broken(self) -> bool:
        """True if fewer than half of the responses, or only one, have a reward."""
        size = len(self.completions) + len(self.failed)
        return len(self.completions) < max(math.ceil(size / 2), min(2, size))

    @property
    def first_failure(self) -> str:
        """Description of the first failed reward; empty if there is none."""
        if not self.failed:
            return ""
        (completion, failure), *_ = self.failed
        tail = completion.text[-MAX_SHOWN_CHARACTERS:]
        place = f"prompt {self.prompt.id}, response {completion.sample}"
        return f"{failure.outcome}: {failure.text}; {place}, which ends in {tail!r}"


@dataclasses.dataclass(frozen=True)
class PartialGroup:
    """A group that a step leaves to the next: partly sampled, or scored and not used."""

    prompt: Prompt
    step: int  # step that started it; part of the random key
    finished: tuple[Completion, ...] = ()
    begun: tuple[Completion, ...] = ()  # partly sampled
    judged: Group | None = None  # if scored, it holds all responses

    @property
    def tokens(self) -> int:
        """Number of sampled tokens; a group with 0 is requested again."""
        judged = self.judged.completions if self.judged else ()
        return sum(map(len, (*self.finished, *self.begun, *judged)))


@dataclasses.dataclass(frozen=True)
class Trace:
    """Advantage, ratios and clips of a response in the updates of a step."""

    advantage: float  # mean over its tokens
    ratios: np.ndarray | None = None  # [n] in the last update, with log.token_ratios
    clipped: np.ndarray | None = None  # [n] bound that clipped the token: see learner.metrics


@dataclasses.dataclass
class CollectedGroups:
    """The rollout batch of a step: its groups in data order, and counts."""

    groups: list[Group]  # kept groups, at most prompts_per_step
    judged: list[Group]  # all before next_position; with carry-over all but surplus
    surplus: list[Group]  # scored but not used; biased to short responses
    with_signal: int  # number of `judged` groups with a learning signal
    broken: list[Group]  # dropped: too few responses have a reward; in no other list
    asked_prompts: int
    kept_fraction: float  # estimate for the next step
    next_position: int  # of the data; surplus prompts are requested again
    dropped_prompts: int  # too long or held out
    truncated_prompts: int  # cut to the length limit
    starved: bool
    carried: tuple[PartialGroup, ...] = ()  # for the next step, in data order
    expired: int = 0  # carried groups that were too old and are sampled again
    reused: frozenset[int] = frozenset()  # positions of groups that an earlier step scored
    # Traces of the responses of trained groups, by position of the group in the data.
    traces: dict[int, list[Trace]] = dataclasses.field(default_factory=dict)
    resampled: tuple[Group, ...] = ()  # broken at first, sampled again

    @property
    def scored(self) -> list[Group]:
        """All groups that this step scored."""
        groups = [*self.judged, *self.surplus, *self.broken, *self.resampled]
        return [group for group in groups if group.prompt.index not in self.reused]

    @functools.cached_property
    def outcomes(self) -> collections.Counter[Outcome]:
        """Number of responses by outcome in the groups that this step scored."""
        return collections.Counter(outcome for group in self.scored for outcome in group.outcomes)

    @property
    def failures(self) -> collections.Counter[Outcome]:
        """Number of failed rewards by outcome."""
        counts = {name: self.outcomes[name] for name in FAILURES if self.outcomes[name]}
        return collections.Counter(counts)

    @property
    def all_right(self) -> int:
        return sum(bool(group.correct.all()) for group in self.judged)

    @property
    def all_wrong(self) -> int:
        return sum(not group.correct.any() for group in self.judged)


class SamplingRule(NamedTuple):
    """Temperature and truncation of sampling; hashable, since each rule is compiled."""

    temperature: float = 1.0  # 0: greedy
    top_p: float = 1.0
    top_k: int = 0


class RolloutKey(NamedTuple):
    """Identity of a rollout; purpose and step are part of the random keys of its responses."""

    purpose: int  # such as `rollout.sampling.SAMPLE_FOR_TRAINING`
    step: int = 0
    policy_step: int = 0  # steps that the policy was trained for


class Stop(NamedTuple):
    """Ends of a response besides the tokenizer's end tokens; it includes the last token."""

    texts: tuple[str, ...] = ()
    ids: tuple[int, ...] = ()


class NewTokens(NamedTuple):
    """Addition of a burst to a response: tokens, and text without what may begin a stop."""

    sample: int
    ids: list[int]
    text: str
    ended: bool
    stopped: bool = False  # it ended by an end token or a stop


@dataclasses.dataclass(eq=False)
class Request:
    """Requested responses to one prompt, and those that are finished.

    Raises:
        ValueError: the prompt has no tokens, or the budget none.
    """

    prompt: Prompt
    samples: Any  # sample numbers; a number of samples requests a whole group
    rule: SamplingRule | None = None  # None: that of the rollout
    budget: int | None = None  # maximum tokens of a response; None: that of the sampler
    stop: Stop = Stop()
    step: int = 0  # part of the random key
    whole: bool = False  # all samples are returned together
    seed: int | None = None  # replaces seed and step in the random key
    watch: Callable[[NewTokens], None] | None = None  # called after every burst
    finished: dict[int, Completion] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        if len(self.prompt.tokens) == 0:
            raise ValueError(f"prompt {self.prompt.id!r} has no tokens")
        if self.budget is not None and self.budget < 1:
            raise ValueError(f"prompt {self.prompt.id!r}: budget = {self.budget}: must be above 0")
        if isinstance(self.samples, int):
            self.samples, self.whole = range(self.samples), True

    def finish(self, completion: Completion) -> "list[Finished]":
        """Add a finished response; return what can be handed out now, if anything."""
        if not self.whole:
            return [(self, (completion,))]
        self.finished[completion.sample] = completion
        if len(self.finished) < len(self.samples):
            return []
        return [(self, tuple(self.finished[i] for i in self.samples))]


Finished: TypeAlias = tuple[Request, tuple[Completion, ...]]


@dataclasses.dataclass
class TurnCounts:
    """Counts of trajectories in environments during one rollout."""

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
        """Return the counts as metrics of a step."""
        values = dataclasses.asdict(self)
        seconds = {"seconds_environment": values.pop("wait_seconds")}
        return {f"environment_{name}": float(count) for name, count in values.items()} | seconds


@dataclasses.dataclass
class SamplerCounts:
    """Counts of one rollout; slot occupancy is measured only while prompts wait."""

    prefills: int = 0
    bursts: int = 0
    decode_steps: int = 0
    decode_seconds: float = 0.0  # time that the host waited for bursts
    responses: int = 0
    tokens: int = 0
    abandoned_responses: int = 0
    abandoned_tokens: int = 0
    unfinished_tokens: int = 0  # of responses carried to the next step
    put_back_tokens: int = 0  # sampled again because the cache was full
    busy_slot_steps: int = 0
    slot_steps: int = 0
    decoded_tokens: int = 0  # of all bursts, fed tokens included
    decoding_slot_steps: int = 0  # of all bursts
    turns: TurnCounts | None = None  # with an environment
    others: dict[str, float] | None = None  # metrics that only this sampler has

    def __add__(self, other: "SamplerCounts | None") -> "SamplerCounts":
        return add_counts(self, other)

    @property
    def sampled_tokens(self) -> int:
        """Sampled tokens, including those of abandoned and repeated responses."""
        return self.tokens + self.abandoned_tokens + self.unfinished_tokens + self.put_back_tokens

    @property
    def occupancy(self) -> float:
        """Fraction of slot steps that sampled a token while the queue was not empty."""
        return self.busy_slot_steps / self.slot_steps if self.slot_steps else 1.0

    def metrics(self) -> dict[str, float]:
        """Return the counts as metrics of a step."""
        return {
            "abandoned_tokens": float(self.abandoned_tokens),
            "put_back_tokens": float(self.put_back_tokens),
            "decode_steps": float(self.decode_steps),
            "decode_bursts": float(self.bursts),
            "prefills": float(self.prefills),
            "slot_occupancy": self.occupancy,
            "tokens_per_slot_step": self.decoded_tokens / max(1, self.decoding_slot_steps),
            "seconds_decode": self.decode_seconds,
            **(self.turns.metrics() if self.turns else {}),
            **(self.others or {}),
        }


def add_counts(left: Any, right: Any) -> Any:
    """Return the sums of the counts of two rollouts, field by field."""
    if left is None or right is None:
        return left if right is None else right
    if isinstance(left, dict):
        return {name: left.get(name, 0) + right.get(name, 0) for name in left | right}
    if not dataclasses.is_dataclass(left):
        return left + right
    names = [field.name for field in dataclasses.fields(left)]
    return type(left)(*[add_counts(getattr(left, n), getattr(right, n)) for n in names])
