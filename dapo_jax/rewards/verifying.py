"""Verifiers behind one interface: verdicts on responses, in processes that can be killed."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from dapo_jax.config.experiment import Reward
from dapo_jax.config.user_code import resolve
from dapo_jax.rewards.functions import ResponseCall, make_failure
from dapo_jax.runtime import registry
from dapo_jax.runtime.workers.parent import (
    BUSY_FACTOR,
    ComputedTooLong,
    Limits,
    RestartingWorker,
)
from dapo_jax.types.contracts import VerifierResult
from dapo_jax.types.errors import require
from dapo_jax.types.structs import SLOW, Outcome, Verdict, WantedColumns

WORKER = "dapo_jax.rewards.worker"
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
        together: responses of one exchange with a process.
        reads_answers: False if rows need no gold answer.
    """

    together = 1
    reads_answers = True

    def __init__(self, reward: Reward):
        self.reward = reward

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


def find_verifier(name: str) -> Any:
    """Return the plug-in of a verifier: a subclass of `Verifying`, or a function.

    Raises `ConfigError` for an unknown name.
    """
    known = registry.names("verifiers")
    allowed = f"{', '.join(known)} or module:function"
    require(name in known or ":" in name, "reward.verifier", name, allowed)
    return registry.find("verifiers", name) or resolve("reward.verifier", name)


def open_verifier(reward: Reward) -> Verifying:
    """Return the verifier of a run. Raises `ConfigError`."""
    found = find_verifier(reward.verifier)
    if isinstance(found, type) and issubclass(found, Verifying):
        return found(reward)
    require(callable(found), "reward.verifier", reward.verifier, "a function")
    return FunctionVerifier(reward)
