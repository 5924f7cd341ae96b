"""Verifiers, and scorers of a problem's source, in processes that can be killed."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from dapo_jax.config.experiment import Reward
from dapo_jax.config.settings import open_extras
from dapo_jax.rewards.functions import GYM, PartsReply, ResponseCall, make_failure
from dapo_jax.runtime import registry
from dapo_jax.runtime.user_code import resolve
from dapo_jax.runtime.workers.parent import (
    BUSY_FACTOR,
    ComputedTooLong,
    Limits,
    RestartingWorker,
)
from dapo_jax.types.contracts import VerifierResult
from dapo_jax.types.errors import require
from dapo_jax.types.structs import (
    SLOW,
    Outcome,
    Problem,
    Prompt,
    Verdict,
    WantedColumns,
    reaches,
)

WORKER = "dapo_jax.rewards.worker"
SCORE_SECONDS = 2.0  # of CPU time for one score of a source's scorer
SCORER_ERROR = "scorer_error"  # `Verdict.decided` of an answer on which the scorer raised
Workers: TypeAlias = tuple[RestartingWorker, ...]


class Reading(NamedTuple):
    """Reading of a gold answer.

    Attributes:
        kind: number, integer, list, expression, words, ...; unreadable: no response is ever right;
            text: none is but the same text.
        shown: what was read.
    """

    kind: str
    shown: str


class Verifying:
    """A verifier of a run; plug-ins of the kind `verifiers` that need more than a function inherit.

    Attributes:
        together: maximum number of responses of one `verify`; if it is more than one, `verify`
            itself makes the second try for a response without a verdict.
        reads_answers: False if rows need no gold answer.
    """

    together = 1
    reads_answers = True

    def __init__(self, reward: Reward, extras: Any):
        self.reward, self.extras = reward, extras

    def open(self) -> Workers:
        """Return the processes of one thread; they start with their first job."""
        return ()

    def verify(self, workers: Workers, calls: Sequence[ResponseCall]) -> list[Verdict]:
        """Return the verdicts on responses; never raise for their texts."""
        raise NotImplementedError

    def same_answer(self, answer: str, other: str) -> bool:
        """Test whether two extracted answers are the same, for votes."""
        return answer == other

    def columns(self, wanted: WantedColumns) -> WantedColumns:
        """Add the columns of a row that verdicts need."""
        return wanted

    def read_gold(self, gold: str) -> Reading:
        """Return what the verifier makes of a gold answer."""
        return Reading("text", gold)

    def responses_to(self, gold: str) -> Mapping[str, str]:
        """Return short responses for a dry run, by what they are; the first one is correct."""
        return {"gold alone": gold}


def verdict_of(result: VerifierResult | Exception) -> Verdict:
    """Return the verdict of a verifier's result, or of the error of its process."""
    if isinstance(result, ComputedTooLong):  # the text's own fault
        return Verdict(False, None, decided=SLOW)
    if isinstance(result, Exception):
        return Verdict(False, None, make_failure(result, Outcome.CRASH))
    correct, extracted, decided = result
    return Verdict(correct, extracted, None, {}, decided=decided)


class FunctionVerifier(Verifying):
    """A function `(response, gold, prompt) -> VerifierResult`, called in a worker process."""

    def open(self) -> Workers:
        return (RestartingWorker(WORKER, "verifier", self.reward.verifier),)

    def verify(self, workers: Workers, calls: Sequence[ResponseCall]) -> list[Verdict]:
        return [verdict_of(self._ask(workers[0], call)) for call in calls]

    def _ask(self, worker: RestartingWorker, call: ResponseCall) -> VerifierResult | Exception:
        seconds = self.reward.timeout_seconds
        limits = Limits(BUSY_FACTOR * seconds, computing=seconds)
        job = {"response": call.response, "gold": call.answer, "prompt": call.prompt}
        try:
            reply = worker.ask(job, limits)
        except Exception as error:
            return error
        if text := reply.get("error"):
            return RuntimeError(text)
        return VerifierResult(*reply["result"])


class ScoreRequest(NamedTuple):
    """An answer to score; without metadata, only the scorer is loaded."""

    source: str
    metadata: str | None = None
    answer: str | None = None


def find_source(name: str) -> Any:
    """Return the plug-in of a problem's source, as of `gym:TASK`, or None."""
    return registry.find("sources", name.partition(":")[0])


@functools.lru_cache(maxsize=64)
def scores(source: str) -> bool:
    """Return True if the source of a problem scores answers itself."""
    return hasattr(find_source(source), "score")


def open_workers(verifying: Verifying) -> Workers:
    """Return the processes of one thread, for `verify_and_score`."""
    return (RestartingWorker(WORKER, "scores"), *verifying.open())


def verify_and_score(
    verifying: Verifying, workers: Workers, jobs: Sequence[tuple[Prompt | Problem, ResponseCall]]
) -> list[Verdict]:
    """Return the verdicts on responses; the verifier's, or of the problem's own scorer."""
    calls = [call for _, call in jobs]
    try:
        verdicts = verifying.verify(workers[1:], calls)
        if verifying.together == 1 and verdicts[0].failure:
            verdicts = verifying.verify(workers[1:], calls)
        prompts, seconds = [prompt for prompt, _ in jobs], verifying.reward.timeout_seconds
        pairs = zip(prompts, verdicts, strict=True)
        return [_score_answer(workers[0], *pair, seconds) for pair in pairs]
    except Exception as error:
        return [Verdict(False, None, make_failure(error, Outcome.CRASH)) for _ in calls]


def _score_answer(
    worker: RestartingWorker, prompt: Prompt | Problem, verdict: Verdict, seconds: float
) -> Verdict:
    """Return the verdict of the problem's own scorer on the extracted answer."""
    if verdict.failure or not (prompt.metadata and scores(prompt.source)):
        return verdict
    job = ScoreRequest(prompt.source, prompt.metadata, verdict.extracted)._asdict()
    first = ScoreRequest(prompt.source)._asdict()
    limits = Limits(seconds, BUSY_FACTOR * seconds, min(seconds, SCORE_SECONDS))
    reply, how = PartsReply({}), "scorer"
    try:
        reply = PartsReply.from_json(worker.ask(job, limits, first))
        how = how if reply.parts or reply.failure else SCORER_ERROR
    except ComputedTooLong:  # the answer's own fault
        how = SLOW
    except (OSError, ValueError, TypeError) as error:
        reply = PartsReply({}, make_failure(error, Outcome.CRASH))
    score = reply.parts.get(GYM, 0.0)
    decided = verdict.decided if verdict.extracted is None else how
    correct = bool(reaches(score, 1.0, 0.0))
    return Verdict(correct, verdict.extracted, reply.failure, {GYM: score}, decided=decided)


def find_verifier(name: str) -> Any:
    """Return the plug-in of a verifier: a subclass of `Verifying`, or a function.

    Raises `ConfigError` for an unknown name.
    """
    known = registry.names("verifiers")
    allowed = f"{', '.join(known)} or module:function"
    require(name in known or ":" in name, "reward.verifier", name, allowed)
    return registry.find("verifiers", name) or resolve("reward.verifier", name)


def open_verifier(reward: Reward, extras: Any = None) -> Verifying:
    """Return the verifier of a run. Raises `ConfigError`."""
    found, extras = find_verifier(reward.verifier), extras or open_extras()
    if isinstance(found, type) and issubclass(found, Verifying):
        return found(reward, extras)
    require(callable(found), "reward.verifier", reward.verifier, "a function")
    return FunctionVerifier(reward, extras)
