"""Closed forms of infinite sums, integrals and limits by sympy.

The last stage of a comparison, in the worker process. Sympy's expressions are built from trees,
never from text, and what it returns is a tree again, which rough numbers have to confirm; equality
is then decided by balls. Python calls are counted, so that the limit is the same on any machine.
"""

import functools
import inspect
import sys
from collections.abc import Callable
from types import FrameType

from flint import fmpq

from dapo_jax.extras.math import expression_tree as trees
from dapo_jax.extras.math.ball_arithmetic import Undefined, enclose, with_bits
from dapo_jax.extras.math.expression_tree import Budget, Refused, Tree, Undecided
from dapo_jax.extras.math.sample_points import COMPLEX, INTEGERS

MAX_CALLS = 300_000  # of Python functions, in one closed form; a unit of the budget each
OPERATORS = {"total", "times", "integral", "limit"}
CHECK_BITS, TOLERANCE = 192, 1e-5
PLACE, NEAR = 0.375, 2.0**-30  # where an antiderivative is checked; how near to a limit
_SAME_NAME = (
    "log sin cos tan cot sec csc sinh cosh tanh asin acos atan acot asec acsc asinh acosh atanh "
    "exp floor ceiling factorial binomial"
).split()
_OTHER_NAME = {"abs": "Abs", "max": "Max", "min": "Min"}
_NAMES = {name: name for name in _SAME_NAME} | _OTHER_NAME
_KINDS = {name: kind for kind, name in _NAMES.items()}


class NotLoaded(Exception):
    """Sympy is needed; it loads so slowly that this belongs to no verdict's time."""


class _TooManyCalls(BaseException):
    """A BaseException, since sympy catches every Exception."""


def load() -> None:
    """Import sympy, with what it imports when it first works out integrals and sums."""
    import sympy

    x = sympy.Symbol("x")
    sympy.Integral(sympy.exp(-(x**2)), (x, -sympy.oo, sympy.oo)).doit()
    sympy.Sum(x**-2, (x, 1, sympy.oo)).doit()


def _sympy():
    if "sympy" not in sys.modules:
        raise NotLoaded
    return sys.modules["sympy"]


def _limited(compute: Callable, budget: Budget):
    """Return a result of sympy's. Raises `Undecided` after `MAX_CALLS` function calls."""
    sympy, calls, most = _sympy(), 0, min(MAX_CALLS, budget.left)

    def count(frame: FrameType, event: str, _argument) -> None:
        nonlocal calls
        calls += event == "call"
        # Not in a generator: what is raised while one is closed is lost, and the count with it.
        if calls > most and not frame.f_code.co_flags & inspect.CO_GENERATOR:
            raise _TooManyCalls

    sympy.core.cache.clear_cache()  # the count must not depend on earlier verdicts
    try:
        sys.setprofile(count)
        try:
            return compute()
        finally:
            sys.setprofile(None)
    except _TooManyCalls:
        raise Undecided("too many steps of sympy") from None
    except (ArithmeticError, ValueError, TypeError, AttributeError, NotImplementedError) as error:
        raise Undecided(f"sympy: {error!r}") from None
    finally:
        budget.spend(calls)


# --- trees and sympy's expressions --------------------------------------------------------------


def _to_sympy(tree: Tree):
    sympy = _sympy()
    match tree.kind:
        case "number":
            return sympy.Rational(int(tree.rational.p), int(tree.rational.q))
        case "symbol" | "bound":
            return sympy.Symbol(tree.name, real=None if tree.name[0] in COMPLEX else True)
        case "pi" | "e" | "i" | "infinity":
            return {"pi": sympy.pi, "e": sympy.E, "i": sympy.I, "infinity": sympy.oo}[tree.kind]
    parts = [_to_sympy(part) for part in tree.parts]
    match tree.kind:
        case "sum":
            return sympy.Add(*parts)
        case "product":
            return parts[0] * parts[1]
        case "quotient":
            return parts[0] / parts[1]
        case "power":
            return parts[0] ** parts[1]
    if tree.kind in _NAMES:
        return getattr(sympy, _NAMES[tree.kind])(*parts)
    if tree.kind not in OPERATORS:
        raise Refused("nothing that sympy is asked for")
    *ends, body = parts
    variable = sympy.Symbol(tree.name, real=True)
    if tree.kind == "limit":
        return sympy.Limit(body, variable, ends[0], "-" if ends[0] is sympy.oo else "+-")
    operator = {"total": sympy.Sum, "times": sympy.Product, "integral": sympy.Integral}[tree.kind]
    return operator(body, (variable, *ends) if ends else variable)


