"""Scores of an evaluation: avg@k, reward, pass@k, maj@k with intervals, response statistics.

Responses to equal problems are samples of one problem: a benchmark file that repeats its rows
32 times and is sampled once gives avg@32, not mean@1. Intervals resample problems, never
responses. Means weigh a problem by its responses, so they are also means over the lines of the
file. If all problems have the same score, the interval is Wilson's.
"""

import collections
import dataclasses
import math
import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from dapo_jax.config.experiment import ANSWER_PARTS, Config
from dapo_jax.config.settings import leaves
from dapo_jax.types.structs import ROUNDING

RESAMPLES = 2000
TAIL = 50 * (1 - 0.95)  # percent on either side of an interval
PERCENTILES = (TAIL, 100 - TAIL)
NORMAL_QUANTILE = 1.959964  # of the upper percentile
RIGHT = 0  # class of correct answers
# Held-out scores: of sampled responses, the first leads; of given examples and pairs.
HELDOUT = ("accuracy", "reward", "nll", "preference_loss", "preference_accuracy")
POLICY, ENVIRONMENT = "policy", "environment"  # speakers of turns
REFLECTION = re.compile(r"\b(wait|recheck|re-check|verify|double-check|reconsider|again)\b", re.I)

# (prediction, answer) -> True if both mean the same
Equivalence = Callable[[str, str], bool]


@dataclasses.dataclass(frozen=True)
class Response:
    """A scored response; a line of responses.jsonl."""

    problem: str  # id in the file
    index: int  # of the problem in the file
    sample: int  # of the response to this line of the file
    question: str  # as given to the policy
    answer: str
    response: str
    extracted: str | None  # answer found in the response
    correct: bool
    truncated: bool
    tokens: int
    logprob: float  # sum over the tokens, in nats, before top_p
    reflection: bool  # contains a word such as wait, recheck, again
    repetition: float  # fraction of 8-token windows that occurred before
    failure: str | None = None  # why there is no reward: the response is in no score
    subject: str = ""
    level: str = ""
    turns: Sequence[Any] = ()  # of a multi-turn trajectory: [speaker, tokens, text] each
    reward: float | None = None  # sum of the weighted parts; None: it failed
    outcome: str = ""  # of the reward
    digest: str = ""  # of the problem: equal rows of a file are one problem

    @property
    def policy_turns(self) -> int:
        """Number of turns of the policy."""
        return max(1, sum(speaker == POLICY for speaker, *_ in self.turns))


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A mean over problems with its 95 % interval; None for a single problem."""

    value: float
    low: float | None
    high: float | None


@dataclasses.dataclass(frozen=True)
class Report:
    """Scores and response statistics of an evaluation. Means over nothing are None."""

    problems: int  # distinct
    responses: int
    samples_per_problem: int  # k: the fewest that any problem has
    repeated_problems: int  # problems that the file lists more than once
    most_listings: int  # times that the file lists a problem at most
    accuracy: Estimate  # avg@k
    reward: Estimate | None  # None if no response has a reward
    pass_at_k: dict[int, Estimate]  # by k = 1, 2, 4, ..
    majority: Estimate  # maj@k
    response_tokens: float
    response_tokens_right: float | None
    response_tokens_wrong: float | None
    turns: float | None  # of the policy; None if all responses have one
    truncated_fraction: float
    answer_not_found_rate: float
    failed_rewards: dict[str, int]  # by outcome; their responses are in no other field
    repetition: float
    entropy: float | None  # minus the mean log-prob of a sampled token, in nats
    reflection_fraction: float


def pass_at_k(samples: int, right: int, k: int) -> float:
    """Return the unbiased probability that k of the samples include a correct one.

    1 - C(n-c, k) / C(n, k) (Chen et al., 2021, arXiv 2107.03374), in exact integers.
    """
    subsets = math.comb(samples, k)
    return (subsets - math.comb(samples - right, k)) / subsets


def answer_classes(
    responses: Sequence[Response], equivalent: Equivalence = operator.eq
) -> list[int | None]:
    """Return the class of each response's answer; None without an answer.

    Correct answers are class `RIGHT`. An incorrect one joins the first class that has an equivalent
    first member.
    """
    known: dict[str, int] = {}
    firsts: list[str] = []
    classes: list[int | None] = []
    for response in responses:
        answer = response.extracted
        if answer is None or response.correct:
            classes.append(RIGHT if response.correct else None)
            continue
        if answer not in known:
            matches = (i for i, first in enumerate(firsts) if equivalent(answer, first))
            known[answer] = next(matches, len(firsts))
            if known[answer] == len(firsts):
                firsts.append(answer)
        classes.append(RIGHT + 1 + known[answer])
    return classes


def majority_score(classes: Sequence[int | None]) -> float:
    """Return 1 if the largest class is correct, 1/t if it ties with t - 1 others, else 0.

    Responses without an answer do not vote.
    """
    votes = collections.Counter(name for name in classes if name is not None)
    most = max(votes.values(), default=0)
    tied = [name for name, count in votes.items() if count == most]
    return (RIGHT in tied) / max(1, len(tied))


def _majority(responses: Sequence[Response], k: int, equivalent: Equivalence) -> float:
    """Return the mean majority score over blocks of k samples, so that every vote is of k."""
    classes = answer_classes(responses, equivalent)
    starts = range(0, len(classes) - k + 1, k)
    return float(np.mean([majority_score(classes[i : i + k]) for i in starts]))


def wilson(share: float, units: float) -> tuple[float, float]:
    """Return Wilson's score interval (1927) of a share of independent units."""
    square = NORMAL_QUANTILE**2 / units
    centre = (share + square / 2) / (1 + square)
    half = math.sqrt(square * (share * (1 - share) + square / 4)) / (1 + square)
    return max(0.0, centre - half), min(1.0, centre + half)


