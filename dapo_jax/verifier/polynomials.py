"""Exact arithmetic: fractions of polynomials over the rational numbers."""

from typing import NamedTuple

from flint import Ordering, fmpq, fmpq_mpoly, fmpq_mpoly_ctx

from dapo_jax.verifier.expression_tree import Budget, NoValue, Tree, Undecided, symbols

MAX_VARIABLES = 12
SHARE = 4  # of the budget, for one exact comparison: beyond, balls at points are cheaper
Poly = fmpq_mpoly


class NotRational(ValueError):
    """Expression that is no fraction of polynomials, as sqrt(x)."""


class Fraction(NamedTuple):
    """Fraction of polynomials, not in lowest terms; `below` is not zero."""

    above: Poly
    below: Poly


class RationalFunctions:
    """Field of the fractions of polynomials in the variables of some trees."""

    def __init__(self, trees: tuple[Tree, ...], budget: Budget):
        names = sorted(set().union(*map(symbols, trees)))
        if len(names) > MAX_VARIABLES:
            raise NotRational("many variables")
        ring = fmpq_mpoly_ctx.get(("g", max(1, len(names))), Ordering.lex)
        self._generators = dict(zip(names, ring.gens(), strict=False))
        self._one, self._budget = ring.constant(fmpq(1)), budget

    def times(self, a: Poly, b: Poly) -> Poly:
        """Return the product of two polynomials."""
        self._budget.spend(_size(a) * _size(b))
        return a * b

    def multiply(self, a: Fraction, b: Fraction) -> Fraction:
        """Return the product a * b."""
        return Fraction(self.times(a.above, b.above), self.times(a.below, b.below))

    def power(self, a: Fraction, n: int) -> Fraction:
        """Return the power a ** n; raise `NoValue` for a negative power of zero."""
        if n < 0:
            if not a.above:
                raise NoValue("division by zero")
            a, n = Fraction(a.below, a.above), -n
        result = Fraction(self._one, self._one)
        while n:
            if n & 1:
                result = self.multiply(result, a)
            n >>= 1
            a = self.multiply(a, a) if n else a
        return result

    def add(self, a: Fraction, b: Fraction) -> Fraction:
        """Return the sum a + b."""
        if a.below == b.below:
            return Fraction(a.above + b.above, a.below)
        above = self.times(a.above, b.below) + self.times(b.above, a.below)
        return Fraction(above, self.times(a.below, b.below))

    def read(self, tree: Tree) -> Fraction:
        """Return the fraction that a tree describes.

        Raises:
            NotRational: it is no rational function.
            NoValue: it is divided by zero.
        """
        self._budget.spend(2)
        if tree.kind == "number":
            return Fraction(self._one * tree.rational, self._one)
        if tree.kind == "symbol":
            return Fraction(self._generators[tree.name], self._one)
        if tree.kind == "power" and tree.parts[1].whole is not None:
            return self.power(self.read(tree.parts[0]), tree.parts[1].whole)
        if tree.kind not in ("sum", "product", "quotient"):
            raise NotRational(tree.kind)
        result, *others = map(self.read, tree.parts)
        for part in others:
            if tree.kind == "sum":
                result = self.add(result, part)
            else:
                result = self.multiply(
                    result, self.power(part, 1 if tree.kind == "product" else -1)
                )
        return result

    def factors(self, tree: Tree) -> set[str]:
        """Return the texts of the irreducible factors of a rational function."""
        found = set()
        for poly in self.read(tree):
            self._budget.spend(50 * len(poly) + int(poly.total_degree()) ** 2)
            found |= {str(factor) for factor, _ in poly.factor()[1]}
        return found


def _size(poly: Poly) -> float:
    """Return the cost, in units of work, of an operation with each term."""
    return 1 + sum(1 + (c.p.bit_length() + c.q.bit_length()) / 64 for c in poly.coeffs())


def same_rational(mine: Tree, gold: Tree, budget: Budget) -> bool | None:
    """Test the equality of two rational functions; return None if they are none, or too large."""
    share = Budget(budget.left // SHARE)
    try:
        field = RationalFunctions((mine, gold), share)
        a, b = field.read(mine), field.read(gold)
        return field.times(a.above, b.below) == field.times(b.above, a.below)
    except (NotRational, Undecided):
        return None
    finally:
        budget.spend(budget.left // SHARE - max(0, share.left))
