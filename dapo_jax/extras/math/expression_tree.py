"""Expression trees that can't become large, and the budget of work on them.

Constructors fold rational numbers exactly and refuse what would be large; nothing else is computed.
"""

import functools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from flint import fmpq, fmpz

LARGEST_BITS = 70_000  # of a numerator or denominator: some 20,000 digits
LARGEST_EXPONENT, LARGEST_FACTORIAL, MAX_TERMS = 1_000, 1_000, 1_000


class Refused(ValueError):
    """Text that is no expression, or one that is too large."""


class NoValue(Refused):
    """Expression that is plainly undefined, as 1/0."""


class Undecided(ArithmeticError):
    """Neither equal nor different within the budget."""


class Budget:
    """Work that is left, counted so that no verdict depends on the speed of the machine."""

    def __init__(self, units: int):
        self.left = units

    def spend(self, units: float) -> None:
        """Spend units of the budget; raise `Undecided` if fewer are left."""
        self.left -= units
        if self.left < 0:
            raise Undecided("too much work")


class Tree(NamedTuple):
    """Expression.

    kind: 'number' (value: fmpq), 'symbol' (value: its name), 'pi', 'e', 'i', 'infinity', 'sum',
    'product', 'quotient', 'power', 'function' (value: its name), or the name of a known function;
    'total', 'times', 'integral' (ends, body): value is the name of their variable, which is of
    kind 'bound';
    'numeral' (value: fmpq) and 'mixed' (a numeral and a quotient) where arithmetic is as written.
    """

    kind: str
    parts: tuple["Tree", ...] = ()
    value: Any = None

    @property
    def whole(self) -> int | None:
        """Integer value, for a numeral also with its sign; None if it is no integer."""
        is_signed = self.kind == "product" and self.parts[0] == MINUS
        value = self.parts[1] if is_signed and self.parts[1].kind == "numeral" else self
        is_whole = value.kind in ("number", "numeral") and value.value.q == 1
        return int(value.value.p) * (1 if value is self else -1) if is_whole else None


PI, EULER, IMAGINARY, INFINITY = map(Tree, ("pi", "e", "i", "infinity"))
MINUS = Tree("number", value=fmpq(-1))


def number(value: fmpq | fmpz | int) -> Tree:
    """Return the rational number. Raises `Refused` for a huge one."""
    value = fmpq(value)
    if max(value.p.bit_length(), value.q.bit_length()) > LARGEST_BITS:
        raise Refused("a large number")
    return Tree("number", value=value)


def add(terms: list[Tree]) -> Tree:
    """Return the sum of terms; numbers among them become one."""
    if len(terms) == 1:
        return terms[0]
    constant = sum((t.value for t in terms if t.kind == "number"), fmpq(0))
    rest = tuple(t for t in terms if t.kind != "number")
    parts = (*rest, number(constant)) if constant or not rest else rest
    return Tree("sum", parts) if rest else parts[0]


def multiply(a: Tree, b: Tree) -> Tree:
    """Return the product a * b."""
    if a.kind == b.kind == "number":
        return number(a.value * b.value)
    return Tree("product", (a, b))


def negate(tree: Tree) -> Tree:
    """Return the negative of a tree."""
    return multiply(number(-1), tree)


def divide(above: Tree, below: Tree) -> Tree:
    """Return the quotient above / below; raise `Refused` if it is plainly undefined."""
    if below.kind == "number":
        if below.value == 0:
            raise NoValue("division by zero")
        return multiply(above, number(1 / below.value))
    return Tree("quotient", (above, below))


def power(base: Tree, exponent: Tree) -> Tree:
    """Return the power base ** exponent; raise `Refused` if it would be large."""
    n, value = exponent.value, base.value if base.kind == "number" else None
    if value == 0:
        if exponent.kind != "number" or n <= 0:
            raise NoValue("a power of zero")
        return base
    if exponent.kind != "number":
        return Tree("power", (base, exponent))
    if value is None:
        if max(abs(n), n.q) > LARGEST_EXPONENT:
            raise Refused("a large exponent")
        return base if n == 1 else Tree("power", (base, exponent))
    bits = max(value.p.bit_length(), value.q.bit_length())
    if bits > 1 and (abs(n.p) * bits > LARGEST_BITS or n.q > LARGEST_EXPONENT):
        raise Refused("a large power")
    if n.q != 1:
        return Tree("power", (base, exponent))
    return number(value ** int(n.p % 2 if bits == 1 else n.p))  # 1 and -1


def real_power(base: Tree, exponent: Tree) -> Tree:
    """Return the power base ** exponent; of what has a variable, an odd root is the real one."""
    order = exponent.value.q if exponent.kind == "number" else 1
    if order % 2 and order > 1 and symbols(base):
        return power(odd_root(base, int(order)), number(exponent.value.p))
    return power(base, exponent)


def odd_root(inside: Tree, order: int) -> Tree:
    """Return the real root if `inside` is real, whatever its sign; else the principal root."""
    if inside.kind == "number":
        root = power(number(abs(inside.value)), number(fmpq(1, order)))
        return negate(root) if inside.value < 0 else root
    return Tree("odd_root", (inside, number(order)))


def factorial(argument: Tree) -> Tree:
    """Return the factorial. Raises `Refused` for large or non-integer numbers."""
    return _counted("factorial", math.factorial, argument)


def binomial(above: Tree, below: Tree) -> Tree:
    """Return the binomial coefficient. Raises `Refused` for large or non-integer numbers."""
    return _counted("binomial", math.comb, above, below)


