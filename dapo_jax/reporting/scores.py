"""Scores of an evaluation from judged responses: avg@k, pass@k, maj@k, and response statistics.

Responses to the same question are samples of ONE problem, however often the file lists it: a
benchmark file that repeats its problems 32 times and is sampled once gives avg@32, not mean@1.
The problem is the unit: intervals resample problems, never responses, and means weigh a problem by
its responses, so that they are also means over the lines of the file. Problems that all have the
same score show no spread to resample: their interval is Wilson's, of as many units.
"""

import collections
import dataclasses
import math
import operator
import re
from collections.abc import Callable, Sequence

import numpy as np

RESAMPLES = 2000
CONFIDENCE = 0.95
NORMAL_QUANTILE = 1.959964  # of (1 + CONFIDENCE) / 2
RIGHT = 0  # class of right answers
REFLECTION = re.compile(r"\b(wait|recheck|re-check|verify|double-check|reconsider|again)\b", re.I)

# (prediction, answer) -> whether both mean the same
Equivalence = Callable[[str, str], bool]


@dataclasses.dataclass(frozen=True)
class Response:
    """A judged response as a report needs it; a line of responses.jsonl."""

    problem: str  # id in the file
    index: int  # place of the problem in the file
    sample: int  # place of the response among the responses to this line of the file
    question: str  # as the policy saw it
    answer: str
    response: str
    extracted: str | None  # answer found in the response
    correct: bool
    truncated: bool
    tokens: int
    logprob: float  # sum over the tokens, in nats, before top_p
    reflection: bool  # holds a word such as wait, recheck, again
    repetition: float  # share of 8-token windows that occurred before
    failure: str | None = None  # error or time-out of the verifier
    subject: str = ""
    level: str = ""
    turns: Sequence = ()  # as rollouts/ has those of a trajectory


@dataclasses.dataclass(frozen=True)
class Estimate:
    """Mean over problems with a 95 % interval over problems, None for a single one."""

    value: float
    low: float | None
    high: float | None


@dataclasses.dataclass(frozen=True)
class Reflection:
    """Accuracy with and without a reflection word, inside each question that has both kinds.

    Hard questions draw more reflection and fewer right answers, so pooled responses would show
    difficulty instead of what reflection does.
    """

    questions: int  # number with both kinds
    with_word: Estimate
    without: Estimate
    difference: Estimate


@dataclasses.dataclass(frozen=True)
class Row:
    """Accuracy of a subject or level."""

    name: str
    problems: int
    accuracy: Estimate


@dataclasses.dataclass(frozen=True)
class Report:
    """Scores and response statistics of an evaluation. Means over nothing are None."""

    problems: int  # different ones
    responses: int
    samples_per_problem: int  # k: the fewest that any problem has
    repeated_problems: int  # problems that the file lists more than once
    most_listings: int  # times that the file lists a problem at most
    accuracy: Estimate  # avg@k
    pass_at_k: dict[int, Estimate]  # by k = 1, 2, 4, ..
    majority: Estimate  # maj@k
    response_tokens: float
    response_tokens_right: float | None
    response_tokens_wrong: float | None
    truncated_fraction: float
    answer_not_found_rate: float
    verifier_failures: int
    repetition: float
    entropy: float | None  # minus the mean log-prob of a sampled token, in nats
    reflection_fraction: float
    reflection: Reflection | None
    subjects: list[Row]
    levels: list[Row]


def pass_at_k(samples: int, right: int, k: int) -> float:
    """Unbiased chance that k of the samples, drawn without replacement, hold a right one.

    1 - C(n-c, k) / C(n, k) (Chen et al., 2021, arXiv 2107.03374), in exact integers.
    """
    everything = math.comb(samples, k)
    return (everything - math.comb(samples - right, k)) / everything


