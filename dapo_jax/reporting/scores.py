"""From judged responses to scores: avg@k, pass@k, maj@k and what the responses look like.

Responses to the same question are samples of ONE problem, however often the file lists it: a
benchmark file that repeats its problems 32 times and is sampled once gives avg@32, not mean@1.
The problem is the unit of everything here: intervals resample problems, never responses, and means
weigh a problem by its responses, so that they are also means over the lines of the file.
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
RIGHT = 0  # the class of right answers
REFLECTION = re.compile(r"\b(wait|recheck|re-check|verify|double-check|reconsider|again)\b", re.I)

# (prediction, answer) -> whether both mean the same
Equivalence = Callable[[str, str], bool]


@dataclasses.dataclass(frozen=True)
class Response:
    """One judged response, all that a report needs of it; a line of responses.jsonl."""

    problem: str  # the id that the file gives it
    index: int  # place of the problem in the file
    sample: int  # place of the response among those to this line of the file
    question: str  # what the policy saw
    answer: str
    response: str
    extracted: str | None  # the answer that was found in it
    correct: bool
    truncated: bool
    tokens: int
    logprob: float  # sum over the tokens, in nats, before top_p
    reflection: bool  # holds a word such as wait, recheck, again
    repetition: float  # share of 8-token windows that occurred before
    failure: str | None = None  # what kept the verifier from finishing
    subject: str = ""
    level: str = ""


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A mean over problems with its 95 % bootstrap interval; of one problem there is none."""

    value: float
    low: float | None
    high: float | None


@dataclasses.dataclass(frozen=True)
class Reflection:
    """Accuracy with and without a reflection word, inside each question that has both kinds.

    Hard questions draw more reflection and fewer right answers, so pooled responses would show
    difficulty instead of what reflection does.
    """

    questions: int  # how many have both kinds
    with_word: Estimate
    without: Estimate
    difference: Estimate


@dataclasses.dataclass(frozen=True)
class Row:
    """One subject or level."""

    name: str
    problems: int
    accuracy: Estimate


@dataclasses.dataclass(frozen=True)
class Report:
    """What an evaluation found. Means over nothing are None."""

    problems: int  # different ones
    responses: int
    samples_per_problem: int  # k: the fewest that any problem has
    repeated_problems: int  # problems that the file lists more than once ...
    most_listings: int  # ... and how often at most
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
    """Chance that k of the samples, drawn without replacement, hold a right one. Unbiased.

    1 - C(n-c, k) / C(n, k) (Chen et al., 2021, arXiv 2107.03374), in exact integers.
    """
    everything = math.comb(samples, k)
    return (everything - math.comb(samples - right, k)) / everything


def answer_classes(
    responses: Sequence[Response], equivalent: Equivalence = operator.eq
) -> list[int | None]:
    """Class of each response's answer; None where none was found.

    Right answers are class `RIGHT`: each was found to mean the gold answer. A wrong one joins the
    first class whose first member it is equivalent to.
    """
    known: dict[str, int] = {}
    firsts: list[str] = []
    classes: list[int | None] = []
    for one in responses:
        if one.extracted is None or one.correct:
            classes.append(RIGHT if one.correct else None)
            continue
        if one.extracted not in known:
            like = (i for i, first in enumerate(firsts) if equivalent(one.extracted, first))
            known[one.extracted] = next(like, len(firsts))
            if known[one.extracted] == len(firsts):
                firsts.append(one.extracted)
        classes.append(RIGHT + 1 + known[one.extracted])
    return classes


def majority_score(classes: Sequence[int | None]) -> float:
    """Whether the largest class is right; of t tied ones, one drawn at random is: 1/t.

    Responses without an answer don't vote.
    """
    votes = collections.Counter(name for name in classes if name is not None)
    most = max(votes.values(), default=0)
    tied = [name for name, count in votes.items() if count == most]
    return (RIGHT in tied) / max(1, len(tied))


def _majority(responses: Sequence[Response], k: int, equivalent: Equivalence) -> float:
    """Mean over the problem's blocks of k samples, so that every problem's vote has k voices."""
    classes = answer_classes(responses, equivalent)
    starts = range(0, len(classes) - k + 1, k)
    return float(np.mean([majority_score(classes[i : i + k]) for i in starts]))


