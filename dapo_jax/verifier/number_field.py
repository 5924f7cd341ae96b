"""Exact arithmetic with atoms, and proofs that a value is zero.

A root r of degree k obeys r^k = radicand, and polynomials are reduced by that; nothing else is
assumed of atoms, so what is found to be zero is zero. That something is not zero is shown by balls,
and that a number is zero by the distance from 0 that it would have to keep.
"""

import math
from collections.abc import Callable, Mapping

from flint import acb, arb, fmpq

from dapo_jax.verifier.ball_arithmetic import Ball, Undefined, is_apart, with_bits
from dapo_jax.verifier.expression_tree import Budget, Refused, Undecided
from dapo_jax.verifier.polynomials import (
    GENERATORS,
    MAX_ATOMS,
    ONE,
    Atom,
    Element,
    Poly,
    as_rational,
    constant,
    monomial,
    powers_of,
    rational,
    size,
    without,
)

BITS = (64, 256, 1_024, 4_096, 16_384)  # of one ball after another
MAX_BITS = 60_000  # that the bound of an algebraic number may ask for
LARGEST_DEGREE = 4_096  # of the field in which that bound is computed
IMAGINARY_KEY = "-1 2"  # of the atom i
MAX_FACTORS = 200  # of a product of powers that is compared with 1


