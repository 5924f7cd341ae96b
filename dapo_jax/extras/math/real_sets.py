"""Sets of real numbers: intervals, unions and inequalities in one variable.

A set is given by the ends of its pieces, which are compared by balls, never by rounding. Runs in a
worker process.
"""

import functools
from collections.abc import Callable, Iterable
from typing import NamedTuple

from flint import arb, fmpq

from dapo_jax.extras.math import expression_tree as trees
from dapo_jax.extras.math.answer_shape import Node
from dapo_jax.extras.math.ball_arithmetic import PRECISIONS, Undefined, enclose, sign, with_bits
from dapo_jax.extras.math.expression_tree import Budget, NoValue, Refused, Tree, Undecided, symbols
from dapo_jax.extras.math.expressions import parse
from dapo_jax.extras.math.names import REALS, compact
from dapo_jax.extras.math.zeros import zeros

MAX_PIECES = 32  # of a union
FLIPPED = {"<": ">", ">": "<", "<=": ">=", ">=": "<=", "!=": "!="}
SIGNS = {"=": (0,), "!=": (1, -1), ">": (1,), ">=": (1, 0), "<": (-1,), "<=": (-1, 0)}
MINUS_INFINITY = trees.negate(trees.INFINITY)


class Region(NamedTuple):
    """Set of real numbers.

    ends: constants in ascending order.
    cells: membership of the numbers below the first end, of that end, of the numbers up to the
        next one, ..., and of those above the last end.
    """

    ends: tuple[Tree, ...]
    cells: tuple[bool, ...]


EVERYTHING = Region((), (True,))


def _is_unbounded(left: str, mark: str, right: str) -> bool:
    """Test for x < infinity, -infinity < x and the like: they hold for all numbers."""
    smaller, larger = (left, right) if mark == "<" else (right, left)
    if mark not in "<>":
        return False
    lowest, highest = compact(smaller) == r"-\infty", compact(larger) in (r"\infty", r"+\infty")
    return lowest and r"\infty" not in larger or highest and r"\infty" not in smaller


