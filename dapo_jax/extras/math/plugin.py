"""The mathematical verifiers as a plug-in: verdicts from `algebra_worker`'s processes."""

from collections.abc import Sequence

from dapo_jax.config.experiment import Reward
from dapo_jax.extras.math.algebra_process import WORKER, same_answer, verify
from dapo_jax.extras.math.gold_reading import in_form, read_gold
from dapo_jax.extras.math.normalisation import normalise
from dapo_jax.extras.math.numerals import read_number
from dapo_jax.extras.math.verifier import Question, Settings
from dapo_jax.rewards.functions import ResponseCall
from dapo_jax.rewards.verifying import Reading, Verifying, Workers, verdict_of
from dapo_jax.runtime.workers.parent import RestartingWorker
from dapo_jax.types.structs import Verdict


class MathVerifying(Verifying):
    """`final_number`, `math`, `math_box`, `math_label` and `dapo`."""

    together = 64

    def __init__(self, reward: Reward):
        super().__init__(reward)
        self._settings = Settings(reward.verifier, reward.percent, reward.unfinished)

    def open(self) -> Workers:
        return (RestartingWorker(WORKER),)

    def verify(self, workers: Workers, calls: Sequence[ResponseCall]) -> list[Verdict]:
        questions = [Question(call.response, call.answer, call.prompt) for call in calls]
        results = verify(workers[0], self._settings, questions, self.reward.timeout_seconds)
        return list(map(verdict_of, results))

    def same_answer(self, answer: str, other: str) -> bool:
        return same_answer(answer, other)

    def read_gold(self, gold: str) -> Reading:
        return read_gold(self.reward.verifier, gold)

    def responses_to(self, gold: str) -> dict[str, str]:
        name, number = self.reward.verifier, read_number(normalise(gold))
        responses = {"gold in its form": in_form(name, gold), "gold alone": gold}
        responses["a wrong number"] = in_form(name, str(-1 if number is None else number + 1))
        if number is not None and number.denominator == 1:
            responses["gold, not worked out"] = in_form(name, f"{number + 1}-1")
        return responses