class NumberField:
    """Arithmetic with atoms; an expression adds those that it needs.

    Args:
        budget: work that may be spent.
        signs: in a case of signs, those of the polynomials under absolute values.
        residues: in a case of remainders, (modulus, remainder) by integer variable; modulus 0 gives
            the variable that value.
    """

    def __init__(
        self,
        budget: Budget,
        signs: dict[str, int] | None = None,
        residues: Mapping[str, tuple[int, int | fmpq]] | None = None,
    ):
        self.budget, self.atoms = budget, []
        self.signs, self.residues = signs or {}, residues or {}
        self.moduli: dict[str, int] = {}  # that would have decided more, by integer variable
        self._numbers: dict[tuple[str, str], int] = {}
        self.exponentials: dict[str, tuple[int, int]] = {}  # exp(monomial / d): (atom, d)

    # --- atoms ---------------------------------------------------------------------------------

    def atom(self, kind: str, key: str, **fields) -> Element:
        """Return the element of the atom of that kind and key; a new atom has these `fields`."""
        number = self._numbers.get((kind, key))
        if number is None:
            number = len(self.atoms)
            if number == MAX_ATOMS:
                raise Undecided("too many atoms")
            self.atoms.append(Atom(kind, GENERATORS[number], **fields))
            self._numbers[kind, key] = number
        return Element(GENERATORS[number], ONE)

    def atoms_in(self, *polys: Poly) -> list[tuple[int, Atom]]:
        """Return the atoms that occur in polynomials, as (number, atom), oldest first."""
        degrees = [poly.degrees() for poly in polys]
        return [
            (number, atom)
            for number, atom in enumerate(self.atoms)
            if any(of[MAX_ATOMS - 1 - number] for of in degrees)
        ]

    def is_constant(self, element: Element) -> bool:
        return all(atom.constant for _, atom in self.atoms_in(*element))

    # --- arithmetic ----------------------------------------------------------------------------

    def reduce(self, poly: Poly) -> Poly:
        """Return the polynomial with every root below its degree."""
        for atom in reversed(self.atoms):
            if atom.degree:
                (place,) = (i for i, n in enumerate(atom.generator.degrees()) if n)
                steps = int(poly.degrees()[place]) // atom.degree
                if steps:
                    self.budget.spend(size(poly) * (1 + size(atom.radicand)) * steps)
                    poly = divmod(poly, atom.relation)[1]
        return poly

    def times(self, a: Poly, b: Poly) -> Poly:
        """Return the product a * b, reduced."""
        self.budget.spend(size(a) * size(b))
        return self.reduce(a * b)

    def fraction(self, above: Poly, below: Poly) -> Element:
        """Return the fraction above / below; `below` is known not to vanish."""
        number = as_rational(below)
        if number is None:
            degrees = int(above.total_degree()) + int(below.total_degree())
            self.budget.spend(10 * (size(above) + size(below) + degrees))
            shared = above.gcd(below)
            if not shared.is_constant():
                above, below = above / shared, below / shared
            number = below.leading_coefficient()
        return Element(above / number, below / number)

    def add(self, a: Element, b: Element) -> Element:
        if a.below == b.below:
            return self.fraction(a.above + b.above, a.below)
        above = self.times(a.above, b.below) + self.times(b.above, a.below)
        return self.fraction(above, self.times(a.below, b.below))

    def multiply(self, a: Element, b: Element) -> Element:
        return self.fraction(self.times(a.above, b.above), self.times(a.below, b.below))

    def scale(self, a: Element, factor: fmpq | int) -> Element:
        return Element(a.above * fmpq(factor), a.below)

    def subtract(self, a: Element, b: Element) -> Element:
        return self.add(a, self.scale(b, -1))

    def divide(self, a: Element, b: Element) -> Element:
        """Return a / b; raise `Refused` if b is zero, `Undecided` if it may be."""
        if self.vanishes(b.above):
            raise Refused("division by zero")
        return self.fraction(self.times(a.above, b.below), self.times(a.below, b.above))

    def power(self, a: Element, n: int) -> Element:
        """Return the power a ** n for an integer n."""
        if n < 0:
            return self.divide(rational(1), self.power(a, -n))
        result = rational(1)
        while n:
            if n & 1:
                result = self.multiply(result, a)
            n >>= 1
            a = self.multiply(a, a) if n else a
        return result

    # --- constants -----------------------------------------------------------------------------

    def ball(self, poly: Poly, bits: int) -> Ball:
        """Return a ball that contains a constant; raise `Undefined` if it is not finite."""
        with with_bits(bits):
            self.budget.spend(len(poly) * (1 + bits / 256))
            atoms = dict(self.atoms_in(poly))
            for atom in atoms.values():
                if bits not in atom.balls:
                    assert atom.value is not None  # of a constant
                    self.budget.spend(2 + bits / 8 + (bits / 256) ** 2 / 8)
                    atom.balls[bits] = atom.value(bits)
            total = acb(0)
            for exponents, coefficient in poly.terms():
                term = acb(arb(coefficient))
                for number, n in powers_of(exponents).items():
                    term *= atoms[number].balls[bits] ** n
                total += term
            if not total.is_finite():
                raise Undefined("no finite value")
            return total

    def value(self, element: Element, bits: int) -> Ball:
        """Return the ball that contains a constant fraction. Raises `Undefined`."""
        above = self.ball(element.above, bits)
        if element.below == ONE:
            return above
        below = self.ball(element.below, bits)
        if not is_apart(below):
            raise Undefined("division by what may be zero")
        return above / below

    def _is_apart(self, poly: Poly, bits: int) -> bool:
        try:
            return is_apart(self.ball(poly, bits))
        except Undefined:
            return False

    def vanishes(self, poly: Poly) -> bool:
        """Prove that a polynomial is, or is not, zero for all values of its variables.

        Raises `Undecided` where there is neither.
        """
        poly = self.reduce(poly)
        number = as_rational(poly)
        if number is not None:
            return number == 0
        parts = self.coefficients(poly, lambda atom: not atom.constant)
        undecided = False
        for part in parts.values():
            try:
                if not self._constant_vanishes(part):
                    return False
            except Undecided:
                undecided = True
        if undecided:
            raise Undecided("a coefficient that may be zero")
        return True

    def coefficients(self, poly: Poly, apart: Callable[[Atom], bool]) -> dict[tuple, Poly]:
        """Return the coefficients of the powers of chosen atoms: {powers: coefficient}."""
        return without(poly, {number for number, atom in self.atoms_in(poly) if apart(atom)})

    def _constant_vanishes(self, poly: Poly) -> bool:
        if (number := as_rational(poly)) is not None:
            return number == 0
        if any(self._is_apart(poly, bits) for bits in BITS[:2]):
            return False
        parts = self.coefficients(poly, lambda atom: not atom.algebraic)
        if set(parts) == {()}:
            return self._algebraic_vanishes(poly)
        if all(map(self._algebraic_vanishes, parts.values())):
            return True
        vanishes = self._log_form_vanishes(parts)
        if vanishes is not None:
            return vanishes
        if any(self._is_apart(poly, bits) for bits in BITS[2:]):
            return False
        raise Undecided("it can't be told from zero")

    def _algebraic_vanishes(self, poly: Poly) -> bool:
        """Test of a polynomial of roots for zero, by a separation bound.

        An algebraic integer whose conjugates are at most u, in a field of degree D, is 0 or at
        least u^(1 - D): the product of its conjugates is an integer (Burnikel, Fleischer, Mehlhorn
        and Schirra, "A strong and easily computable separation bound", Algorithmica 27, 2000).
        """
        if (number := as_rational(poly)) is not None:
            return number == 0
        degree, seen, waiting = 1, set(), [poly]
        while waiting:
            for number, atom in self.atoms_in(waiting.pop()):
                if number not in seen:
                    seen.add(number)
                    degree *= atom.degree
                    assert atom.radicand is not None  # algebraic atoms are roots
                    waiting.append(atom.radicand)
        whole = poly * math.lcm(*(int(c.q) for c in poly.coeffs()))
        largest = self.log2_conjugates(whole)
        smallest = math.ceil((degree - 1) * largest) + 2  # nothing but 0 is below 2^-smallest
        enough = smallest + math.ceil(largest) + 64
        decidable = degree <= LARGEST_DEGREE and enough <= MAX_BITS
        tried = [bits for bits in BITS if not decidable or bits < enough]
        for bits in [*tried, enough] if decidable else tried:
            if self._is_apart(whole, bits):
                return False
        if decidable and bool(abs(self.ball(whole, enough)) < arb(2) ** -smallest):
            return True
        raise Undecided("roots too deep for the bound")

    def log2_conjugates(self, poly: Poly) -> float:
        """Return log2 of a bound on all conjugates of a polynomial of roots, whole coefficients."""
        logs = [
            coefficient.p.bit_length()
            + sum(n * self.atoms[i].log2_conjugates for i, n in powers_of(exponents).items())
            for exponents, coefficient in poly.terms()
        ]
        return max(logs) + math.log2(len(logs)) + 1e-6

    def _log_form_vanishes(self, parts: dict[tuple, Poly]) -> bool | None:
        """Test of a sum of rational multiples of logarithms, and of pi i, for zero.

        It is a multiple of 2 pi i / n where the product of powers, n times as high, is 1; and then
        zero where it is nearer to 0 than the others. None for what is no such sum.
        """
        imaginary = self._numbers.get(("root", IMAGINARY_KEY))
        unit = ONE if imaginary is None else GENERATORS[imaginary]
        for turned in (False, True):
            factors = []
            for key, part in parts.items():
                if len(key) != 1 or key[0][1] != 1:
                    return None
                atom = self.atoms[key[0][0]]
                if atom.kind not in ("log", "pi"):
                    return None
                is_real = (atom.kind == "log") != turned
                coefficient = as_rational(part if is_real else self.times(part, unit))
                if coefficient is None:
                    break
                # pi is -i log(-1); times i turns the sign of what has an i already.
                sign = 1 if atom.kind == "log" and not turned else -1
                factors.append((atom.argument or rational(-1), sign * coefficient))
            else:
                return self._is_log_of_one(factors, parts)
        return None

    def _is_log_of_one(self, factors: list[tuple[Element, fmpq]], parts: dict[tuple, Poly]) -> bool:
        n = math.lcm(*(int(power.q) for _, power in factors))
        whole = [(base, int(power * n)) for base, power in factors]
        if sum(abs(power) for _, power in whole) > MAX_FACTORS:
            raise Undecided("high powers")
        product = rational(1)
        for base, power in whole:
            product = self.multiply(product, self.power(base, power))
        if not self.vanishes(product.above - product.below):
            return False
        poly = sum((part * monomial(dict(key)) for key, part in parts.items()), constant(0))
        return bool(abs(self.ball(poly, BITS[1])) < arb(3) / n)
