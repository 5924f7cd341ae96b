"""Points of the real line where an expression in one variable may change its sign."""

from collections.abc import Iterator

from flint import fmpq, fmpq_poly

from dapo_jax.verifier.expression_tree import (
    Budget,
    Refused,
    Tree,
    add,
    call,
    divide,
    multiply,
    negate,
    nodes,
    number,
    odd_root,
    power,
    symbols,
)

LARGEST_DEGREE, MAX_ABSOLUTES = 24, 4
Coefficients = list[Tree]  # of 1, x, x^2, ...
ZERO, ONE = number(0), number(1)


class _NoPolynomial(ValueError):
    pass


def _times(a: Coefficients, b: Coefficients) -> Coefficients:
    if len(a) + len(b) > LARGEST_DEGREE + 2:
        raise Refused("a high power")
    result: list[list[Tree]] = [[] for _ in range(len(a) + len(b) - 1)]
    for i, left in enumerate(a):
        for j, right in enumerate(b):
            result[i + j].append(multiply(left, right))
    return [_sum(terms) for terms in result]


def _sum(terms: list[Tree]) -> Tree:
    return add([term for term in terms if term != ZERO] or [ZERO])


def _plus(a: Coefficients, b: Coefficients) -> Coefficients:
    longer, shorter = (a, b) if len(a) >= len(b) else (b, a)
    return [_sum([term, shorter[i]]) if i < len(shorter) else term for i, term in enumerate(longer)]


def _polynomial(tree: Tree) -> tuple[Coefficients, Coefficients]:
    """Return an expression as a fraction of polynomials. Raises `_NoPolynomial`."""
    if not symbols(tree):
        return [tree], [ONE]
    if tree.kind == "symbol":
        return [ZERO, ONE], [ONE]
    if tree.kind == "power" and (n := tree.parts[1].whole) is not None:
        base = _polynomial(tree.parts[0])
        result = [ONE], [ONE]
        for _ in range(min(abs(n), LARGEST_DEGREE + 1)):
            result = _times(result[0], base[0]), _times(result[1], base[1])
        return result if n > 0 else result[::-1]
    if tree.kind not in ("sum", "product", "quotient"):
        raise _NoPolynomial
    (above, below), *others = map(_polynomial, tree.parts)
    for up, down in others:
        if tree.kind == "sum":
            if below == down:
                above = _plus(above, up)
            else:
                above = _plus(_times(above, down), _times(up, below))
                below = _times(below, down)
        else:
            up, down = (down, up) if tree.kind == "quotient" else (up, down)
            above, below = _times(above, up), _times(below, down)
    return above, below


def zeros(tree: Tree, budget: Budget) -> list[Tree]:
    """Return constants among which are all real numbers where an expression is 0 or has a pole.

    Other numbers, also numbers that are not real, may be among them.

    Raises:
        Refused: they are not known.
    """
    budget.spend(50 * sum(1 for _ in nodes(tree)))
    absolutes = [node for node in nodes(tree) if node.kind == "abs" and symbols(node)]
    if len(absolutes) > MAX_ABSOLUTES:
        raise Refused("many absolute values")
    if absolutes:  # with |a| for a and for -a
        inside = absolutes[0].parts[0]
        cases = [_replace(tree, absolutes[0], case) for case in (inside, negate(inside))]
        return [zero for case in cases for zero in zeros(case, budget)]
    try:
        above, below = _polynomial(tree)
    except _NoPolynomial:
        return list(_of_inverse(tree, ZERO, budget))
    return [zero for side in (above, below) for zero in _of_polynomial(side, budget)]


def _replace(tree: Tree, old: Tree, new: Tree) -> Tree:
    if tree == old:
        return new
    return tree._replace(parts=tuple(_replace(part, old, new) for part in tree.parts))


def _of_polynomial(coefficients: Coefficients, budget: Budget) -> Iterator[Tree]:
    if all(c.kind == "number" for c in coefficients):
        poly = fmpq_poly([c.rational for c in coefficients])
        budget.spend(50 * len(coefficients) ** 2)
        if poly.degree() < 1:
            return
        for factor, _ in poly.factor()[1]:
            yield from _of_quadratic([number(fmpq(c)) for c in factor.coeffs()])
    else:
        yield from _of_quadratic(coefficients)


def _of_quadratic(coefficients: Coefficients) -> Iterator[Tree]:
    """Return the zeros of a polynomial of degree 2 at most, and that of its linear part."""
    c, b, a, *higher = [*coefficients, ZERO, ZERO][: max(3, len(coefficients))]
    if higher:
        if any(term != ZERO for term in (b, a, *higher[:-1])):
            raise Refused("a high power")
        yield from _roots(divide(negate(c), higher[-1]), number(len(coefficients) - 1))
        return
    if b != ZERO:
        yield negate(divide(c, b))
    if a == ZERO:
        return
    under = add([power(b, number(2)) if b != ZERO else ZERO, multiply(number(-4), multiply(a, c))])
    root = power(under, number(fmpq(1, 2))) if under != ZERO else ZERO
    for half in (root, negate(root)):
        yield divide(add([negate(b), half]), multiply(number(2), a))


def _roots(value: Tree, degree: Tree) -> Iterator[Tree]:
    """Return numbers with a power, the real ones among them."""
    if (degree.whole or 0) % 2:
        yield odd_root(value, degree.whole or 1)
        return
    root = power(value, divide(ONE, degree)) if value != ZERO else ZERO
    yield from (root, negate(root))


def _of_inverse(tree: Tree, value: Tree, budget: Budget) -> Iterator[Tree]:
    """Return the points where a function of one expression has a value."""
    varying = [part for part in tree.parts if symbols(part)]
    if len(varying) != 1:
        raise Refused("an equation that nothing here solves")
    (inner,) = varying
    constants = [part for part in tree.parts if part is not inner]
    match tree.kind:
        case "sum":
            targets = [add([value, *map(negate, constants)])]
        case "product":
            targets = [divide(value, constants[0])]
        case "quotient" if inner is tree.parts[0]:
            targets = [multiply(value, constants[0])]
        case "power" if inner is tree.parts[1]:
            targets = (
                [divide(call("log", value), call("log", tree.parts[0]))] if value != ZERO else []
            )
        case "power":
            targets = list(_roots(value, tree.parts[1]))
        case "odd_root":
            targets = [power(value, tree.parts[1])]
        case "exp":
            targets = [call("log", value)] if value != ZERO else []
        case "log":
            targets = [power(Tree("e"), value) if value != ZERO else ONE]
        case _:
            raise Refused("an equation that nothing here solves")
    for target in targets:
        difference = add([inner, negate(target)])
        try:
            above, below = _polynomial(difference)
        except _NoPolynomial:
            yield from _of_inverse(inner, target, budget)
        else:
            for side in (above, below):
                yield from _of_polynomial(side, budget)
