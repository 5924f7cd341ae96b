"""Equality of two expressions, and of equations up to a factor.

Rational functions are compared exactly; everything else by balls at points that a hash of both
expressions draws. Runs in a worker process.
"""

import contextlib
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
from dapo_jax.verifier.sample_points import Point, corners, has_integers, sample_points

ENOUGH_POINTS = 3
MAX_HOLES = 2  # points where an answer has no value though gold has one: 1/(n - 2), (-3)!


class Pair(NamedTuple):
    """Two expressions at one point, as constants; None for what is too large to write out."""

    mine: Tree | None
    gold: Tree | None
    point: Point


def _at(tree: Tree, point: Point, budget: Budget) -> Tree | None:
    """Return the tree at a point; None for a large value. Raises `Pole`."""
    try:
        return substitute(tree, point, budget)
    except NoValue as error:
        raise Pole(str(error)) from None
    except Refused:
        return None


def _pairs(mine: Tree, gold: Tree, points: Iterable[Point], budget: Budget) -> Iterator[Pair]:
    """Yield the values of both expressions at the points at which both have one.

    Raises:
        Undecided: there is a division by zero where nothing explains it.
    """
    holes, is_whole = 0, has_integers(mine, gold)
    for point in points:
        try:
            wanted = _at(gold, point, budget)
        except Pole:
            if is_whole:
                continue
            raise Undecided("a pole where none is expected") from None
        own = None
        with contextlib.suppress(Pole):
            own = _at(mine, point, budget)
        if own is None and wanted is not None:
            holes += 1
            if not is_whole or holes > MAX_HOLES:
                raise Undecided("no value where gold has one")
        else:
            yield Pair(own, wanted, point)


def _balls(pair: Pair, budget: Budget, *, constant: bool) -> tuple[Ball, Ball] | None:
    """Return the values of a pair; None if they have none at these bits.

    Raises:
        Undecided: there is a division by what may be zero; for constants, more bits are tried.
    """
    if pair.mine is None or pair.gold is None:
        return None
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
        kept, seen, missed, equal = [], [], [], 0
        with with_bits(bits):
            for pair in pairs:
                kept.append(pair)
                balls = _balls(pair, budget, constant=not has_names)
                if balls is None:
                    missed.append(pair.point)
                    continue
                if is_apart(balls[0] - balls[1]):
                    return False
                seen.append(pair.point)
                is_same = pair.mine == pair.gold
                is_shown = bits > _longest(pair) and is_negligible(balls[0] - balls[1])
                equal += is_same or is_shown
        if len(seen) == equal >= enough and _sees_all_sides((mine, gold), seen, missed, budget):
            return True
        pairs = kept
    raise Undecided("neither equal nor different")


def _longest(pair: Pair) -> int:
    return max(longest_number(tree) for tree in (pair.mine, pair.gold) if tree is not None)


def _sees_all_sides(
    trees: tuple[Tree, Tree], seen: list[Point], missed: list[Point], budget: Budget
) -> bool:
    """Test that no corner has a side where the expressions were too large to compare."""
    insides = {inside for tree in trees for inside in corners(tree)} if missed else set()
    for inside in insides:
        sides = [{_side(inside, point, budget) for point in points} for points in (seen, missed)]
        if sides[1] - sides[0] - {None}:
            return False
    return True


def _side(inside: Tree, point: Point, budget: Budget) -> int | None:
    """Return the sign of a corner's argument, of a floor itself; None if it is not known."""
    try:
        with with_bits(PRECISIONS[0]):
            value = enclose(substitute(inside, point, budget), budget).real
    except (Undefined, Refused):
        return None
    if inside.kind in ("floor", "ceiling"):
        whole = value.mid().unique_fmpz()
        return None if whole is None else int(whole)
    return 1 if value > 0 else -1 if value < 0 else None


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
                longest = max(longest, _longest(pair))
                if is_apart(ratios[-1] - ratios[0]) or is_apart(Ball(ratios[-1].imag)):
                    return 0
            if len(ratios) >= ENOUGH_POINTS and bits > longest:
                if all(is_negligible(ratio - ratios[0]) for ratio in ratios):
                    return 1 if ratios[0].real > 0 else -1
        pairs = kept
    raise Undecided("no constant factor is shown")