def answer_classes(
    responses: Sequence[Response], equivalent: Equivalence = operator.eq
) -> list[int | None]:
    """Class of each response's answer; None where no answer was found.

    Right answers are class `RIGHT`: each means the gold answer. A wrong one joins the first class
    whose first member it is equivalent to.
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
            alike = (i for i, first in enumerate(firsts) if equivalent(answer, first))
            known[answer] = next(alike, len(firsts))
            firsts += [answer] * (known[answer] == len(firsts))
        classes.append(RIGHT + 1 + known[answer])
    return classes


def majority_score(classes: Sequence[int | None]) -> float:
    """1 where the largest class is right, 1/t where it ties with t - 1 others, else 0.

    Responses without an answer don't vote.
    """
    votes = collections.Counter(name for name in classes if name is not None)
    most = max(votes.values(), default=0)
    tied = [name for name, count in votes.items() if count == most]
    return (RIGHT in tied) / max(1, len(tied))


def _majority(responses: Sequence[Response], k: int, equivalent: Equivalence) -> float:
    """Mean majority score over the problem's blocks of k samples: every vote has k voices."""
    classes = answer_classes(responses, equivalent)
    starts = range(0, len(classes) - k + 1, k)
    return float(np.mean([majority_score(classes[i : i + k]) for i in starts]))


def _interval(resampled: np.ndarray) -> np.ndarray:
    """Percentile interval of resampled means, [2] or [2, M]."""
    tail = 50 * (1 - CONFIDENCE)
    return np.percentile(resampled, [tail, 100 - tail], axis=0)


def wilson(share: float, units: float) -> tuple[float, float]:
    """Wilson's score interval of a share of so many independent units (1927)."""
    square = NORMAL_QUANTILE**2 / units
    centre = (share + square / 2) / (1 + square)
    half = math.sqrt(square * (share * (1 - share) + square / 4)) / (1 + square)
    return max(0.0, centre - half), min(1.0, centre + half)


def _without_spread(value: float, units: float, lowest: float) -> Estimate:
    """Estimate of units that all have the same value, between `lowest` and 1."""
    ends = (lowest + (1 - lowest) * end for end in wilson((value - lowest) / (1 - lowest), units))
    return Estimate(value, *ends)


def estimates(
    values: np.ndarray, weights: np.ndarray, seed: int, lowest: Sequence[float] = ()
) -> list[Estimate]:
    """Weighted mean of each column with the percentile interval of resampled problems.

    A column of equal values has Wilson's interval. Its units are the problems: the effective
    number where their weights differ.

    Args:
        values: a row per problem, [P, M], at most 1.
        weights: of the problems, [P], above 0.
        seed: of the resampling; all columns see the same resamples.
        lowest: smallest possible values of the columns, [M]; empty: 0 of each.
    """
    problems = len(values)
    means = weights @ values / weights.sum()
    if problems < 2:
        return [Estimate(float(mean), None, None) for mean in means]
    shares = np.full(problems, 1 / problems)
    drawn = np.random.default_rng(seed).multinomial(problems, shares, size=RESAMPLES) * weights
    lows, highs = _interval(drawn @ values / drawn.sum(axis=1, keepdims=True))
    found = [Estimate(*map(float, column)) for column in zip(means, lows, highs, strict=True)]
    units = float(weights.sum() ** 2 / (weights**2).sum())
    for place in map(int, np.flatnonzero(np.ptp(values, axis=0) == 0)):
        least = lowest[place] if lowest else 0.0
        found[place] = _without_spread(float(values[0, place]), units, least)
    return found


def estimate_over_seeds(shares: Sequence[np.ndarray], seed: int, lowest: float = 0.0) -> Estimate:
    """Mean over runs of their means over problems; the interval resamples runs and problems.

    Values that are all equal have Wilson's interval of as many units as a run has problems: runs
    share them.

    Args:
        shares: values of each run's problems, [P] each, at most 1.
        seed: of the resampling.
        lowest: smallest possible value.
    """
    mean = float(np.mean([values.mean() for values in shares]))
    if len(shares) < 2:
        return Estimate(mean, None, None)
    if np.ptp(np.concatenate(shares)) == 0:
        return _without_spread(float(shares[0][0]), min(map(len, shares)), lowest)
    rng, draws = np.random.default_rng(seed), (RESAMPLES, len(shares))
    chosen = rng.integers(len(shares), size=draws)
    resampled = np.zeros(draws)
    for number, values in enumerate(shares):
        mask = chosen == number
        # Equal values need no telling apart: a run has hundreds of problems and few shares.
        distinct, sizes = np.unique(values, return_counts=True)
        counts = rng.multinomial(len(values), sizes / len(values), mask.sum())
        resampled[mask] = counts @ distinct / len(values)
    low, high = _interval(resampled.mean(axis=1))
    return Estimate(mean, float(low), float(high))


