"""Sets of real numbers: intervals, unions and inequalities in one variable.

A set is given by the ends of its pieces, which are compared by balls, never by rounding. Runs in a
worker process.
"""

import contextlib
import functools
import re
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from flint import arb, fmpq

from dapo_jax.extras.math import expression_tree as trees
from dapo_jax.extras.math.answer_shape import Node
from dapo_jax.extras.math.ball_arithmetic import PRECISIONS, Undefined, enclose, sign, with_bits
from dapo_jax.extras.math.expression_tree import (
    Budget,
    NoValue,
    Refused,
    Tree,
    Undecided,
    number,
    symbols,
)
from dapo_jax.extras.math.expressions import parse
from dapo_jax.extras.math.names import REALS, compact
from dapo_jax.extras.math.polynomials import RationalFunctions

MAX_PIECES = 32  # of a union
MAX_ABSOLUTES = 4
ZERO, TWO, HALF = number(0), number(2), number(fmpq(1, 2))
SIGNS = {"=": (0,), "!=": (1, -1), ">": (1,), ">=": (1, 0), "<": (-1,), "<=": (-1, 0)}
_VALUE = re.compile(r"^[A-Za-z] ?\( ?[A-Za-z] ?\)$")  # f(x), of which a range is given
MINUS_INFINITY = trees.negate(trees.INFINITY)


