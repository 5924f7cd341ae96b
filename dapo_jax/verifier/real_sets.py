"""Sets of real numbers: intervals, unions and inequalities in one variable.

A set is a sorted list of pieces that don't touch; ends are compared by balls, never by rounding.
Runs in a worker process.
"""

import functools
import itertools
from typing import NamedTuple

from flint import arb, fmpq

from dapo_jax.verifier.answer_shape import Node
from dapo_jax.verifier.ball_arithmetic import PRECISIONS, Undefined, enclose, sign, with_bits
from dapo_jax.verifier.equivalence import REALS, compact
from dapo_jax.verifier.expression_tree import (
    Budget,
    NoValue,
    Refused,
    Tree,
    Undecided,
    add,
    conditions,
    negate,
    number,
    substitute,
    symbols,
)
from dapo_jax.verifier.expressions import parse
from dapo_jax.verifier.zeros import zeros

MAX_PIECES = 32  # of a union
FLIPPED = {"<": ">", ">": "<", "<=": ">=", ">=": "<=", "!=": "!="}
SIGNS = {"=": (0,), "!=": (1, -1), ">": (1,), ">=": (1, 0), "<": (-1,), "<=": (-1, 0)}


class End(NamedTuple):
    """End of a piece; `infinite` is -1 or 1 if it has no value."""

    value: Tree | None
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
    """Arithmetic of sets of real numbers, within a budget."""

    def __init__(self, budget: Budget):
        self.budget = budget

    # --- arithmetic of sets --------------------------------------------------------------------

    def compare(self, a: End, b: End) -> int:
        """Return the order of two ends by value: -1, 0 or 1 as `a` is below, at or above `b`."""
        if a.infinite or b.infinite:
            return (a.infinite > b.infinite) - (a.infinite < b.infinite)
        assert a.value is not None and b.value is not None  # being finite
        if a.value == b.value:
            return 0
        return sign(add([a.value, negate(b.value)]), self.budget)

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
        if symbols(tree):
            raise Refused("an end that is no number")
        sign(tree, self.budget)  # it is real
        return End(tree, is_open)

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
        """Return solutions of `difference mark 0`: its sign is looked up between its zeros.

        They lie where roots, logarithms and quotients have values.
        """
        if len(symbols(difference)) != 1:
            raise Refused("no relation in one variable")
        relations = [*conditions(difference), (mark, difference)]
        if any(kind not in SIGNS for kind, _ in relations):
            raise Refused("values not everywhere")
        ends = self._in_order([z for _, tree in relations for z in zeros(tree, self.budget)])
        holds = functools.partial(self._holds, relations)
        pieces = [Piece(end, end) for end in ends if end.value is not None and holds(end.value)]
        for low, high in itertools.pairwise([LOWEST, *ends, HIGHEST]):
            signs = {holds(value) for value in self.inside(Piece(low, high), 1)}
            if len(signs) > 1:
                raise Undecided("a zero that is not known")
            if signs == {True}:
                pieces.append(Piece(low._replace(open=True), high._replace(open=True)))
        return self.union(pieces)

    def _in_order(self, values: list[Tree]) -> list[End]:
        """Return the real numbers among values as sorted ends, each once."""
        ends: list[End] = []
        for value in values:
            try:
                sign(value, self.budget)
            except Refused:
                continue
            end = End(value, False)
            if all(self.compare(end, other) for other in ends):
                ends.append(end)
        return sorted(ends, key=functools.cmp_to_key(self.compare))

    def _holds(self, relations: list[tuple[str, Tree]], value: Tree) -> bool:
        """Test all relations at a value of the variable."""
        for mark, tree in relations:
            point = dict.fromkeys(symbols(tree), value)
            try:
                if sign(substitute(tree, point, self.budget), self.budget) not in SIGNS[mark]:
                    return False
            except NoValue:
                return False
        return True

    def inside(self, piece: Piece, halvings: int) -> list[Tree]:
        """Return 2^(halvings + 1) - 1 rational numbers inside a piece; of a point, itself."""
        if piece.low.value is not None and piece.low.value == piece.high.value:
            return [piece.low.value]
        middle = End(self._between(*piece), True)
        sides = (Piece(piece.low, middle), Piece(middle, piece.high))
        rest = [v for side in sides for v in self.inside(side, halvings - 1)] if halvings else []
        assert middle.value is not None
        return [middle.value, *rest]

    def _between(self, low: End, high: End) -> Tree:
        """Return a rational number between two ends, 0 for the whole line."""
        for bits in PRECISIONS[:2]:
            with with_bits(bits):
                try:
                    a, b = (
                        None if end.value is None else enclose(end.value, self.budget).real
                        for end in (low, high)
                    )
                except Undefined:
                    continue
                if a is None or b is None:
                    middle = b - 1 if b is not None else a + 1 if a is not None else arb(0)
                else:
                    middle = (a + b) / 2
                with with_bits(bits // 2):
                    mantissa, exponent = (+middle).mid().man_exp()
            value = number(fmpq(mantissa) * fmpq(2) ** int(exponent))
            if self.compare(low, End(value, False)) < 0 < self.compare(high, End(value, False)):
                return value
        raise Undecided("two ends too near")
