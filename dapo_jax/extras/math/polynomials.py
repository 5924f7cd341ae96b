"""Exact arithmetic: fractions of polynomials over the rational numbers."""

import math

from flint import Ordering, fmpq, fmpq_mpoly, fmpq_mpoly_ctx

from dapo_jax.extras.math import expression_tree as trees
from dapo_jax.extras.math.expression_tree import Budget, NoValue, Tree, Undecided, number

MAX_GENERATORS = 16
SHARE = 4  # of the budget, for one exact comparison: beyond, balls at points are cheaper
Poly = fmpq_mpoly
Fraction = tuple[Poly, Poly]  # not in lowest terms; the second one is not zero
_RING = fmpq_mpoly_ctx.get(("g", MAX_GENERATORS), Ordering.lex)
_GENERATORS, _ONE = _RING.gens(), _RING.constant(fmpq(1))


class RationalFunctions:
    """Field of fractions of polynomials in the variables of expressions.

    Args:
        budget: work that may be spent.
        opaque: other constants and the values of other functions are variables too.

    Attributes:
        generators: the variables.
    """

    def __init__(self, budget: Budget, *, opaque: bool = False):
        self._budget, self._opaque = budget, opaque
        self.generators: dict[Tree, int] = {}

    def times(self, a: Poly, b: Poly) -> Poly:
        """Return the product of two polynomials."""
        self._budget.spend(_size(a) * _size(b))
        return a * b

    def _power(self, fraction: Fraction, n: int) -> Fraction:
        above, below = fraction if n >= 0 else fraction[::-1]
        if not below:
            raise NoValue("division by zero")
        n = abs(n)
        for poly in (above, below):
            self._budget.spend(_size(poly) * n * math.comb(len(poly) + n - 1, n))
        return above**n, below**n

    def read(self, tree: Tree) -> Fraction:
        """Return the fraction that a tree describes.

        Raises:
            Undecided: it is no rational function, or too large.
            NoValue: it is divided by zero.
        """
        self._budget.spend(2)
        if tree.kind == "number":
            return _ONE * tree.value, _ONE
        if tree.kind == "symbol" or self._opaque and not trees.symbols(tree):
            return self._variable(tree)
        if tree.kind == "power" and tree.parts[1].whole is not None:
            return self._power(self.read(tree.parts[0]), tree.parts[1].whole)
        if tree.kind not in ("sum", "product", "quotient"):
            return self._variable(tree)
        result, *others = map(self.read, tree.parts)
        for part in others:
            if tree.kind == "sum":
                result = self._add(result, part)
            else:
                up, down = part if tree.kind == "product" else self._power(part, -1)
                result = self.times(result[0], up), self.times(result[1], down)
        return result

    def _variable(self, tree: Tree) -> Fraction:
        place = self.generators.setdefault(tree, len(self.generators))
        if place >= MAX_GENERATORS or tree.kind != "symbol" and not self._opaque:
            raise Undecided(f"no rational function: {tree.kind}")
        return _GENERATORS[place], _ONE

    def _add(self, a: Fraction, b: Fraction) -> Fraction:
        if a[1] == b[1]:
            return a[0] + b[0], a[1]
        return self.times(a[0], b[1]) + self.times(b[0], a[1]), self.times(a[1], b[1])

    def split(self, poly: Poly) -> list[Poly]:
        """Return the irreducible factors of a polynomial, each once."""
        self._budget.spend(50 * len(poly) + int(poly.total_degree()) ** 2)
        return [factor for factor, _ in poly.factor()[1]]

    def coefficients(self, poly: Poly, variable: Tree) -> list[Tree]:
        """Return the coefficients of 1, x, x^2, ... as constants."""
        place = self.generators.get(variable, 0)
        constants = {i: tree for tree, i in self.generators.items() if tree != variable}
        terms: dict[int, list[Tree]] = {0: [number(0)]}
        for exponents, coefficient in poly.terms():
            term = number(coefficient)
            for i, n in enumerate(exponents):
                if n and i != place:
                    term = trees.multiply(term, trees.power(constants[i], number(int(n))))
            terms.setdefault(int(exponents[place]), []).append(term)
        return [trees.add(terms.get(n, [number(0)])) for n in range(max(terms) + 1)]


def _size(poly: Poly) -> int:
    """Return the cost, in units of work, of an operation with each term."""
    return 1 + sum(1 + (c.p.bit_length() + c.q.bit_length()) // 64 for c in poly.coeffs())


def same_rational(given: Tree, gold: Tree, budget: Budget) -> bool | None:
    """Test two rational functions for equality; None if one is no such function, or too large."""
    units = int(budget.left) // SHARE
    share = Budget(units)
    try:
        field = RationalFunctions(share)
        (a, b), (c, d) = field.read(given), field.read(gold)
        return field.times(a, d) == field.times(c, b)
    except Undecided:
        return None
    finally:
        budget.spend(units - max(0, share.left))
