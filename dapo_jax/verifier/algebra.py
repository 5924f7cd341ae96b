"""Equality of two expressions, by proof.

Two balls at one point prove a difference; exact arithmetic proves equality, in every case where
cases are needed. Anything between is `Undecided`. Runs in a worker process.
"""

import contextlib
import itertools
import math
import zlib
from collections.abc import Callable, Iterator

from flint import acb, arb, fmpq

from dapo_jax.verifier.ball_arithmetic import Ball, Pole, Undefined, enclose, is_apart, with_bits
from dapo_jax.verifier.elementary_functions import COMPLEX, INTEGERS
from dapo_jax.verifier.expression_tree import Budget, Refused, Tree, Undecided, nodes, symbols
from dapo_jax.verifier.number_field import NumberField
from dapo_jax.verifier.polynomials import Element
from dapo_jax.verifier.roots import NeedsSign, is_real, sign
from dapo_jax.verifier.tree_to_element import read

MAX_SIGNS, MAX_REMAINDERS = 6, 36  # cases of one comparison: at most 2^6, and so many beside
FILTER_BITS = (192, 1_024, 4_096, 16_384)  # before a proof is tried, and after one failed
SCALES = (1, 1_000, 1, 30, 1_000_000, 1)  # of the points tried: near and far
ENOUGH_POINTS = 3
MAX_HOLES = 2  # points where an answer has no value though gold has one: 1/(n - 2), (-3)!
WHOLE_POINTS = (2, 3, 4, 5, 6, 7, 30, 101, -3, -8)
STEPPED = {"floor", "ceiling", "factorial", "binomial"}


def _points(names: list[str]) -> Iterator[dict[str, Ball]]:
    """Return deterministic points, near and far, of either sign; complex for complex letters."""
    for trial, scale in enumerate(SCALES):
        point = {}
        for name in names:
            draw = zlib.crc32(f"{name} {trial}".encode()) % 5_000 + 137
            direction = -1 if trial >= 2 and draw % 2 or trial == 2 else 1
            value = acb(arb(fmpq(direction * draw * scale, 1_997)))
            if name[0] in COMPLEX and trial % 2:
                value = value + acb(0, arb(fmpq(draw, 2_003)))
            point[name] = value
        yield point


def _has_steps(*trees: Tree) -> bool:
    """Test for functions that treat integer variables alone: floors, factorials, powers of -1."""
    for node in itertools.chain(*map(nodes, trees)):
        if node.kind in STEPPED or node.kind in ("sin", "cos", "tan", "e"):
            return True
        if node.kind == "power" and node.parts[1].kind != "number":
            return True
    return False


def differ_at_whole_numbers(mine: Tree, gold: Tree, budget: Budget) -> bool:
    """Prove a difference, by exact arithmetic, at one of a few whole numbers."""
    names, seen, holes = sorted(symbols(mine) | symbols(gold)), 0, 0
    for n in WHOLE_POINTS:
        values = {name: fmpq(n + i) for i, name in enumerate(names)}
        for name in names:
            if name not in INTEGERS:  # of either sign, and between
                values[name] = fmpq(zlib.crc32(f"{name} {n}".encode()) % 9_000 - 4_500, 997)
        field = NumberField(budget, residues={name: (0, value) for name, value in values.items()})
        try:
            wanted = read(field, gold)
            holes += 1  # until there is a value
            difference = field.subtract(read(field, mine), wanted)
            holes -= 1
            if not field.vanishes(difference.above):
                return True
            seen += 1
        except (Undecided, Refused):
            continue
    if seen < ENOUGH_POINTS or holes > MAX_HOLES:
        raise Undecided("no value at whole numbers")
    return False


def differ_somewhere(mine: Tree, gold: Tree, budget: Budget, bits: int = FILTER_BITS[0]) -> bool:
    """Prove a difference, at one of a few points.

    Raises:
        Undecided: either has no value there, which may hide a division by zero.
    """
    names, seen = sorted(symbols(mine) | symbols(gold)), 0
    if _has_steps(mine, gold) and any(name in INTEGERS for name in names):
        return differ_at_whole_numbers(mine, gold, budget)  # between them they may differ
    with with_bits(bits):
        for point in _points(names) if names else [{}]:
            try:
                if is_apart(enclose(mine, point, budget) - enclose(gold, point, budget)):
                    return True
                seen += 1
            except Pole:
                if names:
                    raise Undecided("a pole where none is expected") from None
            except Undefined:
                continue
    if names and seen < ENOUGH_POINTS:
        raise Undecided("no value at too many points")
    return False


