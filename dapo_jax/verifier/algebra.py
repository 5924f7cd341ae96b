"""Equality of expressions, by exact arithmetic or many digits.

Runs in a worker process. Work is bounded by what `expressions.parse` lets through and by the
magnitudes below, so that a verdict never depends on how fast the machine is.
"""

import zlib

import mpmath
import sympy
from mpmath import mp

from dapo_jax.verifier.bounded import Refused
from dapo_jax.verifier.expressions import literal_digits

DIGITS, GUARD_DIGITS = 50, 15
LARGEST_MAGNITUDE = 10_000  # decimal digits before or behind the point of anything evaluated
LARGEST_ANGLE = 10**6
POINTS, ENOUGH_POINTS = 6, 3
WHOLE_POINTS = (*range(130), 625, 1_000, 12_345, 99_999)

_FUNCTIONS = {
    sympy.sin: mpmath.sin,
    sympy.cos: mpmath.cos,
    sympy.tan: mpmath.tan,
    sympy.cot: mpmath.cot,
    sympy.sec: mpmath.sec,
    sympy.csc: mpmath.csc,
    sympy.asin: mpmath.asin,
    sympy.acos: mpmath.acos,
    sympy.atan: mpmath.atan,
    sympy.acot: mpmath.acot,
    sympy.sinh: mpmath.sinh,
    sympy.cosh: mpmath.cosh,
    sympy.tanh: mpmath.tanh,
    sympy.log: mpmath.log,
    sympy.exp: mpmath.exp,
    sympy.Abs: abs,
    sympy.factorial: mpmath.factorial,
    sympy.floor: mpmath.floor,
    sympy.ceiling: mpmath.ceil,
    sympy.binomial: mpmath.binomial,
    sympy.re: mpmath.re,
    sympy.im: mpmath.im,
    sympy.arg: mpmath.arg,
}
_UNDEFINED = (Refused, ZeroDivisionError, ValueError, OverflowError, mpmath.libmp.ComplexResult)


def _bounded(value):
    size = abs(value)
    if not mpmath.isfinite(size):
        raise Refused("not finite")
    if size and abs(mpmath.mag(size)) > LARGEST_MAGNITUDE * 3.33:
        raise Refused("too large")
    return value


def _add(terms: list):
    """The sum; 0 where the terms cancel to the last trusted digit. Relative, never absolute."""
    total, largest = mpmath.fsum(terms), max(abs(term) for term in terms)
    trusted = mpmath.mpf(10) ** (GUARD_DIGITS - mp.dps)
    return mpmath.mpf(0) if abs(total) <= trusted * largest else total


def evaluate(expression: sympy.Expr, point: dict) -> mpmath.mpf:
    """The value at a point, in mp.dps digits. Raises one of `_UNDEFINED`."""
    if expression.is_Rational:
        return mpmath.mpf(expression.p) / expression.q
    if expression.is_Symbol:
        return point[expression]
    if expression in (sympy.pi, sympy.E):
        return +mp.pi if expression == sympy.pi else +mp.e
    if expression == sympy.I:
        return mpmath.mpc(0, 1)
    values = [evaluate(part, point) for part in expression.args]
    if expression.is_Add:
        return _bounded(_add(values))
    if expression.is_Mul:
        product = mpmath.mpf(1)
        for value in values:
            product = _bounded(product * value)
        return product
    if expression.is_Pow:
        base, exponent = values
        if base and abs(exponent) * abs(mpmath.log(abs(base))) > LARGEST_MAGNITUDE:
            raise Refused("too large")
        return _bounded(mpmath.power(base, exponent))
    function = _FUNCTIONS.get(expression.func)
    if function is None or any(abs(value) > LARGEST_ANGLE for value in values):
        if expression.func not in (sympy.log, sympy.Abs, sympy.floor, sympy.ceiling):
            raise Refused(f"can't evaluate {expression.func}")
    if expression.func in (sympy.exp, sympy.factorial) and abs(values[0]) > LARGEST_MAGNITUDE:
        raise Refused("too large")
    return _bounded(mpmath.mpmathify(function(*values)))


def _points(symbols: list[sympy.Symbol]):
    """Deterministic points: positive ones first, then of either sign."""
    for trial in range(POINTS):
        point = {}
        for symbol in symbols:
            draw = zlib.crc32(f"{symbol} {trial}".encode()) % 5_000 + 137
            sign = -1 if trial >= 2 and draw % 2 else 1
            point[symbol] = mpmath.mpf(sign * draw) / 1_997
        yield point


def set_precision(*texts: str) -> None:
    """As many digits as any literal of the texts could ask for."""
    mp.dps = DIGITS + GUARD_DIGITS + sum(map(literal_digits, texts))


def is_zero(expression: sympy.Expr) -> bool:
    """Whether it vanishes, at every tried point where it is defined."""
    if expression.is_Rational:
        return expression == 0
    symbols = sorted(expression.free_symbols, key=str)
    if not symbols:
        try:
            return evaluate(expression, {}) == 0
        except _UNDEFINED:
            return False
    stepped, points = expression.has(sympy.floor, sympy.ceiling), list(_points(symbols))
    if stepped:  # equal near 0 says nothing of such
        if len(symbols) > 1:
            return False
        whole = [{symbols[0]: mpmath.mpf(n)} for n in WHOLE_POINTS]
        points = whole if str(symbols[0]) in "nmkNpq" else whole + points
    tried = 0
    for point in points:
        try:
            value = evaluate(expression, point)
        except _UNDEFINED:
            continue
        if value != 0:
            return False
        tried += 1
    return tried >= ENOUGH_POINTS


def same_expression(mine: sympy.Expr, gold: sympy.Expr) -> bool:
    """Exact where both are rational, else in `mp.dps` digits."""
    if mine == gold:
        return True
    if mine.is_Rational and gold.is_Rational or mine.has(sympy.oo) or gold.has(sympy.oo):
        return False
    return is_zero(mine - gold)


def proportional(mine: sympy.Expr, gold: sympy.Expr) -> int:
    """The sign of the constant c with mine = c * gold; 0 where there is none."""
    symbols = sorted(mine.free_symbols | gold.free_symbols, key=str)
    if mine.free_symbols != gold.free_symbols or not symbols:
        return 0
    ratios = []
    for point in _points(symbols):
        try:
            ratios.append(_bounded(evaluate(mine, point) / evaluate(gold, point)))
        except _UNDEFINED:
            continue
    if len(ratios) < ENOUGH_POINTS or any(_add([r, -ratios[0]]) != 0 for r in ratios):
        return 0
    return int(mpmath.sign(mpmath.re(ratios[0])))
