"""Equality of answers by algebra: values, equations up to a factor, sets of real numbers.

Rational functions are compared exactly; everything else by balls at points that a hash of both
expressions draws. Runs in a worker process.
"""

from collections.abc import Iterable, Iterator

from dapo_jax.extras.math import ball_arithmetic as ball
from dapo_jax.extras.math import expression_tree as trees
from dapo_jax.extras.math.answer_shape import Node
from dapo_jax.extras.math.expression_tree import Budget, Refused, Tree, Undecided, symbols
from dapo_jax.extras.math.expressions import parse
from dapo_jax.extras.math.polynomials import same_rational
from dapo_jax.extras.math.real_sets import RealSets
from dapo_jax.extras.math.sample_points import Point, has_corners, sample_points, whole_letters
from dapo_jax.extras.math.sympy_stage import OPERATORS, closed_form

WORK = 400_000  # units of a verdict; a unit is about a microsecond

ENOUGH_POINTS = 3
MAX_HOLES = 2  # points where an answer has no value though gold has one: 1/(n - 2), (-3)!


def _balls(pair: tuple[Tree, Tree], budget: Budget, *, constant: bool) -> list[ball.Ball] | None:
    """Return both values; None without. Poles raise `Undecided` save for constants."""
    try:
        return [ball.enclose(tree, budget) for tree in pair]
    except ball.Pole:
        if not constant:
            raise Undecided("a pole where none is expected") from None
    except ball.Undefined:
        pass
    return None


def _pairs(
    both: tuple[Tree, Tree], points: Iterable[tuple[Point, bool]], budget: Budget
) -> Iterator[tuple[Tree, Tree] | None]:
    """Yield both expressions at points; None without a value of both.

    For integers, a value may be missing where gold is 0 (a binomial coefficient), and elsewhere at
    two of them; else a value that only gold has raises `Undecided`.
    """
    holes = MAX_HOLES
    for point, is_whole in points:
        own, wanted = (_value(tree, point, budget) for tree in both)
        if own is None and wanted is not None and wanted.whole != 0:
            holes -= 1
            if holes < 0 or not is_whole:
                raise Undecided("no value where gold has one")
        yield None if own is None or wanted is None else (own, wanted)


def _value(tree: Tree, point: Point, budget: Budget) -> Tree | None:
    try:
        return trees.substitute(tree, point, budget)
    except Refused:
        return None


def _vanishes(both: tuple[Tree, Tree], points: list[Point], budget: Budget) -> bool:
    """Test whether a part that depends on the letters is 0 at all of these points."""
    parts = {node for tree in both for node in trees.nodes(tree) if symbols(node)}
    zero = trees.number(0)
    return any(all(_value(part, at, budget) == zero for at in points) for part in parts)


def same_expression(
    given: Tree, gold: Tree, budget: Budget, whole: frozenset[str] = frozenset()
) -> bool:
    """Test the equality for all values of the variables; `whole`: those that are integers.

    Raises:
        Undecided: no ball at no precision shows it.
        Refused: an expression has no value.
    """
    if given == gold:
        return True
    if any(trees.INFINITY in trees.nodes(tree) for tree in (given, gold)):
        raise Refused("infinity is no value")
    if (exact := same_rational(given, gold, budget)) is not None:
        return exact
    is_constant = not symbols(given) | symbols(gold)
    enough = 1 if is_constant else ENOUGH_POINTS
    points = list(sample_points(given, gold, whole_letters(given, gold, whole)))
    for bits in ball.PRECISIONS:
        missed = equal = 0
        seen, too_large = list[Point](), False
        with ball.with_bits(bits):
            pairs = _pairs((given, gold), points, budget)
            for (point, _), pair in zip(points, pairs, strict=True):
                balls = None if pair is None else _balls(pair, budget, constant=is_constant)
                if pair is None or balls is None:
                    missed += 1
                    too_large |= pair is not None
                    continue
                difference = balls[0] - balls[1]
                if ball.is_apart(difference):
                    return False
                seen.append(point)
                is_close = bits > max(map(ball.longest_number, pair))
                is_close &= ball.is_negligible(difference)
                equal += pair[0] == pair[1] or is_close
        # A corner may have a side where the expressions were too large to compare.
        if len(seen) == equal >= enough and not (missed and has_corners(given, gold)):
            # binom(n, 50) is 0 at all integers where e^(63n) is not too large.
            if too_large and _vanishes((given, gold), seen, budget):
                break
            return True
    raise Undecided("neither equal nor different")


def proportional(
    given: Tree, gold: Tree, budget: Budget, whole: frozenset[str] = frozenset()
) -> bool:
    """Test for a real constant c that is not 0 with given = c * gold."""
    if symbols(given) != symbols(gold) or not symbols(given):
        return False
    points = sample_points(given, gold, whole_letters(given, gold, whole))
    for pair in _pairs((given, gold), points, budget):
        with ball.with_bits(ball.PRECISIONS[0]):
            balls = pair and _balls(pair, budget, constant=False)
            if pair is None or balls is None or not all(map(ball.is_apart, balls)):
                continue
            if ball.is_apart(ball.Ball((balls[0] / balls[1]).imag)):
                return False
        scaled = trees.multiply(trees.divide(*pair), gold)
        return same_expression(given, scaled, budget, whole=whole)
    raise Undecided("no constant factor is shown")


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

    def same(self, kind: str, given: Node, gold: Node) -> bool:
        """Test the equality of a 'value', 'equation' or 'region'."""
        self.how = "algebra" if self.how == "direct" else self.how
        try:
            return getattr(self, f"_same_{kind}")(given, gold)
        except Undecided:
            self.how = "undecided"
        except Exception:  # not understood is not equal, whatever the reason
            pass
        return False

    def _same_value(self, given: Node, gold: Node) -> bool:
        wanted = parse(gold.text)
        own = parse(given.text, symbols(wanted))
        try:
            return same_expression(own, wanted, self._budget, whole=self._whole)
        except (Refused, Undecided):
            both = (wanted, own) if self._closes else (wanted,)
            if not any(node.kind in OPERATORS for tree in both for node in trees.nodes(tree)):
                raise
        own, wanted = closed_form(own, self._budget), closed_form(wanted, self._budget)
        return same_expression(own, wanted, self._budget, whole=self._whole)

    def _same_region(self, given: Node, gold: Node) -> bool:
        return RealSets(self._budget).same(given, gold)

    def _same_equation(self, given: Node, gold: Node) -> bool:
        ours, theirs = (
            trees.add([parse(node.items[0].text), trees.negate(parse(node.items[1].text))])
            for node in (given, gold)
        )
        is_same = proportional(ours, theirs, self._budget, self._whole)
        return is_same and {*trees.conditions(ours)} == {*trees.conditions(theirs)}