def by_problem(responses: Sequence[Response]) -> list[list[Response]]:
    """Responses to the same question with the same answer, in the order given."""
    problems: dict[tuple[str, str], list[Response]] = {}
    for response in responses:
        problems.setdefault((response.question, response.answer), []).append(response)
    return list(problems.values())


def _reflection(problems: list[list[Response]], seed: int) -> Reflection | None:
    rows, weights = [], []
    for samples in problems:
        with_word = [sample.correct for sample in samples if sample.reflection]
        without = [sample.correct for sample in samples if not sample.reflection]
        if with_word and without:
            accuracies = np.mean(with_word), np.mean(without)
            rows.append([*accuracies, accuracies[0] - accuracies[1]])
            weights.append(len(samples))
    if not rows:
        return None
    found = estimates(np.array(rows), np.array(weights), seed, lowest=(0, 0, -1))
    return Reflection(len(rows), *found)


def _rows(problems: list[list[Response]], field: str, seed: int) -> list[Row]:
    """Accuracy by value of `field`, sorted; empty where the data has no such field."""
    members: dict[str, list[list[Response]]] = {}
    for samples in problems:
        members.setdefault(getattr(samples[0], field), []).append(samples)
    if set(members) == {""}:
        return []
    return [
        Row(name or "(none)", len(own), _accuracy(own, seed))
        for name, own in sorted(members.items())
    ]


def _accuracy(problems: list[list[Response]], seed: int) -> Estimate:
    means = np.array([[np.mean([sample.correct for sample in samples])] for samples in problems])
    return estimates(means, np.array([len(samples) for samples in problems]), seed)[0]


def _mean(values: Sequence[float] | np.ndarray) -> float:
    return float(np.mean(values))


def make_report(
    responses: Sequence[Response], equivalent: Equivalence = operator.eq, seed: int = 0
) -> Report:
    """Report on at least one response.

    Args:
        equivalent: equality of wrong answers in the majority's vote.
        seed: of the bootstrap.
    """
    # Sorted, so that no sum depends on which response was finished first.
    responses = sorted(responses, key=lambda response: (response.index, response.sample))
    problems = by_problem(responses)
    sizes = np.array([len(samples) for samples in problems])
    listings = [len({sample.index for sample in samples}) for samples in problems]
    k = int(sizes.min())
    powers = [2**i for i in range(k.bit_length())]
    right = [sum(sample.correct for sample in samples) for samples in problems]
    table = [
        [c / n, *(pass_at_k(int(n), c, power) for power in powers), _majority(s, k, equivalent)]
        for n, c, s in zip(sizes, right, problems, strict=True)
    ]
    accuracy, *passes, majority = estimates(np.array(table), sizes, seed)
    lengths = np.array([response.tokens for response in responses])
    correct = np.array([response.correct for response in responses])
    tokens = int(lengths.sum())
    return Report(
        problems=len(problems),
        responses=len(responses),
        samples_per_problem=k,
        repeated_problems=sum(count > 1 for count in listings),
        most_listings=max(listings),
        accuracy=accuracy,
        pass_at_k=dict(zip(powers, passes, strict=True)),
        majority=majority,
        response_tokens=tokens / len(responses),
        response_tokens_right=_mean(lengths[correct]) if correct.any() else None,
        response_tokens_wrong=_mean(lengths[~correct]) if not correct.all() else None,
        truncated_fraction=_mean([response.truncated for response in responses]),
        answer_not_found_rate=_mean([response.extracted is None for response in responses]),
        verifier_failures=sum(response.failure is not None for response in responses),
        repetition=_mean([response.repetition for response in responses]),
        entropy=-sum(response.logprob for response in responses) / tokens if tokens else None,
        reflection_fraction=_mean([response.reflection for response in responses]),
        reflection=_reflection(problems, seed),
        subjects=_rows(problems, "subject", seed),
        levels=_rows(problems, "level", seed),
    )
