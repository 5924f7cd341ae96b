"""Sets of real numbers: intervals, unions and inequalities in one variable.

A set is given by the ends of its pieces, which are compared by balls, never by rounding. Runs in a
worker process.
"""

import contextlib
import functools
import math
import operator
import re
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from flint import fmpq

from dapo_jax.extras.math import expression_tree as trees
from dapo_jax.extras.math.answer_shape import Node
from dapo_jax.extras.math.ball_arithmetic import sign
from dapo_jax.extras.math.expression_tree import Budget, NoValue, Refused, Tree, number, symbols
from dapo_jax.extras.math.expressions import parse
from dapo_jax.extras.math.names import REALS, compact
from dapo_jax.extras.math.polynomials import RationalFunctions

MAX_ABSOLUTES = 4
ZERO, TWO, HALF = number(0), number(2), number(fmpq(1, 2))
SIGNS = {"=": (0,), "!=": (1, -1), ">": (1,), ">=": (1, 0), "<": (-1,), "<=": (-1, 0)}
_VALUE = re.compile(r"^[A-Za-z] ?\( ?[A-Za-z] ?\)$")  # f(x), of which a range is given
MINUS_INFINITY = trees.negate(trees.INFINITY)


class Region(NamedTuple):
    """Set of real numbers: its ends, in any order, and the test for members at a place."""

    ends: list[Tree]
    holds: Callable[[int], bool]


def _combined(rule: Callable[[Iterator[bool]], bool], parts: list[Region]) -> Region:
    """Combine parts into one set: `rule` decides from a number's membership in each."""
    ends = [end for part in parts for end in part.ends]
    return Region(ends, lambda place: rule(part.holds(place) for part in parts))


def _is_unbounded(low: Tree, high: Tree) -> bool:
    """Test for -infinity < x and x < infinity, which hold for all numbers."""
    is_finite = [trees.INFINITY not in trees.nodes(side) for side in (low, high)]
    return low == MINUS_INFINITY and is_finite[1] or high == trees.INFINITY and is_finite[0]


class RealSets:
    """Comparison of two sets of real numbers, within a budget.

    Places: 0 for the numbers below all ends of both sets, 1 for the first end, 2 for those up to
    the next one, and so on. The sets are equal if they have the same places.
    """

    def __init__(self, budget: Budget):
        self._budget = budget
        self._ends: list[Tree] = []
        self._places: dict[Tree, float] = {MINUS_INFINITY: -1, trees.INFINITY: math.inf}

    def same(self, node: Node, gold: Node) -> bool:
        """Test the equality of the sets that two nodes describe. Raises `Refused`."""
        both = [self._read(node), self._read(gold)]
        ends = {end for region in both for end in region.ends}
        for end in sorted(ends, key=functools.cmp_to_key(self._compare)):
            if not self._ends or self._compare(self._ends[-1], end):
                self._ends.append(end)
            self._places[end] = 2 * len(self._ends) - 1
        places = range(2 * len(self._ends) + 1)
        members = [[place for place in places if region.holds(place)] for region in both]
        # A comma between regions that have nothing in common says neither 'and' nor 'or'.
        return members[0] == members[1] and bool(members[0] or "list" not in (node.kind, gold.kind))

    def _compare(self, a: Tree, b: Tree) -> int:
        return 0 if a == b else sign(trees.add([a, trees.negate(b)]), self._budget)

    def _inside(self, place: int) -> Tree:
        """Return the end at a place, or a number between two ends, or beside one."""
        if place % 2:
            return self._ends[place // 2]
        low, high = ([None, *self._ends, None][place // 2 :])[:2]
        if low is None or high is None:
            return trees.add([low or high or ZERO, number(1 if low else -1)])
        return trees.multiply(HALF, trees.add([low, high]))

    def _number(self, tree: Tree) -> Tree:
        if symbols(tree):
            raise Refused("an end that is no number")
        sign(tree, self._budget)  # it is real
        return tree

    def _interval(self, node: Node) -> Region:
        low, high = pair = [parse(item.text) for item in node.items]
        closed = node.marks[0] == "[", node.marks[1] == "]"
        is_infinite = low == MINUS_INFINITY, high == trees.INFINITY
        if any(map(operator.and_, is_infinite, closed)):
            raise Refused("infinity is no member")
        ends = [self._number(e) for e, far in zip(pair, is_infinite, strict=True) if not far]
        if len(ends) == 2 and self._compare(*ends) >= 0:
            raise Refused("an interval without length")

        def holds(place: int) -> bool:
            below, above = place - self._places[low], self._places[high] - place
            return min(below, above) > 0 or closed[below > 0] and min(below, above) == 0

        return Region(ends, holds)

    def _read(self, node: Node) -> Region:
        if node.kind == "tuple" and len(node.items) == 2 and node.marks[0] in "([":
            return self._interval(node)
        if node.kind == "relation" and node.marks == ("in",):
            return self._read(node.items[1])
        if node.kind == "relation":
            pairs = zip(node.items, node.marks, node.items[1:], strict=False)
            return _combined(all, [self._solutions(*pair) for pair in pairs])
        if node.kind == "set":
            members = [each for item in node.items for each in item.items or (item,)]
            points = [self._number(parse(member.text)) for member in members]
            return Region(points, lambda place: place in map(self._places.get, points))
        if node.kind not in ("union", "intersection", "difference", "list"):
            if compact(node.text) != REALS:
                raise Refused("no region")
            return _combined(all, [])
        parts = [self._read(item) for item in node.items]
        if node.kind == "difference":
            return _combined(lambda members: next(members) and not any(members), parts)
        if node.marks == (",",) and any(item.kind != "relation" for item in node.items):
            raise Refused("a comma between regions says neither 'and' nor 'or'")
        is_common = node.kind == "intersection" or node.marks in ((",",), ("and",))
        return _combined(all if is_common else any, parts)

    def _solutions(self, left: Node, mark: str, right: Node) -> Region:
        """Return solutions of a relation: its sign is looked up between its zeros.

        They lie where roots, logarithms and quotients have values.
        """
        sides = [parse(_VALUE.sub("y", side.text)) for side in (left, right)]
        if mark in "<>" and _is_unbounded(*sides[:: 1 if mark == "<" else -1]):
            return _combined(all, [])
        difference = trees.add([sides[0], trees.negate(sides[1])])
        if len(symbols(difference)) != 1:
            raise Refused("no relation in one variable")
        relations = [*trees.conditions(difference), (mark, difference)]
        if any(kind not in SIGNS for kind, _ in relations):
            raise Refused("values not everywhere")
        candidates = [zero for _, tree in relations for zero in zeros(tree, self._budget)]
        return Region([*self._real(candidates)], functools.partial(self._holds, relations))

    def _real(self, values: Iterable[Tree]) -> Iterator[Tree]:
        for value in values:
            with contextlib.suppress(Refused):
                yield self._number(value)

    def _holds(self, relations: list[tuple[str, Tree]], place: int) -> bool:
        """Test all relations at a place of the variable."""
        for mark, tree in relations:
            point = dict.fromkeys(symbols(tree), self._inside(place))
            try:
                value = trees.substitute(tree, point, self._budget)
                if sign(value, self._budget) not in SIGNS[mark]:
                    return False
            except NoValue:
                return False
        return True


def zeros(tree: Tree, budget: Budget) -> list[Tree]:
    """Return constants that include all real zeros and poles of an expression.

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
