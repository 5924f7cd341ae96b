"""Points to compare two expressions at, drawn from a hash of both, so verdicts repeat."""

import hashlib
import itertools
import random
from collections.abc import Iterator

from flint import fmpq

from dapo_jax.extras.math import expression_tree as trees
from dapo_jax.extras.math.expression_tree import Tree, nodes, number, symbols

Point = dict[str, Tree]
COMPLEX = "zw"  # letters that need not be real
VARIANT = "function"  # of a point: which function an unknown one is
_SCALES = (1, -1, 1_000, 3, fmpq(-1, 7), -30, 1_000_000)  # near and far, of either sign
_OCTAVES = (-60, -30, -10, -4, -2, -1, 0, 0, 0, 1, 1, 1, 2, 2, 3, 4, 6, 10, 20, 30, 40, 60, 100)
_STEPPED = {"floor", "ceiling", "gcd", "remainder"}  # equal at most points says little
_OF_WHOLE = {"factorial", "binomial", "total", "times"}
_CORNERS = set("abs odd_root log asin acos atan floor ceiling max min".split())
_OSCILLATING = {"sin", "cos", "tan", "cot", "sec", "csc", "i", *_STEPPED}
_WHOLE, _LARGEST = (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 30, 101, -3, -8), 900
_LARGEST_OF_SUMS = 60  # they are written out
MAX_STEPS = 16  # numbers whose multiples are points
_UNUSUAL = 256  # a constant that is larger, or smaller than its inverse, has points near it
MAX_UNUSUAL = 4
_BELOW = 1_997  # a prime, so that no point is a zero that someone would write


def whole_letters(given: Tree, gold: Tree, letters: frozenset[str] = frozenset()) -> frozenset[str]:
    """Return letters for integers: `letters`, and those of gold's factorials, sums and (-1)^n.

    Those of an answer's own factorials count where gold has nothing that vanishes at integers.
    """
    oscillates = any(node.kind in _OSCILLATING for node in nodes(gold))
    for tree in (gold,) if oscillates else (gold, given):
        for node in nodes(tree):
            parts = node.parts if node.kind in _OF_WHOLE else ()
            if node.kind == "power" and node.parts[0].kind == "number":
                parts = node.parts[1:] if node.parts[0].value < 0 else ()
            letters |= set().union(*map(symbols, parts))
    return letters


def sample_points(
    given: Tree, gold: Tree, whole: frozenset[str] = frozenset()
) -> Iterator[tuple[Point, bool]]:
    """Yield the points to compare expressions at, and whether all their letters are integers.

    Where absolute values, roots or logarithms have corners or branches there are many more, from
    2^-60 to 2^100 and near the expressions' own constants. Integers lie on both sides of each
    other and are multiples of the expressions' own numbers too.
    """
    both = (given, gold)
    names = sorted(set().union(*map(symbols, both)), key=lambda name: (name.lower(), name))
    kinds = {node.kind for tree in both for node in nodes(tree)}
    if not names:
        yield from (({VARIANT: number(i)}, False) for i in range(3 if "function" in kinds else 1))
        return
    rng = random.Random(hashlib.blake2b(repr(both).encode(), digest_size=8).digest())
    numbers = [node.value for tree in both for node in nodes(tree) if node.kind == "number"]
    largest = _LARGEST_OF_SUMS if kinds & {"total", "times"} else _LARGEST
    magnitudes = _magnitudes(rng, numbers, is_many=has_corners(given, gold))
    for i, magnitude in enumerate(() if whole.issuperset(names) else magnitudes):
        point = {VARIANT: number(i)}
        for name in names:
            if name in whole:
                point[name] = number(rng.randrange(1, rng.choice((9, largest))))
            else:
                point[name] = _value(rng, name, magnitude, i)
                magnitude *= rng.choice((1, -1, 1))
        yield point, False
    if not (whole.intersection(names) or kinds & _STEPPED):
        return
    own = {int(n) for value in numbers for n in (value.p, value.q) if 1 < n < 10**9}
    steps = [n * times for n in sorted(own)[-MAX_STEPS:] for times in (1, 2, 3)]
    drawn = [*_WHOLE, *(n for n in steps if n <= 100 or largest > 100)]
    drawn += [rng.randrange(1, largest) for _ in range(10)]
    for i, first in enumerate(drawn):
        ordered = enumerate(names[:: (-1) ** i])  # either order
        later = {name: number(first + (j and rng.randrange(8) * j)) for j, name in ordered}
        yield {VARIANT: number(i), **later}, True


def _value(rng: random.Random, name: str, magnitude: fmpq, trial: int) -> Tree:
    value = number(magnitude * fmpq(rng.randrange(_BELOW // 2, 2 * _BELOW) | 1, _BELOW))
    if name[0] in COMPLEX and trial % 2:
        height = number(fmpq(rng.randrange(-_BELOW, _BELOW), _BELOW + 2))
        return trees.add([value, trees.multiply(height, trees.IMAGINARY)])
    return value


def _is_positive(tree: Tree) -> bool:
    """Test for what is plainly above 0, as 5e^x."""
    if tree.kind == "number":
        return bool(tree.value > 0)
    if tree.kind in ("sum", "product", "quotient"):
        return all(map(_is_positive, tree.parts))
    return tree.kind in ("e", "pi", "exp") or tree.kind == "power" and _is_positive(tree.parts[0])


def has_corners(*both: Tree) -> bool:
    """Test for functions with corners or branches, whose arguments' signs matter."""
    for node in itertools.chain(*map(nodes, both)):
        exponent = node.parts[1] if node.kind == "power" else node
        is_root = exponent.kind == "number" and exponent.value.q > 1
        if (node.kind in _CORNERS or is_root) and symbols(node) and not _is_positive(node.parts[0]):
            return True
    return False


def _magnitudes(rng: random.Random, numbers: list[fmpq], *, is_many: bool) -> Iterator[fmpq]:
    yield from map(fmpq, _SCALES)
    if not is_many:
        return
    sizes = {max(abs(n), 1 / abs(n)) for n in numbers if n and n.p.bit_length() < 1_000}
    signs = (1, -1)
    yield from (sign * fmpq(2) ** octave for octave in _OCTAVES for sign in signs)
    for size in sorted(size for size in sizes if size > _UNUSUAL)[-MAX_UNUSUAL:]:
        yield from (sign * c for c in (size, 1 / size) for sign in signs)
