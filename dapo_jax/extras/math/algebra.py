"""Equality of two expressions, and of equations up to a factor.

Rational functions are compared exactly; everything else by balls at points that a hash of both
expressions draws. Runs in a worker process.
"""

from collections.abc import Iterable, Iterator

from dapo_jax.extras.math import expression_tree as trees
from dapo_jax.extras.math.ball_arithmetic import (
    PRECISIONS,
    Ball,
    Pole,
    Undefined,
    enclose,
    is_apart,
    is_negligible,
    longest_number,
    with_bits,
)
from dapo_jax.extras.math.expression_tree import Budget, Refused, Tree, Undecided
from dapo_jax.extras.math.polynomials import same_rational
from dapo_jax.extras.math.sample_points import Point, corners, sample_points, whole_letters

ENOUGH_POINTS = 3
MAX_HOLES = 2  # points where an answer has no value though gold has one: 1/(n - 2), (-3)!
Pair = tuple[Tree | None, Tree | None, Point]  # constants; None without one that can be written out


def _at(tree: Tree, point: Point, budget: Budget) -> Tree | None:
    try:
        return trees.substitute(tree, point, budget)
    except Refused:
        return None


def _pairs(
    mine: Tree, gold: Tree, points: Iterable[tuple[Point, bool]], budget: Budget
) -> Iterator[Pair]:
    """Yield both expressions at the points; raise `Undecided` if only gold has values there.

    For integers, a value may be missing where gold is 0 (a binomial coefficient), and elsewhere
    at two of them.
    """
    allowed_holes = MAX_HOLES
    for point, is_whole in points:
        own, wanted = _at(mine, point, budget), _at(gold, point, budget)
        if own is None and wanted is not None and wanted.whole != 0:
            allowed_holes -= 1
            if allowed_holes < 0 or not is_whole:
                raise Undecided("no value where gold has one")
        yield own, wanted, point


def _balls(
    own: Tree | None, wanted: Tree | None, budget: Budget, *, constant: bool
) -> tuple[Ball, Ball] | None:
    """Return the values of a pair; None without. Poles raise `Undecided` save for constants."""
    if own is None or wanted is None:
        return None
    try:
        return enclose(own, budget), enclose(wanted, budget)
    except Pole:
        if not constant:
            raise Undecided("a pole where none is expected") from None
    except Undefined:
        pass
    return None


def same_expression(
    mine: Tree,
    gold: Tree,
    budget: Budget,
    points: list[Point] | None = None,
    whole: frozenset[str] = frozenset(),
) -> bool:
    """Test the equality for all values of the variables.

    Args:
        points: where the expressions are compared; by default at points for all real numbers.
        whole: variables that stand for integers.

    Raises:
        Undecided: no ball at no precision shows it.
        Refused: an expression has no value.
    """
    if mine == gold:
        return True
    if mine.kind == gold.kind == "number":
        return mine.value == gold.value
    if any(node.kind == "infinity" for tree in (mine, gold) for node in trees.nodes(tree)):
        raise Refused("infinity is no value")
    if points is None and (exact := same_rational(mine, gold, budget)) is not None:
        return exact
    has_names = bool(trees.symbols(mine) | trees.symbols(gold))
    enough = ENOUGH_POINTS if has_names and points is None else 1
    if points is None:
        drawn = sample_points(mine, gold, whole_letters(mine, gold, whole))
    else:
        drawn = ((point, False) for point in points)
    pairs = _pairs(mine, gold, drawn, budget)
    for bits in PRECISIONS:
        kept, seen, missed, equal = [], [], [], 0
        with with_bits(bits):
            for own, wanted, point in pairs:
                kept.append((own, wanted, point))
                if (balls := _balls(own, wanted, budget, constant=not has_names)) is None:
                    missed.append(point)
                    continue
                if is_apart(balls[0] - balls[1]):
                    return False
                seen.append(point)
                is_close = is_negligible(balls[0] - balls[1])
                equal += own == wanted or is_close and bits > _longest(own, wanted)
        if len(seen) == equal >= enough and _sees_all_sides((mine, gold), seen, missed, budget):
            return True
        pairs = kept
    raise Undecided("neither equal nor different")


def _longest(*constants: Tree | None) -> int:
    return max(longest_number(tree) for tree in constants if tree is not None)


def _sees_all_sides(
    both: tuple[Tree, Tree], seen: list[Point], missed: list[Point], budget: Budget
) -> bool:
    """Test that no corner has a side where the expressions were too large to compare."""
    for inside in {inside for tree in both for inside in corners(tree)} if missed else ():
        sides = [{_side(inside, point, budget) for point in points} for points in (seen, missed)]
        if sides[1] - sides[0] - {None}:
            return False
    return True


def _side(inside: Tree, point: Point, budget: Budget) -> int | None:
    """Return the sign of a corner's argument, of a floor itself; None if it is not known."""
    try:
        with with_bits(PRECISIONS[0]):
            value = enclose(trees.substitute(inside, point, budget), budget).real
    except (Undefined, Refused):
        return None
    if inside.kind in ("floor", "ceiling"):
        whole = value.mid().unique_fmpz()
        return None if whole is None else int(whole)
    return 1 if value > 0 else -1 if value < 0 else None


def proportional(
    mine: Tree, gold: Tree, budget: Budget, whole: frozenset[str] = frozenset()
) -> int:
    """Return the sign of the real constant c with mine = c * gold; 0 if there is none."""
    if trees.symbols(mine) != trees.symbols(gold) or not trees.symbols(mine):
        return 0
    points = sample_points(mine, gold, whole_letters(mine, gold, whole))
    for own, wanted, _ in _pairs(mine, gold, points, budget):
        with with_bits(PRECISIONS[0]):
            balls = _balls(own, wanted, budget, constant=False)
            if balls is None or not all(map(is_apart, balls)):
                continue
            ratio = balls[0] / balls[1]
        if is_apart(Ball(ratio.imag)) or own is None or wanted is None:
            return 0
        scaled = trees.multiply(trees.divide(own, wanted), gold)
        is_same = same_expression(mine, scaled, budget, whole=whole)
        return is_same * (1 if ratio.real > 0 else -1)
    raise Undecided("no constant factor is shown")
