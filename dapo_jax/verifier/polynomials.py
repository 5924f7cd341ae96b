"""Polynomials in atoms: variables, roots, logarithms and powers of e.

Each generator is an `Atom`; an `Element` is a fraction of two polynomials.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

from flint import Ordering, fmpq, fmpq_mpoly, fmpq_mpoly_ctx, fmpz

from dapo_jax.verifier.ball_arithmetic import Ball

MAX_ATOMS = 32

# Newer atoms stand before older ones, on which their relations are built.
_RING = fmpq_mpoly_ctx.get(("g", MAX_ATOMS), Ordering.lex)
GENERATORS = _RING.gens()[::-1]
Poly = fmpq_mpoly


class Element(NamedTuple):
    """Fraction above / below; below leads with 1 and has no common factor with above."""

    above: Poly
    below: Poly

    def __str__(self) -> str:
        return f"{self.above} / {self.below}"


@dataclasses.dataclass
class Atom:
    """Generator of the polynomial ring.

    kind: 'symbol', 'pi', 'root', 'exp', 'log', or the function that `argument` is given to.
    constant: no variable in it. real: for real variables. whole: the name of an integer variable.
    value: a constant's ball, by bits.
    """

    kind: str
    generator: Poly
    argument: Element | None = None
    constant: bool = True
    whole: str | None = None
    real: bool = True
    inverse_is_conjugate: bool = False  # it lies on the unit circle
    degree: int = 0  # with `radicand`: generator ** degree == radicand
    radicand: Poly | None = None
    odd: bool = False  # the real root of odd degree of any real number
    value: Callable[[int], Ball] | None = None
    log2_conjugates: float | None = None  # an algebraic integer: no conjugate is larger; else None
    balls: dict[int, Ball] = dataclasses.field(default_factory=dict)

    @property
    def algebraic(self) -> bool:
        """Return True for an algebraic integer with a bound on its conjugates."""
        return self.log2_conjugates is not None

    @functools.cached_property
    def relation(self) -> Poly:
        assert self.radicand is not None  # with a degree
        return self.generator**self.degree - self.radicand


def powers_of(exponents: tuple[int, ...]) -> dict[int, int]:
    """Return the exponents of a term by number of atom."""
    return {MAX_ATOMS - 1 - place: int(n) for place, n in enumerate(exponents) if n}


def monomial(powers: dict[int, int]) -> Poly:
    """Return the product of atoms, by number, to these powers."""
    exponents = tuple(powers.get(MAX_ATOMS - 1 - place, 0) for place in range(MAX_ATOMS))
    return _RING.from_dict({exponents: fmpq(1)})


def without(poly: Poly, chosen: set[int]) -> dict[tuple[tuple[int, int], ...], Poly]:
    """Return the coefficients of the powers of chosen atoms: {powers: coefficient}."""
    terms: dict[tuple, dict[tuple, fmpq]] = {}
    for exponents, coefficient in poly.terms():
        key = tuple(item for item in powers_of(exponents).items() if item[0] in chosen)
        rest = tuple(
            0 if MAX_ATOMS - 1 - place in chosen else n for place, n in enumerate(exponents)
        )
        terms.setdefault(key, {})[rest] = coefficient
    return {key: _RING.from_dict(inner) for key, inner in terms.items()}


def constant(value: fmpq | fmpz | int) -> Poly:
    """Return the constant polynomial of a rational number."""
    return _RING.constant(fmpq(value))


ZERO, ONE = constant(0), constant(1)


def rational(value: fmpq | fmpz | int) -> Element:
    """Return the element of a rational number."""
    return Element(constant(value), ONE)


def size(poly: Poly) -> float:
    """Return the cost, in units of work, of an operation with each term."""
    return 1 + sum(1 + (c.p.bit_length() + c.q.bit_length()) / 64 for c in poly.coeffs())


def as_rational(poly: Poly) -> fmpq | None:
    """Return the rational value of a polynomial; None if atoms occur."""
    return (poly.leading_coefficient() if poly else fmpq(0)) if poly.is_constant() else None
