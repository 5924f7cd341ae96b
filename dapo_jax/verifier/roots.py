"""Roots, signs and absolute values of elements.

Where the real line has corners, cases decide: an absolute value of what has a variable asks for
the sign of each of its factors (`NeedsSign`).
"""

import math

from flint import fmpq, fmpz

from dapo_jax.verifier.ball_arithmetic import Ball, Undefined, principal_root, with_bits
from dapo_jax.verifier.expression_tree import Undecided
from dapo_jax.verifier.number_field import BITS, NumberField
from dapo_jax.verifier.polynomials import (
    ONE,
    Element,
    Poly,
    as_rational,
    constant,
    powers_of,
    rational,
)

TRIAL_BITS = 64  # up to here numbers are factored whole, beyond by small primes alone
LARGEST_TRIED = 2_000


class NeedsSign(Exception):
    """Case split by the sign of a polynomial (0 belongs to both cases)."""

    def __init__(self, poly: Poly):
        super().__init__(str(poly))
        self.name, self.poly = str(poly), poly


def _not_known(bits: int) -> Ball:
    raise Undecided("a value that nothing here computes")


def opaque(field: NumberField, kind: str, a: Element) -> Element:
    """Return the value of a function without known rules."""
    constant = field.is_constant(a)
    return field.atom(kind, str(a), argument=a, constant=constant, real=False, value=_not_known)


def prime_powers(field: NumberField, number: fmpq) -> list[tuple[fmpz, int]]:
    """Return the factors of a positive number and their powers, below 0 in the denominator."""
    bits = number.p.bit_length() + number.q.bit_length()
    field.budget.spend(20 + (bits if bits > TRIAL_BITS else 0))
    below = [(prime, -power) for prime, power in _factors(number.q)]
    return _factors(number.p) + below


def _factors(n: fmpz) -> list[tuple[fmpz, int]]:
    """Return the prime powers of a positive integer; a large factor may be left as it is."""
    return n.factor() if n.bit_length() <= TRIAL_BITS else n.factor(trial_limit=LARGEST_TRIED)