def estimates(values: np.ndarray, weights: np.ndarray, seed: int) -> list[Estimate]:
    """Return the weighted mean of each column with its interval over resampled problems.

    A column of equal values has Wilson's interval of the effective number of problems.

    Args:
        values: a row per problem, [P, M], at most 1.
        weights: of the problems, [P], above 0.
        seed: of the resampling; all columns see the same resamples.
    """
    problems = len(values)
    means = weights @ values / weights.sum()
    if problems < 2:
        return [Estimate(float(mean), None, None) for mean in means]
    shares = np.full(problems, 1 / problems)
    drawn = np.random.default_rng(seed).multinomial(problems, shares, size=RESAMPLES) * weights
    resampled = drawn @ values / drawn.sum(axis=1, keepdims=True)
    lows, highs = np.percentile(resampled, PERCENTILES, axis=0)
    columns = zip(means, lows, highs, strict=True)
    results = [Estimate(float(mean), float(low), float(high)) for mean, low, high in columns]
    units = float(weights.sum() ** 2 / (weights**2).sum())
    for place in map(int, np.flatnonzero(np.ptp(values, axis=0) == 0)):
        value = float(values[0, place])
        results[place] = Estimate(value, *wilson(value, units))
    return results


def _reward(problems: list[list[Response]], seed: int) -> Estimate | None:
    """Return the mean reward; equal rewards have no interval, since their bounds are unknown."""
    known = [[sample.reward for sample in samples] for samples in problems]
    rewards = [[x for x in values if x is not None] for values in known]
    rewards = [values for values in rewards if values]
    if not rewards:
        return None
    means = np.array([[_mean(values)] for values in rewards])
    if np.ptp(means) <= ROUNDING * np.abs(means).max():
        return Estimate(float(means[0, 0]), None, None)
    (estimate,) = estimates(means, np.array([len(values) for values in rewards]), seed)
    return estimate


def _mean(values: Iterable[float]) -> float:
    return float(np.mean(list(values)))


