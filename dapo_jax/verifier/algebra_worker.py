"""Worker process of the verifier: the `Algebra` of `equivalence.py`, by proof.

`python -m dapo_jax.verifier.algebra_worker` serves one JSON line per question.
"""

from collections.abc import Callable

from dapo_jax.runtime.workers.child import limit_process, serve
from dapo_jax.verifier.algebra import proportional, same_expression
from dapo_jax.verifier.answer_shape import Node, read
from dapo_jax.verifier.equivalence import compact
from dapo_jax.verifier.expression_tree import (
    Budget,
    Refused,
    Tree,
    Undecided,
    add,
    negate,
    symbols,
)
from dapo_jax.verifier.expressions import parse
from dapo_jax.verifier.number_field import NumberField
from dapo_jax.verifier.real_sets import FLIPPED, RealSets


class ProvenAlgebra:
    """`Algebra` that parses and proves, within a budget. Raises `Undecided`."""

    def __init__(self, budget: Budget):
        self._budget = budget

    def same_value(self, prediction: str, answer: str) -> bool:
        try:
            return same_expression(parse(prediction), parse(answer), self._budget)
        except Refused:
            return False

    def same_equation(self, prediction: str, answer: str) -> bool:
        mine, gold = read(prediction), read(answer)
        try:
            return self._proportional(mine, gold) != 0
        except Refused:
            return False

    def same_region(self, prediction: str, answer: str) -> bool:
        mine, gold = read(prediction), read(answer)
        try:
            if len(_variables(mine) | _variables(gold)) <= 1:
                regions = RealSets(NumberField(self._budget))
                return regions.same(regions.read(mine), regions.read(gold))
        except Refused:
            pass  # then only a factor may differ
        return self._same_inequality(mine, gold)

    def _proportional(self, mine: Node, gold: Node) -> int:
        return proportional(_difference(*mine.items), _difference(*gold.items), self._budget)

    def _same_inequality(self, mine: Node, gold: Node) -> bool:
        """Equality, up to a factor, of two relations in several variables."""
        if not (mine.kind == gold.kind == "relation" and len(mine.marks) == len(gold.marks) == 1):
            return False
        if mine.marks[0] not in FLIPPED or gold.marks[0] not in FLIPPED:
            return False
        try:
            sign = self._proportional(mine, gold)
        except Refused:
            return False
        wanted = gold.marks[0] if sign > 0 else FLIPPED[gold.marks[0]]
        return sign != 0 and mine.marks[0] == wanted


def _difference(left: Node, right: Node) -> Tree:
    return add([parse(left.text), negate(parse(right.text))])


def _variables(node: Node) -> set[str]:
    if node.kind == "relation":
        if node.marks == ("in",):
            return {compact(node.items[0].text)} | _variables(node.items[1])
        return set().union(*(symbols(parse(item.text)) for item in node.items))
    return set().union(*(_variables(item) for item in node.items))


def make_algebra() -> Callable[[dict], dict]:
    """Function that answers `{"question", "prediction", "answer", "work"}`.

    The reply is `{"same", "work"}`, the units spent, with `"undecided"` where the budget ended.
    """
    limit_process()

    def answer(job: dict) -> dict:
        budget, reply = Budget(job["work"]), dict[str, object](same=False)
        try:
            algebra = ProvenAlgebra(budget)
            reply["same"] = getattr(algebra, job["question"])(job["prediction"], job["answer"])
        except Undecided as error:
            reply["undecided"] = str(error)
        except Exception as error:  # not understood is not equal, whatever the reason
            reply["failure"] = repr(error)[:200]
        return reply | {"work": job["work"] - max(0, budget.left)}

    return answer


if __name__ == "__main__":
    serve(make_algebra)
