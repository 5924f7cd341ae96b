"""Equality of two expressions, and of equations up to a factor.

Rational functions are compared exactly; everything else by balls at points that a hash of both
expressions draws. Runs in a worker process.
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from dapo_jax.verifier.ball_arithmetic import (
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
from dapo_jax.verifier.expression_tree import (
    Budget,
    NoValue,
    Refused,
    Tree,
    Undecided,
    nodes,
    substitute,
    symbols,
)
from dapo_jax.verifier.polynomials import same_rational
from dapo_jax.verifier.sample_points import Point, has_integers, sample_points

ENOUGH_POINTS = 3
MAX_HOLES = 2  # points where an answer has no value though gold has one: 1/(n - 2), (-3)!


class Pair(NamedTuple):
    """Two expressions at one point, as constants."""

    mine: Tree
    gold: Tree


def _at(tree: Tree, point: Point, budget: Budget) -> Tree | None:
    """Return the tree at a point; None for a large value. Raises `Pole`."""
    try:
        return substitute(tree, point, budget)
    except NoValue as error:
        raise Pole(str(error)) from None
    except Refused:
        return None


def _pairs(mine: Tree, gold: Tree, points: Iterable[Point], budget: Budget) -> Iterator[Pair]:
    """Yield the expressions at the points where both have values.

    Raises:
        Undecided: there is a division by zero where nothing explains it.
    """
    holes, is_whole = 0, has_integers(mine, gold)
    for point in points:
        own = wanted = None
        try:
            wanted = _at(gold, point, budget)
            own = _at(mine, point, budget)
        except Pole:
            if not is_whole:
                raise Undecided("a pole where none is expected") from None
        if own is not None and wanted is not None:
            yield Pair(own, wanted)
        elif wanted is not None:
            holes += is_whole
            if holes > MAX_HOLES:
                raise Undecided("no value at whole numbers")


def _balls(pair: Pair, budget: Budget, *, constant: bool) -> tuple[Ball, Ball] | None:
    """Return the values of a pair; None if they have none at these bits.

    Raises:
        Undecided: there is a division by what may be zero; for constants, more bits are tried.
    """
    try:
        return enclose(pair.mine, budget), enclose(pair.gold, budget)
    except Pole:
        if not constant:
            raise Undecided("a pole where none is expected") from None
    except Undefined:
        pass
    return None


def same_expression(
    mine: Tree, gold: Tree, budget: Budget, points: list[Point] | None = None
) -> bool:
    """Test the equality for all values of the variables.

    Args:
        points: where the expressions are compared; by default at points for all real numbers.

    Raises:
        Undecided: no ball at no precision shows it.
        Refused: an expression has no value.
    """
    if mine == gold:
        return True
    if mine.kind == gold.kind == "number":
        return mine.value == gold.value
    if any(node.kind == "infinity" for tree in (mine, gold) for node in nodes(tree)):
        raise Refused("infinity is no value")
    if points is None and (exact := same_rational(mine, gold, budget)) is not None:
        return exact
    has_names = bool(symbols(mine) | symbols(gold))
    enough = ENOUGH_POINTS if has_names and points is None else 1
    pairs = _pairs(mine, gold, sample_points(mine, gold) if points is None else points, budget)
    for bits in PRECISIONS:
        kept, seen, equal = [], 0, 0
        with with_bits(bits):
            for pair in pairs:
                kept.append(pair)
                if pair.mine == pair.gold:
                    seen, equal = seen + 1, equal + 1
                    continue
                balls = _balls(pair, budget, constant=not has_names)
                if balls is None:
                    continue
                if is_apart(balls[0] - balls[1]):
                    return False
                seen += 1
                is_shown = bits > max(map(longest_number, pair))
                equal += is_shown and is_negligible(balls[0] - balls[1])
        if seen == equal and seen >= enough:
            return True
        pairs = kept
    raise Undecided("neither equal nor different")


def proportional(mine: Tree, gold: Tree, budget: Budget) -> int:
    """Return the sign of the real constant c with mine = c * gold; 0 if there is none."""
    if symbols(mine) != symbols(gold) or not symbols(mine):
        return 0
    pairs: Iterable[Pair] = _pairs(mine, gold, sample_points(mine, gold), budget)
    for bits in PRECISIONS:
        kept, ratios, longest = [], [], 0
        with with_bits(bits):
            for pair in pairs:
                kept.append(pair)
                balls = _balls(pair, budget, constant=False)
                if balls is None or not all(map(is_apart, balls)):
                    continue
                ratios.append(balls[0] / balls[1])
                longest = max(longest, *map(longest_number, pair))
                if is_apart(ratios[-1] - ratios[0]) or is_apart(Ball(ratios[-1].imag)):
                    return 0
            if len(ratios) >= ENOUGH_POINTS and bits > longest:
                if all(is_negligible(ratio - ratios[0]) for ratio in ratios):
                    return 1 if ratios[0].real > 0 else -1
        pairs = kept
    raise Undecided("no constant factor is shown")
