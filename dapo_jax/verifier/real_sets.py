"""Sets of real numbers: intervals, unions and inequalities in one variable.

A set is a sorted list of pieces that don't touch; ends are compared by proof, never by rounding.
Runs in a worker process.
"""

import functools
import itertools
from typing import NamedTuple

from dapo_jax.verifier.answer_shape import Node
from dapo_jax.verifier.equivalence import REALS, compact
from dapo_jax.verifier.expression_tree import (
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
from dapo_jax.verifier.polynomials import ONE, Element, Poly, rational
from dapo_jax.verifier.roots import NeedsSign, is_real, root, sign
from dapo_jax.verifier.tree_to_element import read

MAX_PIECES = 32  # of a union
FLIPPED = {"<": ">", ">": "<", "<=": ">=", ">=": "<=", "!=": "!="}
SIGNS = {"=": (0,), "!=": (1, -1), ">": (1,), ">=": (1, 0), "<": (-1,), "<=": (-1, 0)}
MAX_SIGNS = 4  # of absolute values in one relation


class End(NamedTuple):
    """End of a piece; `infinite` is -1 or 1 if it has no value."""

    value: Element | None
    open: bool
    infinite: int = 0


class Piece(NamedTuple):
    """Numbers between two ends; a point if both are the same closed end."""

    low: End
    high: End


Pieces = list[Piece]
LOWEST, HIGHEST = End(None, True, -1), End(None, True, 1)
EVERYTHING: Pieces = [Piece(LOWEST, HIGHEST)]


def _is_unbounded(left: str, mark: str, right: str) -> bool:
    """Test for x < infinity, -infinity < x and the like, which hold for all numbers."""
    smaller, larger = (left, right) if mark == "<" else (right, left)
    if mark not in "<>":
        return False
    lowest, highest = compact(smaller) == r"-\infty", compact(larger) in (r"\infty", r"+\infty")
    return lowest and r"\infty" not in larger or highest and r"\infty" not in smaller


class RealSets:
    """Arithmetic of sets over one field; each comparison uses the field's budget."""

    def __init__(self, field: NumberField):
        self.field = field

    # --- arithmetic of sets --------------------------------------------------------------------

    def compare(self, a: End, b: End) -> int:
        """Return the order of two ends by value: -1, 0 or 1 as `a` is below, at or above `b`."""
        if a.infinite or b.infinite:
            return (a.infinite > b.infinite) - (a.infinite < b.infinite)
        assert a.value is not None and b.value is not None  # being finite
        if a.value == b.value:
            return 0
        return sign(self.field, self.field.subtract(a.value, b.value))

    def intersection(self, a: Pieces, b: Pieces) -> Pieces:
        return self.complement(self.union([*self.complement(a), *self.complement(b)]))

    def union(self, pieces: Pieces) -> Pieces:
        """Return the union of pieces, as pieces that are sorted and don't touch."""
        joined: Pieces = []
        for piece in sorted(pieces, key=functools.cmp_to_key(self._order_of_lows)):
            last = joined[-1] if joined else None
            gap = 1 if last is None else self.compare(piece.low, last.high)
            if last is None or gap > 0 or gap == 0 and piece.low.open and last.high.open:
                joined.append(piece)
                continue
            order = self.compare(piece.high, last.high)
            wider = order > 0 or order == 0 and last.high.open
            joined[-1] = Piece(last.low, piece.high if wider else last.high)
        return joined

    def _order_of_lows(self, a: Piece, b: Piece) -> int:
        return self.compare(a.low, b.low) or a.low.open - b.low.open

    def complement(self, pieces: Pieces) -> Pieces:
        """Return the complement in the real numbers; `pieces` are sorted and don't touch."""
        gaps, low = [], LOWEST
        for piece in pieces:
            high = piece.low._replace(open=not piece.low.open or bool(piece.low.infinite))
            if piece.low.infinite == 0:
                gaps.append(Piece(low, high))
            low = piece.high._replace(open=not piece.high.open)
        return gaps if low.infinite > 0 else [*gaps, Piece(low, HIGHEST)]

    def same(self, a: Pieces, b: Pieces) -> bool:
        return len(a) == len(b) and all(
            own.open == other.open and self.compare(own, other) == 0
            for mine, gold in zip(a, b, strict=True)
            for own, other in zip(mine, gold, strict=True)
        )

    # --- from text -----------------------------------------------------------------------------

    def _end(self, text: str, *, is_open: bool) -> End:
        tree = parse(text)
        if tree.kind == "infinity":
            return HIGHEST
        if tree.kind == "product" and tree.parts[1].kind == "infinity":
            return LOWEST
        value = read(self.field, tree)
        if symbols(tree) or not is_real(self.field, value):
            raise Refused("an end that is no real number")
        return End(value, is_open)

    def _point(self, text: str) -> Piece:
        end = self._end(text, is_open=False)
        if end.infinite:
            raise Refused("infinity is no member")
        return Piece(end, end)

    def read(self, node: Node) -> Pieces:
        """Return the set that a node describes. Raises `Refused`."""
        if node.kind == "tuple" and len(node.items) == 2 and node.marks[0] in "([":
            left, right = node.marks
            low = self._end(node.items[0].text, is_open=left == "(")
            high = self._end(node.items[1].text, is_open=right == ")")
            if self.compare(low, high) >= 0:
                raise Refused("an interval without length")
            if low.infinite and left == "[" or high.infinite and right == "]":
                raise Refused("infinity is no member")
            return [Piece(low, high)]
        if node.kind in ("set", "union", "intersection", "difference", "list"):
            return self._of_members(node)
        if node.kind == "relation":
            if node.marks == ("in",):
                return self.read(node.items[1])
            solutions = EVERYTHING
            for left, mark, right in zip(node.items, node.marks, node.items[1:], strict=False):
                if _is_unbounded(left.text, mark, right.text):
                    continue
                difference = add([parse(left.text), negate(parse(right.text))])
                solutions = self.intersection(solutions, self.solve(difference, mark))
            return solutions
        if compact(node.text) == REALS:
            return EVERYTHING
        raise Refused("no region")

    def _of_members(self, node: Node) -> Pieces:
        if len(node.items) > MAX_PIECES:
            raise Refused("too many pieces")
        if node.kind == "set":
            return self.union([self._point(item.text) for item in node.items])
        if node.kind == "list" and node.marks == (",",):
            raise Refused("a comma between regions says neither 'and' nor 'or'")
        parts = [self.read(item) for item in node.items]
        if node.kind == "difference":
            return self.intersection(parts[0], self.complement(parts[1]))
        if node.kind == "intersection" or node.marks == ("and",):
            return functools.reduce(self.intersection, parts)
        return self.union([piece for part in parts for piece in part])

    # --- solving -------------------------------------------------------------------------------

    def solve(self, difference: Tree, mark: str) -> Pieces:
        """Return solutions of `difference mark 0`, of degree 1 or 2 on either side of its corners.

        They lie where roots, logarithms and quotients have values.
        """
        if len(symbols(difference)) != 1 or mark not in SIGNS:
            raise Refused("no relation in one variable")
        domains = [self._solve(inside, kind) for kind, inside in conditions(difference)]
        return functools.reduce(self.intersection, domains, self._solve(difference, mark))

    def _solve(self, difference: Tree, mark: str) -> Pieces:
        if mark not in SIGNS:
            raise Refused("values not everywhere")
        try:
            above, below = read(self.field, difference)
        except NeedsSign as case:
            return self._by_sign(case, lambda: self._solve(difference, mark))
        if mark in ("=", "!="):
            return self._solve_poly(Element(above, ONE), mark)
        return self._solve_poly(Element(self.field.times(above, below), ONE), mark)

    def _by_sign(self, case: NeedsSign, solve) -> Pieces:
        signs = self.field.signs
        if len(signs) == MAX_SIGNS:
            raise Undecided("too many cases")
        pieces = []
        for way, mark in ((1, ">="), (-1, "<")):
            side = self._solve_poly(Element(case.poly, ONE), mark)
            signs[case.name] = way
            pieces += self.intersection(side, solve())
            del signs[case.name]
        return self.union(pieces)

    def _coefficients(self, difference: Element) -> list[Element]:
        """Return the coefficients of 1, x and x^2; everything else is constant."""
        varying = [
            number for number, atom in self.field.atoms_in(difference.above) if not atom.constant
        ]
        kinds = {self.field.atoms[number].kind for number in varying}
        if len(varying) > 1 or kinds - {"symbol"}:
            raise Refused("no polynomial")
        parts = self.field.coefficients(difference.above, lambda atom: not atom.constant)
        powers: dict[int, Poly] = {
            dict(key).get(varying[0], 0) if varying else 0: part for key, part in parts.items()
        }
        if max(powers, default=0) > 2:
            raise Refused("a high power")
        below = Element(difference.below, ONE)
        return [
            self.field.divide(Element(powers[n], ONE), below) if n in powers else rational(0)
            for n in range(3)
        ]

    def _solve_poly(self, difference: Element, mark: str) -> Pieces:
        c, b, a = self._coefficients(difference)
        if any(not is_real(self.field, coefficient) for coefficient in (a, b, c)):
            raise Refused("not real")
        leading = sign(self.field, a)
        if leading == 0 and sign(self.field, b) == 0:  # no variable is left
            return EVERYTHING if sign(self.field, c) in SIGNS[mark] else []
        roots, above = self._roots(a, b, c, leading)
        sides: dict[int, Pieces] = {0: [Piece(End(r, False), End(r, False)) for r in roots]}
        ends = [LOWEST, *(End(r, True) for r in roots), HIGHEST]
        for low, high in itertools.pairwise(reversed(ends)):
            sides.setdefault(above, []).append(Piece(high, low))
            above = -above
        pieces = [piece for side in SIGNS[mark] for piece in sides.get(side, [])]
        return self.union([p for p in pieces if not p.low.open or self.compare(*p) < 0])

    def _roots(self, a: Element, b: Element, c: Element, leading: int) -> tuple[list[Element], int]:
        """Return real zeros in order, a double one twice, and the sign beyond the last of them."""
        field = self.field
        if leading == 0:
            return [field.scale(field.divide(c, b), -1)], sign(field, b)
        under = field.subtract(field.multiply(b, b), field.scale(field.multiply(a, c), 4))
        kind = sign(field, under)
        middle = field.divide(field.scale(b, -1), field.scale(a, 2))
        if kind <= 0:
            return [middle, middle] if kind == 0 else [], leading
        half = field.divide(root(field, under, 2), field.scale(a, 2 * leading))
        return [field.subtract(middle, half), field.add(middle, half)], leading
