"""Points of the real line where an expression in one variable may change its sign."""

from collections.abc import Iterator

from flint import fmpq

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
    symbol,
    symbols,
)
from dapo_jax.verifier.polynomials import NotRational, RationalFunctions

MAX_ABSOLUTES = 4
ZERO, ONE = number(0), number(1)


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
    return list(_solutions(tree, ZERO, budget))


def _solutions(tree: Tree, value: Tree, budget: Budget) -> Iterator[Tree]:
    """Return the points where an expression without absolute values has a value."""
    field = RationalFunctions(budget, constants=True)
    variable = symbol(*symbols(tree))
    try:
        fraction = field.read(add([tree, negate(value)]))
    except NotRational:
        yield from _of_inverse(tree, value, budget)
        return
    for poly in fraction:
        for factor in field.split(poly):
            yield from _of_polynomial(field.coefficients(factor, variable))


def _replace(tree: Tree, old: Tree, new: Tree) -> Tree:
    if tree == old:
        return new
    return tree._replace(parts=tuple(_replace(part, old, new) for part in tree.parts))


def _of_polynomial(coefficients: list[Tree]) -> Iterator[Tree]:
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
        yield from _solutions(inner, target, budget)