def in_all_cases(budget: Budget, holds: Callable[[NumberField], bool]) -> bool:
    """Prove a statement in every case: each sign, and each remainder, that it depends on."""
    moduli: dict[str, int] = {}

    def over_signs(signs: dict[str, int], residues: dict[str, tuple[int, int]]) -> bool:
        field = NumberField(budget, signs, residues)
        try:
            proven = holds(field)
        except NeedsSign as case:
            if len(signs) == MAX_SIGNS:
                raise Undecided("too many cases") from None
            return all(over_signs(signs | {case.name: way}, residues) for way in (1, -1))
        moduli.update(field.moduli)
        return proven

    if over_signs({}, {}):
        return True
    if not moduli or math.prod(moduli.values()) > MAX_REMAINDERS:
        return False
    asked = dict(moduli)
    remainders = itertools.product(*(range(modulus) for modulus in asked.values()))
    return all(
        over_signs({}, {n: (asked[n], r) for n, r in zip(asked, chosen, strict=True)})
        for chosen in remainders
    )


def same_expression(mine: Tree, gold: Tree, budget: Budget) -> bool:
    """Test the equality for all values of the variables.

    Raises:
        Undecided: it is neither proven nor disproven.
        Refused: an expression has no value.
    """
    if mine == gold:
        return True
    if mine.kind == gold.kind == "number":
        return mine.value == gold.value
    if any(node.kind == "infinity" for tree in (mine, gold) for node in nodes(tree)):
        return False
    if differ_somewhere(mine, gold, budget):
        return False

    def equal(field: NumberField) -> bool:
        a, b = read(field, mine), read(field, gold)
        return field.vanishes(field.times(a.above, b.below) - field.times(b.above, a.below))

    with contextlib.suppress(Undecided):
        if in_all_cases(budget, equal):
            return True
    if any(differ_somewhere(mine, gold, budget, bits) for bits in FILTER_BITS[1:]):
        return False
    raise Undecided("no proof that they are equal")


def proportional(mine: Tree, gold: Tree, budget: Budget) -> int:
    """Return the sign of the real constant c with mine = c * gold; 0 if there is none."""
    if symbols(mine) != symbols(gold) or not symbols(mine) or not _ratios_agree(mine, gold, budget):
        return 0
    signs: set[int] = set()
    factors: set[str] = set()

    def holds(field: NumberField) -> bool:
        a, b = read(field, mine), read(field, gold)
        above, below = field.times(a.above, b.below), field.times(b.above, a.below)
        varying = lambda atom: not atom.constant  # noqa: E731
        ours, theirs = field.coefficients(above, varying), field.coefficients(below, varying)
        for key, part in theirs.items():
            if key in ours and not field.vanishes(part) and not field.vanishes(ours[key]):
                difference = field.times(above, part) - field.times(below, ours[key])
                if not field.vanishes(difference):
                    return False
                c = field.divide(
                    Element(ours[key], b.below * 0 + 1), Element(part, b.below * 0 + 1)
                )
                if not is_real(field, c):
                    return False
                signs.add(sign(field, c))
                factors.add(str(c))
                return True
        return False

    if not in_all_cases(budget, holds):
        raise Undecided("no proof that they are proportional")
    return signs.pop() if len(factors) == 1 else 0


def _ratios_agree(mine: Tree, gold: Tree, budget: Budget) -> bool:
    """Test that no two points prove different ratios."""
    ratios = []
    with with_bits(FILTER_BITS[0]):
        for point in _points(sorted(symbols(gold))):
            try:
                above, below = enclose(mine, point, budget), enclose(gold, point, budget)
            except Undefined:
                raise Undecided("no value at a point") from None
            if is_apart(above) and is_apart(below):
                ratios.append(above / below)
        return len(ratios) > 1 and not any(is_apart(ratio - ratios[0]) for ratio in ratios)