def _root_of_number(field: NumberField, number: fmpq, degree: int) -> Element:
    """Return the positive root of a positive number."""
    result = rational(1)
    for prime, power in prime_powers(field, number):
        whole, rest = divmod(power, degree)
        shared = math.gcd(rest, degree)
        result = field.scale(result, fmpq(prime) ** whole)
        if rest:
            small = _root_atom(field, Element(constant(fmpq(prime)), ONE), degree // shared)
            result = field.multiply(result, field.power(small, rest // shared))
    return result


def _root_atom(
    field: NumberField,
    radicand: Element,
    degree: int,
    *,
    real: bool = True,
    on_circle: bool = False,
    odd: bool = False,
) -> Element:
    """Return principal root of a polynomial with whole coefficients; of odd ones the real root."""
    poly, is_constant = radicand.above, field.is_constant(radicand)
    inner = [atom for _, atom in field.atoms_in(poly)]
    bound = None
    if is_constant and all(atom.algebraic for atom in inner):
        bound = max(0.0, field.log2_conjugates(poly)) / degree

    def value(bits: int) -> Ball:
        with with_bits(bits):
            return principal_root(field.ball(poly, bits), degree)

    return field.atom(
        "root",
        f"{poly} {degree}{' odd' * odd}",
        argument=radicand,
        constant=is_constant,
        real=odd or real and is_constant and not on_circle,
        inverse_is_conjugate=on_circle,
        degree=degree,
        radicand=poly,
        odd=odd,
        value=value,
        log2_conjugates=bound,
    )


def minus_one_to(field: NumberField, degree: int) -> Element:
    """Return the root of -1: (-1)^(1/degree) = exp(i pi / degree)."""
    return rational(-1) if degree == 1 else _root_atom(field, rational(-1), degree, on_circle=True)


def imaginary(field: NumberField) -> Element:
    """Return the imaginary unit."""
    return minus_one_to(field, 2)


def root(field: NumberField, a: Element, degree: int) -> Element:
    """Return the principal root."""
    number = as_rational(a.above) if a.below == ONE else None
    if number is not None:
        if number == 0:
            return rational(0)
        size = _root_of_number(field, abs(number), degree)
        return size if number > 0 else field.multiply(size, minus_one_to(field, degree))
    above, below = Element(a.above, ONE), Element(a.below, ONE)
    if not field.is_constant(a):
        if a.below == ONE:
            return _root_of_poly(field, a.above, degree)
        if any(not atom.real for _, atom in field.atoms_in(a.below)):
            return opaque(field, f"root {degree}", a)
        size = absolute(field, below)
        inside = field.multiply(field.multiply(above, below), field.power(size, degree - 2))
        return field.divide(root(field, inside, degree), size)
    if is_real(field, a):
        direction = sign(field, a)
        if direction <= 0:
            positive = root(field, field.scale(a, -1), degree) if direction else rational(0)
            return field.multiply(positive, minus_one_to(field, degree))
    if a.below == ONE:
        return _root_of_poly(field, a.above, degree)
    # (n / d)^(1/k) = (n d^(k-1))^(1/k) / d for d > 0
    factor = rational(sign(field, below)) if is_real(field, below) else conjugate(field, below)
    above, below = field.multiply(above, factor), field.multiply(below, factor)
    inside = field.multiply(above, field.power(below, degree - 1))
    return field.divide(root(field, inside, degree), below)


def _root_of_poly(field: NumberField, poly: Poly, degree: int) -> Element:
    content = content_of(poly)
    primitive, size = poly / content, root(field, rational(content), degree)
    atoms = [atom for _, atom in field.atoms_in(poly)]
    is_constant = field.is_constant(Element(poly, ONE))
    real = is_constant and is_real(field, Element(poly, ONE))
    whole = all(atom.algebraic for atom in atoms) or degree % 2 and not is_constant
    if whole or not all(atom.real for atom in atoms):
        atom_root = _root_atom(field, Element(primitive, ONE), degree, real=real)
        return field.multiply(size, atom_root)
    field.budget.spend(50 * len(poly) + int(poly.total_degree()) ** 2)
    unit, factors = primitive.factor_squarefree()  # of a real square the root is the size
    inside = constant(unit)
    for factor, power in factors:
        whole, rest = divmod(power, degree)
        if whole:
            length = absolute(field, Element(factor, ONE))
            size = field.multiply(size, field.power(length, whole))
            if degree % 2 and sign(field, Element(factor, ONE)) < 0:  # of a constant
                inside = inside * (-1) ** whole
        inside = inside * factor**rest
    if (number := as_rational(inside)) is not None:
        return field.multiply(size, root(field, rational(number), degree))
    return field.multiply(size, _root_atom(field, Element(inside, ONE), degree, real=real))


def real_root(field: NumberField, a: Element, degree: int) -> Element:
    """Return the real root of odd degree of what is real; else the principal root."""
    if field.is_constant(a):
        negative = is_real(field, a) and sign(field, a) < 0
        value = root(field, field.scale(a, -1) if negative else a, degree)
        return field.scale(value, -1) if negative else value
    if any(not atom.real for _, atom in field.atoms_in(*a)):
        return root(field, a, degree)
    parts = []
    for poly in a:
        field.budget.spend(50 * len(poly) + int(poly.total_degree()) ** 2)
        unit, factors = poly.factor()
        result = rational(1)
        for factor, power in factors:
            content = content_of(factor) * (1 if factor.leading_coefficient() > 0 else -1)
            unit, factor = unit * content**power, Element(factor / content, ONE)
            whole, rest = divmod(power, degree)
            result = field.multiply(result, field.power(factor, whole))
            if rest and field.is_constant(factor):
                result = field.multiply(result, field.power(real_root(field, factor, degree), rest))
            elif rest:
                small = _root_atom(field, factor, degree, odd=True)
                result = field.multiply(result, field.power(small, rest))
        parts.append(field.multiply(result, real_root(field, rational(unit), degree)))
    return field.divide(*parts)


def content_of(poly: Poly) -> fmpq:
    """Return the content: divided by it, the coefficients are coprime integers."""
    coefficients = poly.coeffs()
    above = math.gcd(*(int(c.p) for c in coefficients))
    return fmpq(above, math.lcm(*(int(c.q) for c in coefficients)))


# --- real and complex ---------------------------------------------------------------------------


def conjugate(field: NumberField, a: Element) -> Element:
    """Return the complex conjugate; raise `Undecided` if an atom's is not known."""
    if all(atom.real for _, atom in field.atoms_in(*a)):
        return a
    parts = []
    for poly in a:
        total = rational(0)
        for exponents, coefficient in poly.terms():
            term = rational(coefficient)
            for number, n in powers_of(exponents).items():
                atom = field.atoms[number]
                if not (atom.real or atom.inverse_is_conjugate):
                    raise Undecided("a conjugate that is not known")
                other = Element(atom.generator, ONE)
                if not atom.real and atom.kind == "root":  # of r with r^k = -1 it is -r^(k - 1)
                    other = Element(-(atom.generator ** (atom.degree - 1)), ONE)
                elif not atom.real:
                    other = field.divide(rational(1), other)
                term = field.multiply(term, field.power(other, n))
            total = field.add(total, term)
        parts.append(total)
    return field.divide(*parts)


def is_real(field: NumberField, a: Element) -> bool:
    """Return True if a constant is proved to be real."""
    try:
        other = conjugate(field, a)
        return other == a or field.vanishes(field.subtract(a, other).above)
    except Undecided:
        return False


def sign(field: NumberField, a: Element) -> int:
    """Return the sign of a real constant: -1, 0 or 1. Raises `Undecided`."""
    if field.vanishes(a.above):
        return 0
    if not is_real(field, a):
        raise Undecided("not known to be real")
    for bits in BITS:
        try:
            real = field.value(a, bits).real
        except Undefined:
            continue
        if real > 0 or real < 0:
            return 1 if real > 0 else -1
    raise Undecided("a sign that takes too many bits")


def absolute(field: NumberField, a: Element) -> Element:
    """Return the absolute value; raise `NeedsSign` if it depends on variables."""
    if field.is_constant(a):
        if is_real(field, a):
            return field.scale(a, sign(field, a))
        return root(field, field.multiply(a, conjugate(field, a)), 2)
    if any(not atom.real for _, atom in field.atoms_in(*a)):
        try:
            return root(field, field.multiply(a, conjugate(field, a)), 2)
        except Undecided:
            return opaque(field, "abs", a)
    size = [rational(1), rational(1)]
    for i, poly in enumerate(a):
        field.budget.spend(50 * len(poly) + int(poly.total_degree()) ** 2)
        unit, factors = poly.factor()
        size[i] = rational(abs(unit))
        for factor, power in factors:
            positive = Element(factor * _sign_of_factor(field, factor), ONE)
            size[i] = field.multiply(size[i], field.power(positive, power))
    return field.divide(*size)


def _sign_of_factor(field: NumberField, factor: Poly) -> int:
    if field.is_constant(Element(factor, ONE)):
        return sign(field, Element(factor, ONE))
    ((_, atom), *others) = field.atoms_in(factor)
    if atom.kind == "exp" and atom.real and not others and factor == atom.generator:
        return 1
    even = all(n % 2 == 0 for exponents in factor.monoms() for n in exponents)
    signs = {c > 0 for c in factor.coeffs()}
    if even and len(signs) == 1:
        return 1 if signs == {True} else -1
    if str(factor) not in field.signs:
        raise NeedsSign(factor)
    return field.signs[str(factor)]
