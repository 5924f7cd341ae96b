"""Translation of expression trees to elements of a number field."""

from collections.abc import Callable

from flint import fmpq

from dapo_jax.verifier import elementary_functions, factorials
from dapo_jax.verifier.expression_tree import Refused, Tree
from dapo_jax.verifier.number_field import NumberField
from dapo_jax.verifier.polynomials import Element, rational
from dapo_jax.verifier.roots import absolute, imaginary, root


def _circle(field: NumberField, a: Element, sign: int) -> Element:
    """Return exp(i a) + sign * exp(-i a)."""
    turned = field.multiply(imaginary(field), a)
    back = elementary_functions.exp(field, field.scale(turned, -1))
    return field.add(elementary_functions.exp(field, turned), field.scale(back, sign))


def _sin(field: NumberField, a: Element) -> Element:
    return field.scale(field.multiply(_circle(field, a, -1), imaginary(field)), fmpq(-1, 2))


def _cos(field: NumberField, a: Element) -> Element:
    return field.scale(_circle(field, a, 1), fmpq(1, 2))


def _hyperbola(field: NumberField, a: Element, sign: int) -> Element:
    """Return (exp(a) + sign * exp(-a)) / 2."""
    other = elementary_functions.exp(field, field.scale(a, -1))
    return field.scale(
        field.add(elementary_functions.exp(field, a), field.scale(other, sign)), fmpq(1, 2)
    )


def _asin(field: NumberField, a: Element) -> Element:
    """Return -i log(i a + sqrt(1 - a^2))."""
    i = imaginary(field)
    height = root(field, field.subtract(rational(1), field.multiply(a, a)), 2)
    turn = elementary_functions.log(field, field.add(field.multiply(i, a), height))
    return field.scale(field.multiply(i, turn), -1)


def _atan(field: NumberField, a: Element) -> Element:
    """Return i / 2 (log(1 - i a) - log(1 + i a))."""
    i = imaginary(field)
    turned = field.multiply(i, a)
    below = elementary_functions.log(field, field.subtract(rational(1), turned))
    above = elementary_functions.log(field, field.add(rational(1), turned))
    return field.scale(field.multiply(i, field.subtract(below, above)), fmpq(1, 2))


def _acos(field: NumberField, a: Element) -> Element:
    quarter = field.scale(elementary_functions.pi(field), fmpq(1, 2))
    return field.subtract(quarter, _asin(field, a))


def _acosh(field: NumberField, a: Element) -> Element:
    """Return log(a + sqrt(a + 1) sqrt(a - 1))."""
    roots = (root(field, field.add(a, rational(shift)), 2) for shift in (1, -1))
    return elementary_functions.log(field, field.add(a, field.multiply(*roots)))


def _turned(function: Callable) -> Callable[[NumberField, Element], Element]:
    """Return -i f(i a)."""

    def value(field: NumberField, a: Element) -> Element:
        i = imaginary(field)
        return field.scale(field.multiply(i, function(field, field.multiply(i, a))), -1)

    return value


def _over(above: Callable, below: Callable) -> Callable[[NumberField, Element], Element]:
    return lambda field, a: field.divide(above(field, a), below(field, a))


def _one(field: NumberField, a: Element) -> Element:
    return rational(1)


_FUNCTIONS: dict[str, Callable[[NumberField, Element], Element]] = {
    "exp": elementary_functions.exp,
    "log": elementary_functions.log,
    "sin": _sin,
    "cos": _cos,
    "tan": _over(_sin, _cos),
    "cot": _over(_cos, _sin),
    "sec": _over(_one, _cos),
    "csc": _over(_one, _sin),
    "sinh": lambda field, a: _hyperbola(field, a, -1),
    "cosh": lambda field, a: _hyperbola(field, a, 1),
    "tanh": _over(
        lambda field, a: _hyperbola(field, a, -1), lambda field, a: _hyperbola(field, a, 1)
    ),
    "asin": _asin,
    "acos": _acos,
    "atan": _atan,
    "acot": lambda field, a: _atan(field, field.divide(rational(1), a)),
    "asec": lambda field, a: _acos(field, field.divide(rational(1), a)),
    "acsc": lambda field, a: _asin(field, field.divide(rational(1), a)),
    "asinh": _turned(_asin),
    "acosh": _acosh,
    "atanh": _turned(_atan),
    "abs": absolute,
    "floor": elementary_functions.floor,
    "ceiling": lambda field, a: field.scale(
        elementary_functions.floor(field, field.scale(a, -1)), -1
    ),
    "factorial": factorials.factorial,
}


def read(field: NumberField, tree: Tree) -> Element:
    """Return the element that a tree describes.

    Raises:
        Refused: the tree has no value.
        Undecided: the budget ends, or no rule here applies.
        NeedsSign: the value depends on a sign.
    """
    field.budget.spend(5)
    match tree.kind:
        case "number":
            return rational(tree.rational)
        case "symbol":
            return elementary_functions.symbol(field, tree.name)
        case "pi":
            return elementary_functions.pi(field)
        case "e":
            return elementary_functions.exp(field, rational(1))
        case "i":
            return imaginary(field)
        case "infinity":
            raise Refused("infinity is no number")
    parts = [read(field, part) for part in tree.parts]
    match tree.kind:
        case "sum":
            total = parts[0]
            for part in parts[1:]:
                total = field.add(total, part)
            return total
        case "product":
            return field.multiply(*parts)
        case "quotient":
            return field.divide(*parts)
        case "power":
            if tree.parts[0].kind == "e":
                return elementary_functions.exp(field, parts[1])
            return elementary_functions.power(field, *parts)
        case "odd_root":
            return elementary_functions.odd_root(field, parts[0], int(tree.parts[1].rational.p))
        case "function":
            key = f"{tree.value} {parts[0]}"
            return field.atom("function", key, argument=parts[0], constant=False)
        case "binomial":
            return factorials.binomial(field, *parts)
    return _FUNCTIONS[tree.kind](field, parts[0])
