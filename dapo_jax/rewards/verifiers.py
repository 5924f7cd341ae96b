"""Built-in verifiers as `contracts.Verifier`: the rules of `verifier.VERIFIERS` and their options.

A user's function of the same signature can replace one in `RewardPool`.
"""

from collections.abc import Callable

from dapo_jax.config.experiment import Reward
from dapo_jax.contracts import Verifier, VerifierResult
from dapo_jax.runtime.workers.parent import RestartingWorker
from dapo_jax.verifier.algebra_process import Memory, RemoteAlgebra
from dapo_jax.verifier.answer_conventions import as_percentage, is_unfinished
from dapo_jax.verifier.equivalence import decide, gold_answer
from dapo_jax.verifier.verifier import BY_VALUE, VERIFIERS

MakeVerifier = Callable[[RestartingWorker], Verifier]  # from the algebra process of a thread


def builtin_verifier(reward: Reward) -> MakeVerifier:
    """Return the maker of the verifier that the settings name."""
    rule = VERIFIERS[reward.verifier]
    memory = Memory()

    def make(worker: RestartingWorker) -> Verifier:
        def verify(response: str, gold: str, prompt: str) -> VerifierResult:
            algebra = RemoteAlgebra(worker, memory, reward.timeout_seconds)
            correct, extracted, decided = rule(response, gold, algebra)
            value = extracted if reward.verifier in BY_VALUE else None
            if value is not None and not correct and reward.percent == "as_asked":
                number = as_percentage(value, prompt)
                correct = number is not None and decide(number, gold_answer(gold), algebra)
            if value is not None and correct and reward.unfinished == "wrong":
                if is_unfinished(value, gold_answer(gold), prompt):
                    return VerifierResult(False, extracted, "unfinished")
            if extracted is not None:
                decided = _how_decided(algebra, correct)
            return VerifierResult(correct, extracted, decided)

        return verify

    return make


def _how_decided(algebra: RemoteAlgebra, correct: bool) -> str:
    if algebra.undecided and not correct:
        return "undecided"
    if algebra.asked:
        return "algebra"
    return "remembered" if algebra.remembered else "direct"
