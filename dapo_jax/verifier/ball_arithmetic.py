"""Rigorous enclosure of a tree's value by complex balls (Arb).

A ball that does not contain zero proves that a value is not zero; no ball proves that it is.
"""

import zlib
from collections.abc import Callable

import flint
from flint import acb, arb

from dapo_jax.verifier.expression_tree import Budget, Tree, Undecided

Ball = acb

_NAMES = "exp log sin cos tan cot sec csc sinh cosh tanh asin acos atan asinh acosh atanh".split()
_SIMPLE: dict[str, Callable[[Ball], Ball]] = {
    **{name: getattr(acb, name) for name in _NAMES},
    "acot": lambda ball: _over(acb(1), ball).atan(),
    "asec": lambda ball: _over(acb(1), ball).acos(),
    "acsc": lambda ball: _over(acb(1), ball).asin(),
    "abs": lambda ball: acb(abs(ball)),
    "factorial": lambda ball: (ball + 1).gamma(),
}
LARGEST_FLOORED = arb(10) ** 3_000


class Undefined(ArithmeticError):
    """Missing value: it is too large, or the bits are too few."""


class Pole(Undefined):
    """Division by a ball that contains zero."""


def with_bits(bits: int):
    """Compute balls with this many bits inside the context."""
    return flint.ctx.workprec(bits)


def is_apart(ball: Ball) -> bool:
    """Prove that a value is not zero: the ball does not contain zero."""
    return bool(abs(ball) > 0)


def principal_root(ball: Ball, degree: int) -> Ball:
    """Return the principal root: real if the ball is real and not negative."""
    if ball.imag.is_zero() and ball.real >= 0:
        return acb(ball.real.root(degree))
    return acb(ball).root(degree)


def whole_part(ball: Ball) -> arb:
    """Return the floor of a real number; raise `Undefined` if the ball holds two candidates."""
    if not ball.imag.is_zero():
        raise Undefined("the floor of what may not be real")
    if not abs(ball.real) < LARGEST_FLOORED:  # exact ones of any size would be written out
        raise Undefined("the floor of a huge number")
    floor = ball.real.floor()
    if floor.unique_fmpz() is None:
        raise Undefined("a floor on the edge")
    return floor


def _over(above: Ball, below: Ball) -> Ball:
    if not is_apart(below):
        raise Pole("division by what may be zero")
    return above / below


def _power(base: Ball, exponent: Tree, value: Ball) -> Ball:
    if exponent.kind == "number":
        q = exponent.rational
        power = acb(base) ** int(abs(q.p))
        if q.q != 1:  # principal: (a^(1/n))^m
            power = principal_root(base, int(q.q)) ** int(abs(q.p))
        return power if q > 0 else _over(acb(1), power)
    if not is_apart(base):
        raise Undefined("a power of what may be zero")
    return (value * base.log()).exp()


def enclose(tree: Tree, point: dict[str, Ball], budget: Budget) -> Ball:
    """Return the ball that contains the tree's value at a point, at the bits of `with_bits`.

    Raises:
        Undefined: there is no finite value.
        Undecided: the budget ends.
    """
    budget.spend(2 + flint.ctx.prec / 256)
    match tree.kind:
        case "number":
            return acb(arb(tree.rational))
        case "symbol":
            return point[tree.name]
        case "pi":
            return acb.pi()
        case "e":
            return acb(arb.const_e())
        case "i":
            return acb(0, 1)
        case "infinity":
            raise Undecided("infinity has no value")
    parts = [enclose(part, point, budget) for part in tree.parts]
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
            value = principal_root(
                -parts[0] if negative else parts[0], int(tree.parts[1].rational.p)
            )
            value = -value if negative else value
        case "function":  # of what may be any function, equal expressions are equal for this one
            assert isinstance(tree.value, str)
            value = (parts[0] + zlib.crc32(tree.value.encode()) % 1_009).sin()
        case "floor":
            value = acb(whole_part(parts[0]))
        case "ceiling":
            value = -acb(whole_part(-parts[0]))
        case "binomial":
            n, k = parts
            value = (n + 1).gamma() * (k + 1).rgamma() * (n - k + 1).rgamma()
        case _:
            budget.spend(flint.ctx.prec / 32)
            value = _SIMPLE[tree.kind](parts[0])
    if not value.is_finite():
        raise Undefined("no finite value")
    return value
