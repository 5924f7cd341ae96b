"""Sets of real numbers: intervals, unions and inequalities in one variable, to sympy sets.

Runs in a worker process.
"""

import sympy
from sympy import Integer, Interval, S

from dapo_jax.verifier.algebra import is_zero, same_expression
from dapo_jax.verifier.bounded import Refused
from dapo_jax.verifier.equivalence import REALS, compact
from dapo_jax.verifier.expressions import parse
from dapo_jax.verifier.structure import Node

MOST_PIECES = 32  # of a union
HIGHEST_EXPANDED = 12  # power of a sum
FLIPPED = {"<": ">", ">": "<", "<=": ">=", ">=": "<=", "!=": "!="}


def _real(text: str) -> sympy.Expr:
    value = parse(text)
    if value.free_symbols or not value.is_extended_real:
        raise Refused("an end that is no real number")
    return value


def region(node: Node) -> sympy.Set:
    """The set of real numbers that a node describes. Raises `Refused`."""
    if node.kind == "tuple" and len(node.items) == 2 and node.marks[0] in "([":
        low, high = (_real(item.text) for item in node.items)
        if not low < high:
            raise Refused("an interval without length")
        left, right = node.marks
        return Interval(low, high, left == "(", right == ")")
    if node.kind in ("set", "union", "intersection", "difference", "list"):
        if len(node.items) > MOST_PIECES:
            raise Refused("too many pieces")
        if node.kind == "set":
            return sympy.FiniteSet(*(_real(item.text) for item in node.items))
        if node.kind == "list" and node.marks == (",",):
            raise Refused("a comma between regions says neither 'and' nor 'or'")
        parts = [region(item) for item in node.items]
        if node.kind == "difference":
            return parts[0] - parts[1]
        both = node.kind == "intersection" or node.marks == ("and",)
        return (sympy.Intersection if both else sympy.Union)(*parts)
    if node.kind == "relation":
        if node.marks == ("in",):
            return region(node.items[1])
        pairs = zip(node.items, node.marks, node.items[1:], strict=False)
        return sympy.Intersection(
            *(_solve(left.text, mark, right.text) for left, mark, right in pairs)
        )
    if compact(node.text) == REALS:
        return S.Reals
    if compact(node.text) == r"\emptyset":
        return S.EmptySet
    raise Refused("no region")


def _solve(left: str, mark: str, right: str) -> sympy.Set:
    """Solutions of a relation that is linear in its variable, or in an absolute value of such."""
    difference = parse(left) - parse(right)
    if len(difference.free_symbols) != 1:
        raise Refused("not one variable")
    (x,) = difference.free_symbols
    values = list(difference.atoms(sympy.Abs))
    if len(values) == 1 and not difference.subs(values[0], Integer(7)).has(x):
        y = sympy.Dummy(real=True)
        inner = values[0].args[0]
        radii = _solve_linear(difference.subs(values[0], y), y, mark)
        return _preimage_of_absolute(inner, x, radii)
    try:
        return _solve_linear(difference, x, mark)
    except Refused:
        return _solve_quadratic(difference, x, mark)


def _solve_quadratic(difference: sympy.Expr, x: sympy.Symbol, mark: str) -> sympy.Set:
    _refuse_high_powers(difference)
    zero, plus, minus = (sympy.expand(difference.subs(x, Integer(n))) for n in (0, 1, -1))
    a, b = (plus + minus) / 2 - zero, (plus - minus) / 2
    if not is_zero(difference - (a * x**2 + b * x + zero)) or not (a.is_positive or a.is_negative):
        raise Refused("not quadratic")
    under = b**2 - 4 * a * zero
    if not under.is_positive:
        raise Refused("no two roots")
    low, high = sorted(((-b - sympy.sqrt(under)) / (2 * a), (-b + sympy.sqrt(under)) / (2 * a)))
    if mark in ("=", "!="):
        roots = sympy.FiniteSet(low, high)
        return roots if mark == "=" else S.Reals - roots
    if a.is_negative:
        mark = FLIPPED[mark]
    strict = "=" not in mark
    if mark.startswith("<"):
        return Interval(low, high, strict, strict)
    return Interval(-sympy.oo, low, True, strict) + Interval(high, sympy.oo, strict, True)


