"""Equality of answers by algebra: values, equations, sets of real numbers."""

from dapo_jax.extras.math import expression_tree as trees
from dapo_jax.extras.math.algebra import proportional, same_expression
from dapo_jax.extras.math.answer_shape import Node
from dapo_jax.extras.math.expression_tree import Budget, Refused, Undecided, symbols
from dapo_jax.extras.math.expressions import parse
from dapo_jax.extras.math.real_sets import RealSets
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
        self._budget, self._closes = budget, closes
        self._whole, self.how = whole, "direct"

    def same(self, kind: str, mine: Node, gold: Node) -> bool:
        """Test the equality of a 'value', 'equation' or 'region'."""
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

    def _same_region(self, mine: Node, gold: Node) -> bool:
        return RealSets(self._budget).same(mine, gold)

    def _same_equation(self, mine: Node, gold: Node) -> bool:
        ours, theirs = (
            trees.add([parse(node.items[0].text), trees.negate(parse(node.items[1].text))])
            for node in (mine, gold)
        )
        is_same = proportional(ours, theirs, self._budget, self._whole)
        return is_same and {*trees.conditions(ours)} == {*trees.conditions(theirs)}
