"""Factorials and binomial coefficients of elements, as products if they are short."""

import math

from flint import fmpq

from dapo_jax.verifier.expression_tree import Undecided
from dapo_jax.verifier.number_field import NumberField
from dapo_jax.verifier.polynomials import ONE, Element, as_rational, powers_of, rational
from dapo_jax.verifier.roots import opaque

LARGEST_FACTORIAL, LARGEST_SHIFT, LARGEST_CHOICE = 1_000, 20, 50


def factorial(field: NumberField, a: Element) -> Element:
    """Return the factorial a!; of x + c, a product with x!."""
    number = as_rational(a.above) if a.below == ONE else None
    if number is not None:
        if number.q != 1 or not 0 <= number <= LARGEST_FACTORIAL:
            raise Undecided("a factorial of no small whole number")
        return rational(math.factorial(int(number.p)))
    fixed = {powers_of(e) == {}: c for e, c in a.above.terms()}.get(True, fmpq(0))
    shift = int(fixed.floor()) if a.below == ONE else 0
    if abs(shift) > LARGEST_SHIFT:
        raise Undecided("a factorial far from its variable")
    base = field.subtract(a, rational(shift))
    result = opaque(field, "factorial", base)
    for j in range(shift):
        result = field.multiply(result, field.add(base, rational(j + 1)))
    for j in range(-shift):
        result = field.divide(result, field.subtract(base, rational(j)))
    return result


def binomial(field: NumberField, above: Element, below: Element) -> Element:
    """Return binomial coefficient: a product for a small whole number below, else by factorials."""
    k = as_rational(below.above) if below.below == ONE else None
    if k is not None and k.q == 1 and 0 <= k <= LARGEST_CHOICE:
        result = rational(1)
        for j in range(int(k.p)):
            result = field.multiply(result, field.subtract(above, rational(j)))
        return field.scale(result, fmpq(1, math.factorial(int(k.p))))
    rest = factorial(field, field.subtract(above, below))
    return field.divide(factorial(field, above), field.multiply(factorial(field, below), rest))
