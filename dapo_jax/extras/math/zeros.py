"""Points of the real line where an expression in one variable may change its sign."""

from collections.abc import Iterator

from flint import fmpq

from dapo_jax.extras.math import expression_tree as trees
from dapo_jax.extras.math.expression_tree import Budget, Refused, Tree, number, symbols
from dapo_jax.extras.math.polynomials import RationalFunctions

MAX_ABSOLUTES = 4
ZERO, TWO, HALF = number(0), number(2), number(fmpq(1, 2))


def zeros(tree: Tree, budget: Budget) -> list[Tree]:
    """Return constants among which are all real numbers where an expression is 0 or has a pole.

    Other numbers, also not real ones, may be among them. Raises `Refused` if they are not known.
    """
    budget.spend(50 * sum(1 for _ in trees.nodes(tree)))
    absolutes = [node for node in trees.nodes(tree) if node.kind == "abs" and symbols(node)]
    if len(absolutes) > MAX_ABSOLUTES:
        raise Refused("many absolute values")
    if absolutes:  # with |a| for a and for -a
        inside = absolutes[0].parts[0]
        cases = [_replace(tree, absolutes[0], case) for case in (inside, trees.negate(inside))]
        return [zero for case in cases for zero in zeros(case, budget)]
    return list(_solutions(tree, budget))


def _replace(tree: Tree, old: Tree, new: Tree) -> Tree:
    if tree == old:
        return new
    return tree._replace(parts=tuple(_replace(part, old, new) for part in tree.parts))


def _solutions(tree: Tree, budget: Budget) -> Iterator[Tree]:
    """Return the points where an expression without absolute values is 0 or has a pole."""
    field = RationalFunctions(budget, opaque=True)
    fraction = field.read(tree)
    unknown, *others = [generator for generator in field.generators if symbols(generator)]
    if others:
        raise Refused("an equation that nothing here solves")
    for factor in [factor for poly in fraction for factor in field.split(poly)]:
        for value in _of_polynomial(field.coefficients(factor, unknown)):
            if unknown.kind == "symbol":
                yield value
                continue
            inner, targets = _inverse(unknown, value)
            for target in targets:
                yield from _solutions(trees.add([inner, trees.negate(target)]), budget)


def _of_polynomial(coefficients: list[Tree]) -> list[Tree]:
    """Return the zeros of a polynomial of degree 2 at most, and that of its linear part."""
    c, b, a, *higher = [*coefficients, ZERO, ZERO][: max(3, len(coefficients))]
    if higher:
        if any(term != ZERO for term in (b, a, *higher[:-1])):
            raise Refused("a high power")
        return _roots(trees.divide(trees.negate(c), higher[-1]), number(len(coefficients) - 1))
    linear = [trees.negate(trees.divide(c, b))] if b != ZERO else []
    if a == ZERO:
        return linear
    product = trees.multiply(number(-4), trees.multiply(a, c))
    root = trees.power(trees.add([trees.power(b, TWO), product]), HALF)
    above = [trees.add([trees.negate(b), half]) for half in (root, trees.negate(root))]
    return linear + [trees.divide(value, trees.multiply(TWO, a)) for value in above]


def _roots(value: Tree, degree: Tree) -> list[Tree]:
    """Return numbers with a power, the real ones among them."""
    if (degree.whole or 0) % 2:
        return [trees.odd_root(value, degree.whole or 1)]
    if value == ZERO:
        return [ZERO]
    root = trees.power(value, trees.divide(number(1), degree))
    return [root, trees.negate(root)]


def _inverse(function: Tree, value: Tree) -> tuple[Tree, list[Tree]]:
    """Return (the argument of a function, its values where the function has a value)."""
    inner, *others = [part for part in function.parts if symbols(part)]
    if others:
        raise Refused("an equation that nothing here solves")
    match function.kind:
        case "power" if inner is function.parts[0]:
            return inner, _roots(value, function.parts[1])
        case "odd_root":
            return inner, [trees.power(value, function.parts[1])]
        case "log":
            return inner, [trees.power(trees.EULER, value)]
        case "power" | "exp" if value == ZERO:
            return inner, []
        case "power" | "exp":
            base = trees.EULER if function.kind == "exp" else function.parts[0]
            return inner, [trees.divide(Tree("log", (value,)), Tree("log", (base,)))]
    raise Refused("an equation that nothing here solves")
