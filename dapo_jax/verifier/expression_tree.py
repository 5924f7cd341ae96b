"""Expression trees that can't become large, and the budget of work on them.

Constructors fold rational numbers exactly and refuse what would be large; nothing else is computed.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

from flint import fmpq, fmpz

LARGEST_BITS = 70_000  # of a numerator or denominator: some 20,000 digits
LARGEST_EXPONENT, LARGEST_FACTORIAL = 1_000, 1_000


class Refused(ValueError):
    """Text that is no expression, or one that is too large."""


class Undecided(ArithmeticError):
    """Neither proven equal nor proven different within the budget."""


class Budget:
    """Work that is left, counted so that no verdict depends on the speed of the machine."""

    def __init__(self, units: int):
        self.left = units

    def spend(self, units: float) -> None:
        """Takes units away. Raises `Undecided` where fewer are left."""
        self.left -= units
        if self.left < 0:
            raise Undecided("too much work")


class Tree(NamedTuple):
    """Expression.

    kind: 'number' (value: fmpq), 'symbol' (value: its name), 'pi', 'e', 'i', 'infinity', 'sum',
    'product', 'quotient', 'power', or the name of a function.
    """

    kind: str
    parts: tuple["Tree", ...] = ()
    value: fmpq | str | None = None

    @property
    def rational(self) -> fmpq:
        """Value of a number."""
        assert isinstance(self.value, fmpq), self.kind
        return self.value

    @property
    def name(self) -> str:
        """Name of a symbol."""
        assert isinstance(self.value, str), self.kind
        return self.value

    @property
    def whole(self) -> int | None:
        """Integer value; None for anything but an integer."""
        is_whole = self.kind == "number" and self.rational.q == 1
        return int(self.rational.p) if is_whole else None


PI, EULER, IMAGINARY, INFINITY = map(Tree, ("pi", "e", "i", "infinity"))


def number(value: fmpq | fmpz | int) -> Tree:
    """Rational number. Raises `Refused` for a huge one."""
    value = fmpq(value)
    if max(value.p.bit_length(), value.q.bit_length()) > LARGEST_BITS:
        raise Refused("a large number")
    return Tree("number", value=value)


def symbol(name: str) -> Tree:
    """Variable."""
    return Tree("symbol", value=name)


def _finite(*trees: Tree) -> None:
    if any(tree.kind == "infinity" for tree in trees):
        raise Refused("arithmetic with infinity")


def add(terms: list[Tree]) -> Tree:
    """Sum of terms; numbers among them become one."""
    if len(terms) == 1:
        return terms[0]
    _finite(*terms)
    constant = sum((t.rational for t in terms if t.kind == "number"), fmpq(0))
    rest = tuple(t for t in terms if t.kind != "number")
    if not rest:
        return number(constant)
    return Tree("sum", (*rest, number(constant)) if constant else rest)


def multiply(a: Tree, b: Tree) -> Tree:
    """Product a * b."""
    if a.kind == b.kind == "number":
        return number(a.rational * b.rational)
    if b.kind == "infinity" and a.whole == -1:
        return Tree("product", (a, b))
    _finite(a, b)
    return Tree("product", (a, b))


def negate(tree: Tree) -> Tree:
    """Negative of a tree."""
    return multiply(number(-1), tree)


def divide(above: Tree, below: Tree) -> Tree:
    """Quotient above / below. Raises `Refused` where that is plainly undefined."""
    _finite(above, below)
    if below.kind == "number":
        if below.rational == 0:
            raise Refused("division by zero")
        return multiply(above, number(1 / below.rational))
    return Tree("quotient", (above, below))


def power(base: Tree, exponent: Tree) -> Tree:
    """Power base ** exponent. Raises `Refused` where that would be large."""
    _finite(base, exponent)
    if exponent.kind != "number":
        if base.kind == "number" and base.rational == 0:
            raise Refused("a power of zero")
        return Tree("power", (base, exponent))
    n = exponent.rational
    if base.kind != "number":
        if abs(n) > LARGEST_EXPONENT or n.q > LARGEST_EXPONENT:
            raise Refused("a large exponent")
        return base if n == 1 else Tree("power", (base, exponent))
    value = base.rational
    if value == 0:
        if n <= 0:
            raise Refused("a power of zero")
        return base
    bits = max(value.p.bit_length(), value.q.bit_length())
    if bits > 1 and (abs(n.p) * bits > LARGEST_BITS or n.q > LARGEST_EXPONENT):
        raise Refused("a large power")
    if n.q != 1:
        return Tree("power", (base, exponent))
    if bits == 1:  # 1 and -1
        return number(value if n.p % 2 else 1)
    return number(value ** int(n.p))


def call(name: str, argument: Tree) -> Tree:
    """Value of a function."""
    _finite(argument)
    return Tree(name, (argument,))


def odd_root(inside: Tree, order: int) -> Tree:
    """Real root where `inside` is real, whatever its sign; else the principal root."""
    _finite(inside)
    return Tree("odd_root", (inside, number(order)))


def factorial(argument: Tree) -> Tree:
    """Factorial. Raises `Refused` for large or non-integer numbers."""
    if argument.kind == "number":
        if argument.whole is None or not 0 <= argument.whole <= LARGEST_FACTORIAL:
            raise Refused("a large factorial")
        return number(math.factorial(argument.whole))
    return call("factorial", argument)


def binomial(above: Tree, below: Tree) -> Tree:
    """Binomial coefficient. Raises `Refused` for large or non-integer numbers."""
    for part in (above, below):
        if part.kind == "number" and (
            part.whole is None or not 0 <= part.whole <= LARGEST_FACTORIAL
        ):
            raise Refused("a large binomial")
    if above.whole is not None and below.whole is not None:
        return number(math.comb(above.whole, below.whole))
    _finite(above, below)
    return Tree("binomial", (above, below))


def nodes(tree: Tree) -> Iterator[Tree]:
    """Tree and all its descendants."""
    yield tree
    for part in tree.parts:
        yield from nodes(part)


def symbols(tree: Tree) -> set[str]:
    """Names of the variables of a tree."""
    return {node.name for node in nodes(tree) if node.kind == "symbol"}