class RealSets:
    """Arithmetic of sets of real numbers, within a budget."""

    def __init__(self, budget: Budget):
        self.budget = budget

    def _compare(self, a: Tree, b: Tree) -> int:
        return 0 if a == b else sign(trees.add([a, trees.negate(b)]), self.budget)

    def _in_order(self, values: Iterable[Tree]) -> list[Tree]:
        """Return the numbers in ascending order, each once."""
        ends: list[Tree] = []
        for value in sorted(values, key=functools.cmp_to_key(self._compare)):
            if not ends or self._compare(ends[-1], value):
                ends.append(value)
        return ends

    def combine(self, rule: Callable[[Iterable[bool]], bool], *regions: Region) -> Region:
        """Return the numbers that satisfy a rule on their memberships in the regions."""
        ends = self._in_order(end for region in regions for end in region.ends)
        members = [self._cells_between(ends, region) for region in regions]
        cells = [rule(cell) for cell in zip(*members, strict=True)]
        kept = [i for i in range(len(ends)) if len(set(cells[2 * i : 2 * i + 3])) > 1]
        inner = (cell for i in kept for cell in cells[2 * i + 1 : 2 * i + 3])
        return Region(tuple(ends[i] for i in kept), (cells[0], *inner))

    def _cells_between(self, ends: list[Tree], region: Region) -> list[bool]:
        """Return the memberships in a region of the cells of more ends."""
        cells, own = [region.cells[0]], 0
        for end in ends:
            is_own = own < len(region.ends) and self._compare(end, region.ends[own]) == 0
            cells += region.cells[2 * own + 1 : 2 * own + 3] if is_own else [cells[-1]] * 2
            own += is_own
        return cells

    def without(self, a: Region, b: Region) -> Region:
        """Return the numbers in `a` that are not in `b`."""
        return self.combine(lambda members: list(members) == [True, False], a, b)

    def same(self, a: Region, b: Region) -> bool:
        """Test the equality of two regions that `combine` or `read` returned."""
        return a.cells == b.cells and not any(map(self._compare, a.ends, b.ends))

    def inside(self, region: Region, cell: int, halvings: int) -> list[Tree]:
        """Return 2^(halvings + 1) - 1 rational numbers in a cell; of an end, itself."""
        place = cell // 2
        if cell % 2:
            return [region.ends[place]]
        low = region.ends[place - 1] if place else None
        high = region.ends[place] if place < len(region.ends) else None
        return self._numbers_between(low, high, halvings)

    def _numbers_between(self, low: Tree | None, high: Tree | None, halvings: int) -> list[Tree]:
        middle = self._between(low, high)
        if not halvings:
            return [middle]
        sides = (low, middle), (middle, high)
        return [middle] + [n for side in sides for n in self._numbers_between(*side, halvings - 1)]

    def _between(self, low: Tree | None, high: Tree | None) -> Tree:
        """Return a rational number between two ends, 0 for the whole line."""
        for bits in PRECISIONS[:2]:
            with with_bits(bits):
                try:
                    a, b = (end and enclose(end, self.budget).real for end in (low, high))
                except Undefined:
                    continue
                if a is None or b is None:
                    middle = b - 1 if b is not None else a + 1 if a is not None else arb(0)
                else:
                    middle = (a + b) / 2
                with with_bits(bits // 2):
                    mantissa, exponent = (+middle).mid().man_exp()
            value = trees.number(fmpq(mantissa) * fmpq(2) ** int(exponent))
            is_above = low is None or self._compare(low, value) < 0
            if is_above and (high is None or self._compare(value, high) < 0):
                return value
        raise Undecided("two ends too near")

    # --- from text -----------------------------------------------------------------------------

    def _number(self, tree: Tree) -> Tree:
        if symbols(tree):
            raise Refused("an end that is no number")
        sign(tree, self.budget)  # it is real
        return tree

    def _interval(self, node: Node) -> Region:
        low, high = (parse(item.text) for item in node.items)
        left, right = node.marks
        ends, cells = [], [low == MINUS_INFINITY]
        if low != MINUS_INFINITY:
            ends.append(self._number(low))
            cells += [left == "[", True]
        if high != trees.INFINITY:
            ends.append(self._number(high))
            cells += [right == "]", False]
        if low == MINUS_INFINITY and left == "[" or high == trees.INFINITY and right == "]":
            raise Refused("infinity is no member")
        if len(ends) == 2 and self._compare(*ends) >= 0:
            raise Refused("an interval without length")
        return Region(tuple(ends), tuple(cells))

    def read(self, node: Node) -> Region:
        """Return the set that a node describes. Raises `Refused`."""
        if node.kind == "tuple" and len(node.items) == 2 and node.marks[0] in "([":
            return self._interval(node)
        if node.kind in ("set", "union", "intersection", "difference", "list"):
            return self._of_members(node)
        if node.kind == "relation":
            solutions = EVERYTHING
            for left, mark, right in zip(node.items, node.marks, node.items[1:], strict=False):
                if not _is_unbounded(left.text, mark, right.text):
                    difference = trees.add([parse(left.text), trees.negate(parse(right.text))])
                    solutions = self.combine(all, solutions, self._solve(difference, mark))
            return solutions
        if compact(node.text) == REALS:
            return EVERYTHING
        raise Refused("no region")

    def _of_members(self, node: Node) -> Region:
        if len(node.items) > MAX_PIECES:
            raise Refused("too many pieces")
        if node.kind == "set":
            points = self._in_order(self._number(parse(item.text)) for item in node.items)
            return Region(tuple(points), (False, *(True, False) * len(points)))
        parts = [self.read(item) for item in node.items]
        if node.kind == "list" and node.marks == (",",):
            both = self.combine(all, *parts)
            if any(item.kind != "relation" for item in node.items) or not any(both.cells):
                raise Refused("a comma between regions says neither 'and' nor 'or'")
            return both
        if node.kind == "difference":
            return self.without(*parts)
        is_common = node.kind == "intersection" or node.marks == ("and",)
        return self.combine(all if is_common else any, *parts)

    def _solve(self, difference: Tree, mark: str) -> Region:
        """Return solutions of `difference mark 0`: its sign is looked up between its zeros.

        They lie where roots, logarithms and quotients have values.
        """
        if len(symbols(difference)) != 1:
            raise Refused("no relation in one variable")
        relations = [*trees.conditions(difference), (mark, difference)]
        if any(kind not in SIGNS for kind, _ in relations):
            raise Refused("values not everywhere")
        candidates = [zero for _, tree in relations for zero in zeros(tree, self.budget)]
        ends = tuple(self._in_order(filter(self._is_real, candidates)))
        cells = []
        for cell in range(2 * len(ends) + 1):
            values = self.inside(Region(ends, ()), cell, 1)
            signs = {self._holds(relations, value) for value in values}
            if len(signs) > 1:
                raise Undecided("a zero that is not known")
            cells += signs
        return Region(ends, tuple(cells))

    def _is_real(self, value: Tree) -> bool:
        try:
            sign(value, self.budget)
        except Refused:
            return False
        return True

    def _holds(self, relations: list[tuple[str, Tree]], value: Tree) -> bool:
        """Test all relations at a value of the variable."""
        for mark, tree in relations:
            point = dict.fromkeys(symbols(tree), value)
            try:
                if sign(trees.substitute(tree, point, self.budget), self.budget) not in SIGNS[mark]:
                    return False
            except NoValue:
                return False
        return True