def _from_sympy(expression) -> Tree:
    sympy = _sympy()
    constants = {sympy.pi: trees.PI, sympy.E: trees.EULER, sympy.I: trees.IMAGINARY}
    if expression in constants:
        return constants[expression]
    if expression.is_Rational:
        return trees.number(fmpq(int(expression.p), int(expression.q)))
    if expression.is_Symbol:
        return Tree("symbol", value=expression.name.removeprefix("#"))
    if expression.is_Piecewise:  # its first case; rough numbers confirm it or not
        return _from_sympy(expression.args[0][0])
    parts = [_from_sympy(part) for part in expression.args]
    if expression.is_Add:
        return trees.add(parts)
    if expression.is_Mul:
        product = parts[0]
        for part in parts[1:]:
            product = trees.multiply(product, part)
        return product
    if expression.is_Pow:
        return trees.power(*parts)
    kind = _KINDS.get(type(expression).__name__)
    if kind is None:
        raise Refused("a function that has no tree")
    return Tree(kind, tuple(parts))


# --- closed forms -------------------------------------------------------------------------------


def has_operators(*expressions: Tree) -> bool:
    """Test for sums, products, integrals or limits."""
    return any(node.kind in OPERATORS for tree in expressions for node in trees.nodes(tree))


def closed_form(tree: Tree, budget: Budget) -> Tree:
    """Return an expression without sums, products, integrals and limits.

    Raises:
        Undecided, Refused: there is no closed form, or none that rough numbers confirm.
        NotLoaded: sympy has to be loaded first.
    """
    if not has_operators(tree):
        return tree
    tree = tree._replace(parts=tuple(closed_form(part, budget) for part in tree.parts))
    if tree.kind not in OPERATORS:
        return tree
    result = _from_sympy(_limited(lambda: _to_sympy(tree).doit(), budget))
    names = sorted(trees.symbols(tree) | trees.symbols(result))
    point = {
        name: trees.number(fmpq(7 + i) if name in INTEGERS else fmpq(3 + i, 8 + i))
        for i, name in enumerate(names)
    }
    check = _Check(point, budget)
    try:
        rough, exact = check.values(tree, result)
    except (ArithmeticError, ValueError, TypeError) as error:
        raise Undecided(f"no rough value: {error!r}") from None
    if not abs(rough - exact) <= TOLERANCE * max(1, abs(exact)):
        raise Undecided("a closed form that rough numbers do not confirm")
    return result


class _Check:
    """Rough numbers of an operator's tree and of its closed form, at one point."""

    def __init__(self, point: dict[str, Tree], budget: Budget):
        import mpmath  # with sympy

        self._mpmath, self._point, self._budget = mpmath, point, budget

    def values(self, tree: Tree, result: Tree):
        """Return two numbers that are near if `result` is the value of `tree`."""
        *ends, body = tree.parts
        limits = [self._end(end) for end in ends]
        inside = functools.partial(self._at, body, tree.name)
        if tree.kind == "integral" and not ends:
            name = tree.name.removeprefix("#")
            slope = self._mpmath.diff(functools.partial(self._at, result, name), PLACE)
            return slope, inside(PLACE)
        exact = self._at(result, "", 0)
        if tree.kind == "limit":
            near = 1 / NEAR if limits[0] == self._mpmath.inf else limits[0] + NEAR
            return inside(near), exact
        rough = {"integral": "quad", "total": "nsum", "times": "nprod"}[tree.kind]
        return getattr(self._mpmath, rough)(inside, limits), exact

    def _at(self, tree: Tree, name: str, place):
        """Return the value of an expression where one variable has another value; 0 for none."""
        place = self._mpmath.mpf(place)
        value = trees.number(fmpq(int(place.man)) * fmpq(2) ** int(place.exp))
        tree = trees.substitute(tree, {**self._point, name: value}, self._budget)
        try:
            with with_bits(CHECK_BITS):
                ball = enclose(tree, self._budget)
        except Undefined:
            return self._mpmath.mpf(0)
        parts = [self._mpmath.ldexp(*map(int, x.mid().man_exp())) for x in (ball.real, ball.imag)]
        return self._mpmath.mpc(*parts) if parts[1] else parts[0]

    def _end(self, tree: Tree):
        if tree.kind == "infinity":
            return self._mpmath.inf
        if any(node.kind == "infinity" for node in trees.nodes(tree)):
            return -self._mpmath.inf
        return self._at(tree, "", 0).real
