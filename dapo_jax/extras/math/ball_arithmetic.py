"""Rigorous enclosure of a constant's value by complex balls (Arb).

Two balls that do not meet prove a difference. A difference that may be 0 and is below
`NEGLIGIBLE` counts as 0: values beyond `2 ** +-LARGEST_LOG2` on the way are not compared by balls,
so that nothing that is written out in an answer hides below it.
"""

import functools
import zlib
from collections.abc import Callable

import flint
from flint import acb, arb

from dapo_jax.extras.math import expression_tree as trees
from dapo_jax.extras.math.expression_tree import Budget, Refused, Tree, Undecided

Ball = acb
PRECISIONS = (192, 4_096, 16_384)  # bits, one after another
NEGLIGIBLE = arb(2) ** -3_000
LARGEST_LOG2 = 2_000
MAX_BITS = 12_000  # of a rational number among values that are not rational
_HUGE, _TINY = arb(2) ** LARGEST_LOG2, arb(2) ** -LARGEST_LOG2
_LARGEST_EXPONENT = 1_386  # e^1386 is about 2^2000

_HYPERBOLIC = "exp sinh cosh tanh".split()
_CIRCULAR = "sin cos tan cot sec csc".split()
_INVERSE = "log asin acos atan asinh acosh atanh".split()
_SIMPLE: dict[str, Callable[[Ball], Ball]] = {
    **{name: getattr(acb, name) for name in (*_HYPERBOLIC, *_CIRCULAR, *_INVERSE)},
    "acot": lambda ball: _over(acb(1), ball).atan(),
    "asec": lambda ball: _over(acb(1), ball).acos(),
    "acsc": lambda ball: _over(acb(1), ball).asin(),
    "abs": lambda ball: acb(abs(ball)),
    "factorial": lambda ball: (ball + 1).gamma(),
}
LARGEST_FLOORED = arb(10) ** 3_000
with_bits = flint.ctx.workprec  # context manager: balls have this many bits


class Undefined(ArithmeticError):
    """Missing value: it is too large or too small, or the bits are too few."""


class Pole(Undefined):
    """Division by a ball that contains zero."""


def is_apart(ball: Ball) -> bool:
    """Prove that a value is not zero: the ball does not contain zero."""
    return not ball.contains(0)


def is_negligible(ball: Ball | arb) -> bool:
    """Test for a value that counts as zero."""
    return bool(abs(ball) < NEGLIGIBLE)


def _principal_root(ball: Ball, degree: int) -> Ball:
    """Return the principal root: real if the ball is real and not negative."""
    if ball.imag.is_zero() and ball.real >= 0:
        return acb(ball.real.root(degree))
    return acb(ball).root(degree)


def _whole_part(ball: Ball) -> Ball:
    """Return the floor of a real number; raise `Undefined` if the ball holds two candidates."""
    if not (ball.imag.is_zero() or is_negligible(ball.imag)):
        raise Undefined("the floor of what may not be real")
    if not abs(ball.real) < LARGEST_FLOORED:  # exact ones of any size would be written out
        raise Undefined("the floor of a huge number")
    floor = ball.real.floor()
    if floor.unique_fmpz() is None:
        floor = (ball.real.mid() + arb(0.5)).floor()
        if not is_negligible(ball.real - floor):
            raise Undefined("a floor on the edge")
    return acb(floor)


def _over(above: Ball, below: Ball) -> Ball:
    if not is_apart(below):
        raise Pole("division by what may be zero")
    return above / below


def _power(base: Ball, exponent: Tree, value: Ball) -> Ball:
    q = exponent.value if exponent.kind == "number" else None
    if q is not None and max(abs(q.p), q.q) <= trees.LARGEST_EXPONENT:
        power = acb(base) ** int(abs(q.p))
        if q.q != 1:  # principal: (a^(1/n))^m
            power = _principal_root(base, int(q.q)) ** int(abs(q.p))
        return power if q > 0 else _over(acb(1), power)
    if not is_apart(base):
        raise Undefined("a power of what may be zero")
    return (value * base.log()).exp()


