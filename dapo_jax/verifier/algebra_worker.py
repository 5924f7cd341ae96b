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
    conditions,
    negate,
    symbols,
)
from dapo_jax.verifier.expressions import parse
from dapo_jax.verifier.number_field import NumberField
from dapo_jax.verifier.real_sets import FLIPPED, RealSets
from dapo_jax.verifier.roots import content_of
from dapo_jax.verifier.tree_to_element import read as read_tree


class ProvenAlgebra:
    """`Algebra` that parses and proves, within a budget. Raises `Undecided`."""

    def __init__(self, budget: Budget):
        self._budget = budget

    def same(self, kind: str, prediction: str, answer: str) -> bool:
        return getattr(self, f"_same_{kind}")(prediction, answer)

    def _same_value(self, prediction: str, answer: str) -> bool:
        try:
            gold = parse(answer)
            return same_expression(parse(prediction, symbols(gold)), gold, self._budget)
        except Refused:
            return False

    def _same_equation(self, prediction: str, answer: str) -> bool:
        mine, gold = read(prediction), read(answer)
        try:
            return self._proportional(mine, gold) != 0
        except Refused:
            return False

    def _same_region(self, prediction: str, answer: str) -> bool:
        mine, gold = read(prediction), read(answer)
        try:
            if len(_variables(mine) | _variables(gold)) <= 1:
                regions = RealSets(NumberField(self._budget))
                return regions.same(regions.read(mine), regions.read(gold))
        except Refused:
            pass  # then only a factor may differ
        return self._same_inequality(mine, gold)

    def _proportional(self, mine: Node, gold: Node) -> int:
        ours, theirs = _difference(*mine.items), _difference(*gold.items)
        sign = proportional(ours, theirs, self._budget)
        field = NumberField(self._budget)
        return sign if sign and _domain(field, ours) == _domain(field, theirs) else 0

    def _same_inequality(self, mine: Node, gold: Node) -> bool:
        """Test the equality, up to a factor, of two relations in several variables."""
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


def _domain(field: NumberField, tree: Tree) -> set[tuple[str, str]]:
    """Return the conditions of an equation's expressions on its variables, in normal form."""
    asked = set()
    for mark, inside in conditions(tree):
        element = read_tree(field, inside)
        for poly in element if mark == "!=" else ():
            field.budget.spend(50 * len(poly) + int(poly.total_degree()) ** 2)
            asked |= {(mark, str(factor)) for factor, _ in poly.factor()[1]}
        if mark != "!=":
            asked.add((mark, str(field.scale(element, 1 / content_of(element.above)))))
    return asked


def _variables(node: Node) -> set[str]:
    if node.kind == "relation":
        if node.marks == ("in",):
            return {compact(node.items[0].text)} | _variables(node.items[1])
        return set().union(*(symbols(parse(item.text)) for item in node.items))
    return set().union(*(_variables(item) for item in node.items))


def make_algebra() -> Callable[[dict], dict]:
    """Return the function that answers `{"kind", "prediction", "answer", "work"}`.

    The reply is `{"same", "work"}`, the units spent, with `"undecided"` where the budget ended.
    """
    limit_process()

    def answer(job: dict) -> dict:
        budget, reply = Budget(job["work"]), dict[str, object](same=False)
        try:
            algebra = ProvenAlgebra(budget)
            reply["same"] = algebra.same(job["kind"], job["prediction"], job["answer"])
        except Undecided as error:
            reply["undecided"] = str(error)
        except Exception as error:  # not understood is not equal, whatever the reason
            reply["failure"] = repr(error)[:200]
        return reply | {"work": job["work"] - max(0, budget.left)}

    return answer


if __name__ == "__main__":
    serve(make_algebra)