def _counted(kind: str, count: Callable[..., int], *arguments: Tree) -> Tree:
    numbers = [tree for tree in arguments if tree.kind == "number"]
    if any(tree.whole not in range(LARGEST_FACTORIAL + 1) for tree in numbers):
        raise Refused("a factorial of a large number, or of none that is whole")
    if len(numbers) < len(arguments):
        return Tree(kind, arguments)
    return number(count(*(tree.whole for tree in arguments)))


def bind(kind: str, letter: Tree, ends: list[Tree], body: Tree) -> Tree:
    """Return a sum, product or integral over a letter. Raises `Refused` for a number.

    Its variable is named by what it encloses, so that the letter does not matter.
    """
    if letter.kind not in ("symbol", "i"):
        raise Refused("a variable that is a number")
    inner = {node.value for node in nodes(body) if node.kind == "bound"}
    variable = Tree("bound", value=f"#{len(inner)}")

    def renamed(tree: Tree) -> Tree:
        return variable if tree == letter else tree._replace(parts=tuple(map(renamed, tree.parts)))

    return Tree(kind, (*ends, renamed(body)), variable.value)


def substitute(tree: Tree, values: Mapping[str, Tree], budget: Budget) -> Tree:
    """Return the tree with values for its variables; arithmetic of numbers is done exactly.

    Finite sums and products are written out. Raises `Refused` for no value, or a large one.
    """
    budget.spend(3)
    if tree.kind in ("symbol", "bound"):
        return values.get(tree.value, tree)
    if not tree.parts:
        return tree
    if tree.kind in ("total", "times"):
        return _written_out(tree, values, budget)
    parts = [substitute(part, values, budget) for part in tree.parts]
    if tree.kind == "function" and "function" in values:  # one of several unrelated ones
        return Tree("function", tuple(parts), f"{tree.value}#{values['function'].whole}")
    if tree.kind in _CONSTRUCTORS:
        return _CONSTRUCTORS[tree.kind](*parts)
    if tree.kind in _OF_NUMBERS and all(part.kind == "number" for part in parts):
        return number(_OF_NUMBERS[tree.kind](*(part.value for part in parts)))
    return tree._replace(parts=tuple(parts))


def _power_as_written(base: Tree, exponent: Tree) -> Tree:
    try:
        return power(base, exponent)
    except NoValue:
        raise
    except Refused:  # too large to be written out
        return Tree("power", (base, exponent))


_CONSTRUCTORS: dict[str, Callable[..., Tree]] = {
    **{"sum": lambda *terms: add(list(terms)), "product": multiply, "quotient": divide},
    **{"power": _power_as_written, "factorial": factorial, "binomial": binomial},
    "odd_root": lambda inside, order: odd_root(inside, int(order.value.p)),
}


def _remainder(value: fmpq, below: fmpq) -> fmpq:
    if below <= 0:
        raise NoValue("a remainder of no positive number")
    return value - below * (value / below).floor()


def _gcd(*values: fmpq) -> int:
    if any(value.q != 1 for value in values):
        raise Refused("gcd, lcm or mod of a non-integer")
    return math.gcd(*(int(value.p) for value in values))


_OF_NUMBERS: dict[str, Callable[..., Any]] = {
    **{"abs": abs, "floor": fmpq.floor, "ceiling": fmpq.ceil, "max": max, "min": min},
    **{"gcd": _gcd, "remainder": _remainder},
}


def _written_out(tree: Tree, values: Mapping[str, Tree], budget: Budget) -> Tree:
    """Return a sum or product with its terms if its ends are integers, else with its ends."""
    *ends, body = tree.parts
    ends = [substitute(end, values, budget) for end in ends]
    low, high = (end.whole for end in ends)
    if low is None or high is None:
        return tree._replace(parts=(*ends, substitute(body, values, budget)))
    if not -1 <= high - low < MAX_TERMS:
        raise Refused("a sum that is too long, or has its ends in the wrong order")
    terms = (
        substitute(body, {**values, tree.value: number(k)}, budget) for k in range(low, high + 1)
    )
    if tree.kind == "total":
        return add([*terms] or [number(0)])
    return functools.reduce(multiply, terms, number(1))


def nodes(tree: Tree) -> Iterator[Tree]:
    """Return the tree and all its descendants."""
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        yield node
        waiting.extend(node.parts)


def symbols(tree: Tree) -> set[str]:
    """Return the names of the variables of a tree."""
    return {node.value for node in nodes(tree) if node.kind == "symbol"}


_NOT_EVERYWHERE = "tan cot sec csc asin acos acot asec acsc acosh atanh factorial binomial function"
CONDITIONED = {"log": ">"} | {name: name for name in _NOT_EVERYWHERE.split()}


def conditions(tree: Tree) -> Iterator[tuple[str, Tree]]:
    """Return conditions of a real value: (relation to 0, expression), as ('>=', radicand).

    For functions whose condition is another: (name, argument).
    """
    for node in nodes(tree):
        if node.kind in CONDITIONED and symbols(node):
            yield CONDITIONED[node.kind], node.parts[0]
        if node.kind == "quotient" and symbols(node.parts[1]):
            yield "!=", node.parts[1]
        if node.kind == "power" and symbols(node.parts[0]):
            base, exponent = node.parts
            if exponent.kind != "number":
                yield ">", base
            elif exponent.value.q % 2 == 0:
                yield ">=", base
            if exponent.kind == "number" and exponent.value < 0:
                yield "!=", base