class Region(NamedTuple):
    """Set of real numbers: ends in ascending order, and the memberships of cells.

    Cells: numbers below the first end, that end, those up to the next one, ..., above the last.
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
        """Combine regions: return the set of numbers for whose memberships `rule` is True."""
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

    def same(self, a: Region, b: Region) -> bool:
        """Test the equality of two regions that `combine` or `read` returned."""
        return a.cells == b.cells and not any(map(self._compare, a.ends, b.ends))

    def _inside(self, ends: tuple[Tree, ...], cell: int) -> Tree:
        """Return a rational number in a cell, or the end that it is; 0 for the whole line."""
        place = cell // 2
        if cell % 2:
            return ends[place]
        low, high = ends[place - 1] if place else None, ends[place] if place < len(ends) else None
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
        if node.kind == "relation" and node.marks == ("in",):
            return self.read(node.items[1])
        if node.kind == "relation":
            solutions = EVERYTHING
            for left, mark, right in zip(node.items, node.marks, node.items[1:], strict=False):
                if not _is_unbounded(left.text, mark, right.text):
                    sides = [parse(_VALUE.sub("y", side.text)) for side in (left, right)]
                    difference = trees.add([sides[0], trees.negate(sides[1])])
                    solutions = self.combine(all, solutions, self._solve(difference, mark))
            return solutions
        if compact(node.text) == REALS:
            return EVERYTHING
        raise Refused("no region")

    def _of_members(self, node: Node) -> Region:
        if len(node.items) > MAX_PIECES:
            raise Refused("too many pieces")
        if node.kind == "set":
            members = (each for item in node.items for each in item.items or (item,))
            points = self._in_order(self._number(parse(member.text)) for member in members)
            return Region(tuple(points), (False, *(True, False) * len(points)))
        parts = [self.read(item) for item in node.items]
        if node.kind == "list" and node.marks == (",",):
            both = self.combine(all, *parts)
            if any(item.kind != "relation" for item in node.items) or not any(both.cells):
                raise Refused("a comma between regions says neither 'and' nor 'or'")
            return both
        if node.kind == "difference":
            return self.combine(lambda members: list(members) == [True, False], *parts)
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
        ends = tuple(self._in_order(self._real(candidates)))
        values = (self._inside(ends, cell) for cell in range(2 * len(ends) + 1))
        return Region(ends, tuple(self._holds(relations, value) for value in values))

    def _real(self, values: Iterable[Tree]) -> Iterator[Tree]:
        for value in values:
            with contextlib.suppress(Refused):
                yield self._number(value)

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


def zeros(tree: Tree, budget: Budget) -> list[Tree]:
    """Return constants among which are all real numbers where an expression is 0 or has a pole.

    Other numbers, also not real ones, may be among them. Raises `Refused` if they are not known.
    """
    budget.spend(50 * sum(1 for _ in trees.nodes(tree)))
    absolutes = [node for node in trees.nodes(tree) if node.kind == "abs" and symbols(node)]
    if len(absolutes) > MAX_ABSOLUTES:
        raise Refused("many absolute values")
    if absolutes:  # with |a| for a and for -a
        inside = absolutes[0].parts[0]
        cases = [_replace(tree, absolutes[0], case) for case in (inside, trees.negate(inside))]
        return [zero for case in cases for zero in zeros(case, budget)]
    return list(_solutions(tree, budget))


def _replace(tree: Tree, old: Tree, new: Tree) -> Tree:
    if tree == old:
        return new
    return tree._replace(parts=tuple(_replace(part, old, new) for part in tree.parts))


def _solutions(tree: Tree, budget: Budget) -> Iterator[Tree]:
    """Return the points where an expression without absolute values is 0 or has a pole."""
    field = RationalFunctions(budget, opaque=True)
    fraction = field.read(tree)
    unknown, *others = [generator for generator in field.generators if symbols(generator)]
    if others:
        raise Refused("an equation that nothing here solves")
    for factor in [factor for poly in fraction for factor in field.split(poly)]:
        for value in _of_polynomial(field.coefficients(factor, unknown)):
            if unknown.kind == "symbol":
                yield value
                continue
            inner, targets = _inverse(unknown, value)
            for target in targets:
                yield from _solutions(trees.add([inner, trees.negate(target)]), budget)


def _of_polynomial(coefficients: list[Tree]) -> list[Tree]:
    """Return the zeros of a polynomial of degree 2 at most, and that of its linear part."""
    c, b, a, *higher = [*coefficients, ZERO, ZERO][: max(3, len(coefficients))]
    if higher:
        if any(term != ZERO for term in (b, a, *higher[:-1])):
            raise Refused("a high power")
        return _roots(trees.divide(trees.negate(c), higher[-1]), number(len(coefficients) - 1))
    linear = [trees.negate(trees.divide(c, b))] if b != ZERO else []
    if a == ZERO:
        return linear
    product = trees.multiply(number(-4), trees.multiply(a, c))
    root = trees.power(trees.add([trees.power(b, TWO), product]), HALF)
    above = [trees.add([trees.negate(b), half]) for half in (root, trees.negate(root))]
    return linear + [trees.divide(value, trees.multiply(TWO, a)) for value in above]


def _roots(value: Tree, degree: Tree) -> list[Tree]:
    """Return numbers with a power, the real ones among them."""
    if (degree.whole or 0) % 2:
        return [trees.odd_root(value, degree.whole or 1)]
    if value == ZERO:
        return [ZERO]
    root = trees.power(value, trees.divide(number(1), degree))
    return [root, trees.negate(root)]


def _inverse(function: Tree, value: Tree) -> tuple[Tree, list[Tree]]:
    """Return (the argument of a function, its values where the function has a value)."""
    inner, *others = [part for part in function.parts if symbols(part)]
    if others:
        raise Refused("an equation that nothing here solves")
    match function.kind:
        case "power" if inner is function.parts[0]:
            return inner, _roots(value, function.parts[1])
        case "odd_root":
            return inner, [trees.power(value, function.parts[1])]
        case "log":
            return inner, [trees.power(trees.EULER, value)]
        case "power" | "exp" if value == ZERO:
            return inner, []
        case "power" | "exp":
            base = trees.EULER if function.kind == "exp" else function.parts[0]
            return inner, [trees.divide(Tree("log", (value,)), Tree("log", (base,)))]
    raise Refused("an equation that nothing here solves")