def _solve_linear(difference: sympy.Expr, x: sympy.Symbol, mark: str) -> sympy.Set:
    slope, offset = _linear(difference, x)
    if mark == "=":
        return sympy.FiniteSet(-offset / slope)
    if mark == "!=":
        return S.Reals - sympy.FiniteSet(-offset / slope)
    if slope.is_negative:
        mark = FLIPPED[mark]
    bound, strict = -offset / slope, "=" not in mark
    if mark.startswith("<"):
        return Interval(-sympy.oo, bound, True, strict)
    return Interval(bound, sympy.oo, strict, True)


def _linear(expression: sympy.Expr, x: sympy.Symbol) -> tuple[sympy.Expr, sympy.Expr]:
    _refuse_high_powers(expression)
    at = [sympy.expand(expression.subs(x, Integer(n))) for n in (0, 1)]
    slope = at[1] - at[0]
    if not slope.is_real or slope.is_zero is not False:
        raise Refused("not linear")
    if not is_zero(expression - at[0] - slope * x):
        raise Refused("not linear")
    return slope, at[0]


def _refuse_high_powers(expression: sympy.Expr) -> None:
    """Powers of sums would be multiplied out."""
    for found in expression.atoms(sympy.Pow):
        if found.base.is_Add and not abs(found.exp) <= HIGHEST_EXPANDED:
            raise Refused("a high power")


def _preimage_of_absolute(inner: sympy.Expr, x: sympy.Symbol, radii: sympy.Set) -> sympy.Set:
    slope, offset = _linear(inner, x)
    allowed = sympy.Intersection(radii, Interval(0, sympy.oo))
    signed = sympy.Union(
        allowed,
        *(
            Interval(-p.end, -p.start, p.right_open, p.left_open)
            if isinstance(p, Interval)
            else sympy.FiniteSet(*(-value for value in p))
            for p in _parts(allowed)
        ),
    )
    moved = []
    for part in _parts(signed):
        if not isinstance(part, Interval):
            moved.append(sympy.FiniteSet(*((value - offset) / slope for value in part)))
            continue
        ends = [(part.start, part.left_open), (part.end, part.right_open)]
        (low, low_open), (high, high_open) = ends if slope.is_positive else ends[::-1]
        moved.append(Interval((low - offset) / slope, (high - offset) / slope, low_open, high_open))
    return sympy.Union(*moved)


def _parts(found: sympy.Set) -> list[sympy.Set]:
    if found in (S.EmptySet,):
        return []
    if found == S.Reals:
        return [Interval(-sympy.oo, sympy.oo, True, True)]
    parts = list(found.args) if isinstance(found, sympy.Union) else [found]
    if not all(isinstance(part, Interval | sympy.FiniteSet) for part in parts):
        raise Refused("no union of intervals")
    return parts


def _pieces(found: sympy.Set) -> list[tuple]:
    pieces = []
    for part in _parts(found):
        if isinstance(part, Interval):
            pieces.append((part.start, part.left_open, part.end, part.right_open))
        else:
            pieces += [(value, False, value, False) for value in part]
    return sorted(pieces, key=lambda piece: sympy.N(piece[0], 30))


def same_pieces(mine: sympy.Set, gold: sympy.Set) -> bool:
    """Whether two unions of intervals and points are the same set."""
    left, right = _pieces(mine), _pieces(gold)
    return len(left) == len(right) and all(
        bool(a[1]) == bool(b[1])
        and bool(a[3]) == bool(b[3])
        and same_expression(a[0], b[0])
        and same_expression(a[2], b[2])
        for a, b in zip(left, right, strict=True)
    )
