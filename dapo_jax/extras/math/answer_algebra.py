"""Equality of answers by algebra: values, equations, sets of real numbers, functions by cases."""

import itertools

from dapo_jax.extras.math import expression_tree as trees
from dapo_jax.extras.math.algebra import proportional, same_expression
from dapo_jax.extras.math.answer_shape import Node, is_by_cases
from dapo_jax.extras.math.expression_tree import Budget, Refused, Tree, Undecided, symbols
from dapo_jax.extras.math.expressions import parse
from dapo_jax.extras.math.polynomials import NotRational, RationalFunctions
from dapo_jax.extras.math.real_sets import EVERYTHING, RealSets, Region
from dapo_jax.extras.math.sympy_stage import OPERATORS, closed_form

WORK = 400_000  # units of a verdict; a unit is about a microsecond


class Algebra:
    """Decisions of one verdict that strings can't make, within a budget of work.

    Args:
        closes: a prediction's sums and integrals may be worked out; else only if gold has some,
            since they are unfinished beside any other gold.
        whole: variables that stand for integers.

    Attributes:
        how: how the verdict was decided: 'direct', 'algebra', 'undecided'.
    """

    def __init__(self, budget: Budget, *, closes: bool = True, whole: frozenset[str] = frozenset()):
        self._budget, self._regions, self._closes = budget, RealSets(budget), closes
        self._whole, self.how = whole, "direct"

    def same(self, kind: str, mine: Node, gold: Node) -> bool:
        """Test the equality of a 'value', 'equation', 'region' or 'cases'."""
        self.how = "algebra" if self.how == "direct" else self.how
        try:
            return getattr(self, f"_same_{kind}")(mine, gold)
        except Undecided:
            self.how = "undecided"
        except Exception:  # not understood is not equal, whatever the reason
            pass
        return False

    def _same_value(self, mine: Node, gold: Node) -> bool:
        wanted = parse(gold.text)
        own = parse(mine.text, symbols(wanted))
        try:
            return same_expression(own, wanted, self._budget, whole=self._whole)
        except (Refused, Undecided):
            both = (wanted, own) if self._closes else (wanted,)
            if not any(node.kind in OPERATORS for tree in both for node in trees.nodes(tree)):
                raise
        own, wanted = closed_form(own, self._budget), closed_form(wanted, self._budget)
        return same_expression(own, wanted, self._budget, whole=self._whole)

    def _same_cases(self, mine: Node, gold: Node) -> bool:
        ours, theirs = self._branches(mine), self._branches(gold)
        names = set().union(*(symbols(value) for _, value in ours + theirs))
        regions = self._regions
        covered = [regions.combine(any, *(region for region, _ in side)) for side in (ours, theirs)]
        if len(names) > 1 or not regions.same(*covered):
            return False
        for (region, value), (other, wanted) in itertools.product(ours, theirs):
            shared = regions.combine(all, region, other)
            cells = [cell for cell, is_member in enumerate(shared.cells) if is_member]
            numbers = (number for cell in cells for number in regions.inside(shared, cell, 2))
            points = [dict.fromkeys(names, number) for number in numbers]
            if points and not same_expression(value, wanted, self._budget, points):
                return False
        return True

    def _branches(self, node: Node) -> list[tuple[Region, Tree]]:
        """Return the regions of a function by cases, each without earlier ones, and its values."""
        if not is_by_cases(node):
            return [(EVERYTHING, parse(node.text))]
        branches, left = [], EVERYTHING
        for value, condition in (row.items for row in node.items):
            region = left
            if condition.text != "otherwise":
                region = self._regions.combine(all, left, self._regions.read(condition))
            branches.append((region, parse(value.text)))
            left = self._regions.without(left, region)
        return branches

    def _same_region(self, mine: Node, gold: Node) -> bool:
        return self._regions.same(self._regions.read(mine), self._regions.read(gold))

    def _same_equation(self, mine: Node, gold: Node) -> bool:
        ours, theirs = _difference(*mine.items), _difference(*gold.items)
        if not proportional(ours, theirs, self._budget, self._whole):
            return False
        field = RationalFunctions(self._budget)
        return _domain(field, ours) == _domain(field, theirs)


def _difference(left: Node, right: Node) -> Tree:
    return trees.add([parse(left.text), trees.negate(parse(right.text))])


def _domain(field: RationalFunctions, tree: Tree) -> set[tuple[str, str]]:
    """Return the conditions of an equation's expressions on its variables, in normal form."""
    asked = set()
    for mark, inside in trees.conditions(tree):
        try:
            asked |= {(mark, factor) for factor in field.factors(inside)}
        except NotRational:
            asked.add((mark, repr(inside)))
    return asked