def estimates(values: np.ndarray, weights: np.ndarray, seed: int) -> list[Estimate]:
    """Weighted means of the columns, each with the percentile interval of resampled problems.

    Args:
        values: [P, M], one row per problem.
        weights: [P], above 0.
        seed: key of the resampling; all columns see the same resamples.
    """
    problems = len(values)
    means = weights @ values / weights.sum()
    if problems < 2:
        return [Estimate(float(mean), None, None) for mean in means]
    shares = np.full(problems, 1 / problems)
    drawn = np.random.default_rng(seed).multinomial(problems, shares, size=RESAMPLES) * weights
    resampled = drawn @ values / drawn.sum(axis=1, keepdims=True)
    tail = 50 * (1 - CONFIDENCE)
    lows, highs = np.percentile(resampled, [tail, 100 - tail], axis=0)
    return [Estimate(*map(float, found)) for found in zip(means, lows, highs, strict=True)]


def estimate_over_seeds(shares: Sequence[np.ndarray], seed: int) -> Estimate:
    """Mean over seeds of their means over problems, with an interval that resamples both.

    Args:
        shares: of each seed its problems' values, [P]; the percentile interval is that of seeds
            drawn anew and, of each that is drawn, its problems.
        seed: key of the resampling.
    """
    mean = float(np.mean([one.mean() for one in shares]))
    if len(shares) < 2:
        return Estimate(mean, None, None)
    rng, draws = np.random.default_rng(seed), (RESAMPLES, len(shares))
    chosen = rng.integers(len(shares), size=draws)
    resampled = np.zeros(draws)
    for number, values in enumerate(shares):
        here = chosen == number
        counts = rng.multinomial(len(values), np.full(len(values), 1 / len(values)), here.sum())
        resampled[here] = counts @ values / len(values)
    tail = 50 * (1 - CONFIDENCE)
    low, high = np.percentile(resampled.mean(axis=1), [tail, 100 - tail])
    return Estimate(mean, float(low), float(high))


def by_problem(responses: Sequence[Response]) -> list[list[Response]]:
    """Responses to the same question with the same answer, in the order given."""
    problems: dict[tuple[str, str], list[Response]] = {}
    for one in responses:
        problems.setdefault((one.question, one.answer), []).append(one)
    return list(problems.values())


def _reflection(problems: list[list[Response]], seed: int) -> Reflection | None:
    rows, weights = [], []
    for samples in problems:
        with_word = [one.correct for one in samples if one.reflection]
        without = [one.correct for one in samples if not one.reflection]
        if with_word and without:
            accuracies = np.mean(with_word), np.mean(without)
            rows.append([*accuracies, accuracies[0] - accuracies[1]])
            weights.append(len(samples))
    if not rows:
        return None
    return Reflection(len(rows), *estimates(np.array(rows), np.array(weights), seed))


def _rows(problems: list[list[Response]], field: str, seed: int) -> list[Row]:
    """avg@k of each value of `field`, in its order; none where the data doesn't say."""
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
    means = np.array([[np.mean([one.correct for one in samples])] for samples in problems])
    return estimates(means, np.array([len(samples) for samples in problems]), seed)[0]


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values))


def _mean_of_some(values: Sequence[float]) -> float | None:
    return _mean(values) if values else None


def make_report(
    responses: Sequence[Response], equivalent: Equivalence = operator.eq, seed: int = 0
) -> Report:
    """Every score of the responses, of which there must be at least one.

    Args:
        equivalent: which wrong answers are the same for the majority.
        seed: key of the bootstrap.
    """
    # In file order, so that no sum depends on which response was finished first.
    responses = sorted(responses, key=lambda one: (one.index, one.sample))
    problems = by_problem(responses)
    sizes = np.array([len(samples) for samples in problems])
    listings = [len({one.index for one in samples}) for samples in problems]
    k = int(sizes.min())
    powers = [2**i for i in range(k.bit_length())]
    right = [sum(one.correct for one in samples) for samples in problems]
    table = [
        [c / n, *(pass_at_k(int(n), c, power) for power in powers), _majority(s, k, equivalent)]
        for n, c, s in zip(sizes, right, problems, strict=True)
    ]
    accuracy, *passes, majority = estimates(np.array(table), sizes, seed)
    tokens = sum(one.tokens for one in responses)
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
        response_tokens_right=_mean_of_some([one.tokens for one in responses if one.correct]),
        response_tokens_wrong=_mean_of_some([one.tokens for one in responses if not one.correct]),
        truncated_fraction=_mean([one.truncated for one in responses]),
        answer_not_found_rate=_mean([one.extracted is None for one in responses]),
        verifier_failures=sum(one.failure is not None for one in responses),
        repetition=_mean([one.repetition for one in responses]),
        entropy=-sum(one.logprob for one in responses) / tokens if tokens else None,
        reflection_fraction=_mean([one.reflection for one in responses]),
        reflection=_reflection(problems, seed),
        subjects=_rows(problems, "subject", seed),
        levels=_rows(problems, "level", seed),
    )