def make_report(
    responses: Sequence[Response], equivalent: Equivalence = operator.eq, seed: int = 0
) -> Report:
    """Return the report on at least one response with a reward.

    Args:
        equivalent: equality of incorrect answers in the majority vote.
        seed: of the bootstrap.
    """
    # Sort, so that sums do not depend on the order in which responses finished.
    failed = collections.Counter(r.outcome for r in responses if r.failure is not None)
    responses = [response for response in responses if response.failure is None]
    responses = sorted(responses, key=lambda response: (response.index, response.sample))
    grouped: dict[tuple[str, ...], list[Response]] = {}
    for response in responses:
        key = response.digest, response.question, response.answer
        grouped.setdefault(key, []).append(response)
    problems = list(grouped.values())
    sizes = np.array([len(samples) for samples in problems])
    listings = [len({sample.index for sample in samples}) for samples in problems]
    k = int(sizes.min())
    powers = [2**i for i in range(k.bit_length())]
    table = []
    for samples in problems:
        n = len(samples)
        right = sum(sample.correct for sample in samples)
        passes = [pass_at_k(n, right, power) for power in powers]
        table.append([right / n, *passes, _majority(samples, k, equivalent)])
    accuracy, *passes, majority = estimates(np.array(table), sizes, seed)
    lengths = np.array([response.tokens for response in responses])
    correct = np.array([response.correct for response in responses])
    tokens = int(lengths.sum())
    turns = [response.policy_turns for response in responses]
    return Report(
        problems=len(problems),
        responses=len(responses),
        samples_per_problem=k,
        repeated_problems=sum(count > 1 for count in listings),
        most_listings=max(listings),
        accuracy=accuracy,
        reward=_reward(problems, seed),
        pass_at_k=dict(zip(powers, passes, strict=True)),
        majority=majority,
        response_tokens=tokens / len(responses),
        response_tokens_right=_mean(lengths[correct]) if correct.any() else None,
        response_tokens_wrong=_mean(lengths[~correct]) if not correct.all() else None,
        turns=_mean(turns) if any(response.turns for response in responses) else None,
        truncated_fraction=_mean(response.truncated for response in responses),
        answer_not_found_rate=_mean(response.extracted is None for response in responses),
        failed_rewards=dict(failed),
        repetition=_mean(response.repetition for response in responses),
        entropy=-sum(response.logprob for response in responses) / tokens if tokens else None,
        reflection_fraction=_mean(response.reflection for response in responses),
    )


# --- whether correctness matters to a run ----------------------------------------------------

Settings = Mapping[str, Any]  # by dotted name
Condition = Callable[[Settings], Any]


def settings_of(config: Config) -> dict[str, Any]:
    """Return the settings of a config by dotted name."""
    return {name: value for name, _, value in leaves(config)}


def does_apply(condition: Condition | None, settings: Settings) -> bool:
    """Return True if the condition holds; also if a run is older than one of its settings."""
    try:
        return condition is None or bool(condition(settings))
    except KeyError:
        return True


def _parts(settings: Settings) -> set[str]:
    return {entry.partition("=")[0].strip() for entry in settings["reward.parts"].split(",")}


def _trains_on_correctness(settings: Settings) -> bool:
    is_needed = (
        settings["algorithm.dynamic_sampling"]
        or settings["algorithm.trained_responses"] != "all"
        or settings["algorithm.positive_nll_coefficient"] > 0
    )
    is_rewarded = not _parts(settings).isdisjoint(ANSWER_PARTS)
    return is_rewarded or is_needed and settings["reward.correct"] == "verifier"


def uses_correctness(settings: Settings) -> bool:
    """Return True if correctness, by the verifier or a threshold, affects training."""
    return settings["reward.correct"] == "threshold" or _trains_on_correctness(settings)


def reward_leads(settings: Settings) -> bool:
    """Return True if no response counts as correct, so that reports lead with the reward.

    False if a run is older than one of the settings that decide it.
    """
    return not does_apply(uses_correctness, settings)


def reads_answers(settings: Settings) -> bool:
    """Return True if training reads the verifier's answers, rather than only logs them."""
    return "format" in _parts(settings) or _trains_on_correctness(settings)
