"""Operations of sympy that refuse what would be large, whatever the text asks for."""

import sympy
from sympy import Rational

LARGEST_POWER_DIGITS = 20_000  # of a power of rationals
LARGEST_EXPONENT, LARGEST_FACTORIAL = 1_000, 1_000


class Refused(ValueError):
    """Text that is no expression, or one that is too large."""


def _digits(number: Rational) -> float:
    return max(number.p.bit_length(), number.q.bit_length()) * 0.302


def power(base: sympy.Expr, exponent: sympy.Expr) -> sympy.Expr:
    """base ** exponent. Raises `Refused` where that would be large."""
    if base == 0 and exponent.is_number and not exponent.is_positive:
        raise Refused("a power of zero")
    if exponent.is_Rational and base.is_Rational:
        if abs(exponent.p) * _digits(base) > LARGEST_POWER_DIGITS and abs(base.p) + base.q > 2:
            raise Refused("a large power")
    elif exponent.is_Rational:
        if abs(exponent) > LARGEST_EXPONENT or exponent.q > LARGEST_EXPONENT:
            raise Refused("a large exponent")
    elif exponent.is_number and base.is_number:
        value = exponent.evalf(15)
        if not value.is_number or abs(value) > LARGEST_EXPONENT:
            raise Refused("a large exponent")
    return base**exponent


def factorial(argument: sympy.Expr) -> sympy.Expr:
    """argument! Raises `Refused` for large or non-integer numbers."""
    if argument.is_number and not (argument.is_Integer and 0 <= argument <= LARGEST_FACTORIAL):
        raise Refused("a large factorial")
    return sympy.factorial(argument)


def binomial(above: sympy.Expr, below: sympy.Expr) -> sympy.Expr:
    """above over below. Raises `Refused` for large or non-integer numbers."""
    for part in (above, below):
        if part.is_number and not (part.is_Integer and 0 <= part <= LARGEST_FACTORIAL):
            raise Refused("a large binomial")
    return sympy.binomial(above, below)


def divide(above: sympy.Expr, below: sympy.Expr) -> sympy.Expr:
    """above / below. Raises `Refused` where that is undefined."""
    if below == 0:
        raise Refused("division by zero")
    return above / below
