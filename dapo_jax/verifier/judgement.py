"""What a worker answers when strings can't decide: the `Algebra` of `equivalence.py`."""

import sympy

from dapo_jax.verifier.algebra import proportional, same_expression, set_precision
from dapo_jax.verifier.bounded import Refused
from dapo_jax.verifier.equivalence import compact
from dapo_jax.verifier.expressions import parse
from dapo_jax.verifier.regions import FLIPPED, region, same_pieces
from dapo_jax.verifier.structure import Node, read


class WorkerAlgebra:
    """The `Algebra` of a worker process."""

    def same_value(self, prediction: str, answer: str) -> bool:
        set_precision(prediction, answer)
        try:
            return same_expression(parse(prediction), parse(answer))
        except Refused:
            return False

    def same_equation(self, prediction: str, answer: str) -> bool:
        set_precision(prediction, answer)
        mine, gold = read(prediction), read(answer)
        try:
            return proportional(_difference(*mine.items), _difference(*gold.items)) != 0
        except Refused:
            return False

    def same_region(self, prediction: str, answer: str) -> bool:
        set_precision(prediction, answer)
        mine, gold = read(prediction), read(answer)
        try:
            variables = _variables(mine) | _variables(gold)
            if len(variables) <= 1:
                return same_pieces(region(mine), region(gold))
        except (Refused, TypeError, ValueError, NotImplementedError):
            pass  # sympy raises these for sets that it can't build; then only a factor may differ
        return _same_inequality(mine, gold)


def _difference(left: Node, right: Node) -> sympy.Expr:
    return parse(left.text) - parse(right.text)


def _variables(node: Node) -> set[str]:
    if node.kind == "relation":
        if node.marks == ("in",):
            return {compact(node.items[0].text)} | _variables(node.items[1])
        return {str(s) for item in node.items for s in parse(item.text).free_symbols}
    return set().union(*(_variables(item) for item in node.items))


def _same_inequality(mine: Node, gold: Node) -> bool:
    """Both one relation in several variables, equal up to a factor."""
    if not (mine.kind == gold.kind == "relation" and len(mine.marks) == len(gold.marks) == 1):
        return False
    if mine.marks[0] not in FLIPPED or gold.marks[0] not in FLIPPED:
        return False
    try:
        sign = proportional(_difference(*mine.items), _difference(*gold.items))
    except Refused:
        return False
    wanted = gold.marks[0] if sign > 0 else FLIPPED[gold.marks[0]]
    return sign != 0 and mine.marks[0] == wanted