def _function(tree: Tree, argument: Ball) -> Ball:
    name = tree.kind
    flat = argument.real if name in _HYPERBOLIC else argument.imag if name in _CIRCULAR else 0
    if not abs(flat) < _LARGEST_EXPONENT:  # tanh(10^5) is nearer to 1 than any ball shows
        raise Undefined("an exponential that is too large or too small")
    if name == "function":  # a + b x + arctan(c + d x): no text can use a period, parity or zero
        seed = str(tree.value).encode()
        a, b, c, d = (acb(1 + zlib.crc32(seed * n) % 99_991) / 49_999 for n in range(1, 5))
        return a + b * argument + (c + d * argument).atan()
    if name in ("floor", "ceiling"):
        return _whole_part(argument) if name == "floor" else -_whole_part(-argument)
    return _SIMPLE[name](argument)


def enclose(tree: Tree, budget: Budget) -> Ball:
    """Return the ball that contains a constant's value, at the bits of `with_bits`.

    Raises:
        Undefined: there is no finite value, or one too large or small to compare.
        Undecided: the budget ends.
        Refused: the tree has variables.
    """
    budget.spend(2 + flint.ctx.prec / 256)
    match tree.kind:
        case "number":
            if max(tree.value.p.bit_length(), tree.value.q.bit_length()) > MAX_BITS:
                raise Undefined("a number too long to compare")
            return acb(arb(tree.value))
        case "pi":
            return acb.pi()
        case "e":
            return acb(arb.const_e())
        case "i":
            return acb(0, 1)
        case "infinity" | "symbol" | "bound" | "total" | "times" | "integral":
            raise Refused("no value")
    parts = [enclose(part, budget) for part in tree.parts]
    match tree.kind:
        case "sum":
            value = sum(parts[1:], parts[0])
        case "product":
            value = parts[0] * parts[1]
        case "quotient":
            value = _over(*parts)
        case "power":
            value = _power(parts[0], tree.parts[1], parts[1])
        case "odd_root":
            negative = parts[0].imag.is_zero() and bool(parts[0].real < 0)
            inside = -parts[0] if negative else parts[0]
            value = _principal_root(inside, int(tree.parts[1].value.p))
            value = -value if negative else value
        case "max" | "min":
            if not all(part.imag.is_zero() for part in parts):
                raise Refused("an order of numbers that are not real")
            choose = arb.max if tree.kind == "max" else arb.min
            value = acb(functools.reduce(choose, (part.real for part in parts)))
        case "gcd" | "remainder":
            raise Refused("gcd, lcm or mod of a non-integer")
        case "binomial":
            n, k = parts
            value = (n + 1).gamma() * (k + 1).rgamma() * (n - k + 1).rgamma()
        case _:
            budget.spend(flint.ctx.prec / 32)
            value = _function(tree, parts[0])
    if not value.is_finite():
        raise Undefined("no finite value")
    if is_apart(value) and not _TINY < abs(value) < _HUGE:
        raise Undefined("a value too large or too small to compare")
    return value


def longest_number(tree: Tree) -> int:
    """Return the bits of the longest number in a constant: with fewer, it may pass unseen."""
    numbers = [node.value for node in trees.nodes(tree) if node.kind == "number"]
    return max((max(n.p.bit_length(), n.q.bit_length()) for n in numbers), default=0)


def sign(tree: Tree, budget: Budget) -> int:
    """Return the sign of a constant; raise `Refused` if not real, `Undecided` if unknown."""
    if tree.kind == "number":
        return (tree.value > 0) - (tree.value < 0)
    for bits in PRECISIONS:
        with with_bits(bits):
            try:
                value = enclose(tree, budget)
            except Undefined:
                continue
            if is_negligible(value) and bits > longest_number(tree):
                return 0
            if is_apart(acb(value.imag)):
                raise Refused("not real")
            if is_apart(acb(value.real)) and (value.imag.is_zero() or is_negligible(value.imag)):
                return 1 if value.real > 0 else -1
    raise Undecided("a sign that takes too many bits")
