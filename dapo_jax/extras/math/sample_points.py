"""Points to compare two expressions at, drawn from a hash of both, so verdicts repeat."""

import hashlib
import itertools
import random
from collections.abc import Iterator

from flint import fmpq

from dapo_jax.extras.math import expression_tree as trees
from dapo_jax.extras.math.expression_tree import Tree, nodes, number, symbols

Point = dict[str, Tree]
INTEGERS = "nmkN"  # letters that stand for whole numbers where floors and (-1)^n ask
COMPLEX = "zw"  # letters that need not be real
_SCALES = (1, -1, 1_000, 3, fmpq(-1, 7), -30, 1_000_000)  # near and far, of either sign
_OCTAVES = (-60, -30, -10, -4, -2, -1, 0, 0, 0, 1, 1, 1, 2, 2, 3, 4, 6, 10, 20, 30, 40, 60, 100)
_WHOLE = (2, 3, 4, 5, 6, 7, 30, 101, -3, -8)
_STEPPED = {"floor", "ceiling", "factorial", "binomial", "sin", "cos", "tan", "e"}
_OF_WHOLE = {"floor", "ceiling", "total", "times", "gcd", "remainder"}
_CORNERS = {"abs", "odd_root", "log", "asin", "acos", "atan"}
_ENOUGH_WHOLE = 14
_AT_STEPS = (6, 8, 11)  # of _WHOLE, for variables that need not be whole: at a floor's edge too
_UNUSUAL = 256  # a constant that is larger, or smaller than its inverse, has points near it
MAX_UNUSUAL = 4
_BELOW = 1_997  # a prime, so that no point is a zero that someone would write


def has_integers(*trees: Tree) -> bool:
    """Test for expressions of whole numbers, between which they may differ or have no values."""
    kinds = {node.kind for tree in trees for node in nodes(tree)}
    if kinds & _OF_WHOLE:
        return True
    if not any(name in INTEGERS for tree in trees for name in symbols(tree)):
        return False
    return bool(kinds & _STEPPED) or any(
        node.kind == "power" and node.parts[1].kind != "number"
        for node in itertools.chain(*map(nodes, trees))
    )


def sample_points(*trees: Tree) -> Iterator[Point]:
    """Yield the points to compare expressions at; one empty point for constants.

    Where absolute values, roots or logarithms have corners or branches there are many more, from
    2^-60 to 2^100 and near the expressions' own constants.
    """
    names = sorted(set().union(*map(symbols, trees)), key=lambda name: (name.lower(), name))
    if not names:
        yield {}
        return
    rng = random.Random(hashlib.blake2b(repr(trees).encode(), digest_size=8).digest())
    whole = has_integers(*trees)
    kinds = {node.kind for tree in trees for node in nodes(tree)}
    largest = 60 if kinds & {"total", "times"} else 900  # sums are written out
    magnitudes = (
        [] if all(name in INTEGERS for name in names) and whole else _magnitudes(rng, trees)
    )
    for i, magnitude in enumerate((*magnitudes, *[fmpq(1)] * (_ENOUGH_WHOLE * whole))):
        integer = _WHOLE[i] if i < len(_WHOLE) else rng.randrange(rng.choice((60, largest)))
        point = {}
        for name in names:
            if whole and name in INTEGERS:
                point[name] = number(integer)
                integer += rng.randrange(10)
            elif whole and i in _AT_STEPS:
                point[name] = number(integer + rng.randrange(10))
            else:
                point[name] = _value(rng, name, magnitude, i)
                magnitude *= rng.choice((1, -1, 1))
        yield point


def _value(rng: random.Random, name: str, magnitude: fmpq, trial: int) -> Tree:
    value = number(magnitude * fmpq(rng.randrange(_BELOW // 2, 2 * _BELOW) | 1, _BELOW))
    if name[0] in COMPLEX and trial % 2:
        height = number(fmpq(rng.randrange(-_BELOW, _BELOW), _BELOW + 2))
        return trees.add([value, trees.multiply(height, trees.IMAGINARY)])
    return value


def corners(tree: Tree) -> Iterator[Tree]:
    """Yield the arguments of functions with corners or branches; their signs matter."""
    for node in nodes(tree):
        root = node.kind == "power" and node.parts[1].kind == "number"
        if not symbols(node):
            continue
        if node.kind in ("floor", "ceiling"):
            yield node
        elif node.kind in ("max", "min"):
            yield from (trees.add([node.parts[0], trees.negate(part)]) for part in node.parts[1:])
        elif node.kind in _CORNERS or root and node.parts[1].rational.q > 1:
            yield node.parts[0]


def _magnitudes(rng: random.Random, trees: tuple[Tree, ...]) -> Iterator[fmpq]:
    yield from map(fmpq, _SCALES)
    if not any(any(corners(tree)) for tree in trees):
        return
    unusual = set()
    for node in itertools.chain(*map(nodes, trees)):
        if node.kind == "number" and node.rational and node.rational.p.bit_length() < 1_000:
            size = max(abs(node.rational), 1 / abs(node.rational))
            unusual |= {size} if size > _UNUSUAL else set()
    signs = (1, -1)
    yield from (sign * fmpq(2) ** octave for octave in _OCTAVES for sign in signs)
    for size in sorted(unusual)[-MAX_UNUSUAL:]:
        yield from (sign * c for c in (size, 1 / size) for sign in signs)
