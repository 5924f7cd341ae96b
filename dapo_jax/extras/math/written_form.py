"""Steps that an expression leaves to be done, read from its tree as written.

Trees come from `parse(text, folds=False)`. Nothing is computed, so the work is small however large
the numbers are.
"""

import functools
import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from dapo_jax.extras.math.expression_tree import Tree

_PRIMES = [p for p in range(2, 1_000) if all(p % q for q in range(2, math.isqrt(p) + 1))]
_STEPS = {"exp": "e", "abs": "root", "factorial": "product", "binomial": "product"}
_STEPS |= {"ceiling": "floor", **dict.fromkeys("sin cos tan cot sec csc".split(), "sine")}
_STEPS |= dict.fromkeys("asin acos atan acot".split(), "arc")
_TO_DO = {"abs", "floor", "ceiling", "total", "times", "integral"}  # also of letters
_POWER_TO_DO = {"product", "quotient", "power", "odd_root", "i", "abs"}  # as bases
CONSTANTS = {"pi", "e", "i", "surd"}  # steps that are none where gold has functions of numbers


class Factor(NamedTuple):
    """Factor of a product: base ** times, above or below the bar."""

    base: Tree
    times: int
    below: bool


def _exponent(tree: Tree) -> tuple[Tree, int]:
    """Return (exponent of a power without its sign, sign)."""
    exponent, sign = tree.parts[1], 1
    while exponent.kind == "product" and exponent.parts[0].whole == -1:
        exponent, sign = exponent.parts[1], -sign
    return exponent, sign


def _root(tree: Tree) -> tuple[Tree, int] | None:
    """Return (radicand, order) of a root, in whatever way it is written."""
    if tree.kind == "odd_root":
        return tree.parts[0], tree.parts[1].whole or 1
    exponent = _exponent(tree)[0] if tree.kind == "power" else tree
    if tree.kind != "power" or exponent.kind not in ("number", "numeral", "quotient"):
        return None
    order = exponent.parts[1].whole if exponent.kind == "quotient" else int(exponent.value.q)
    return (tree.parts[0], order) if order and order > 1 else None


def factors(tree: Tree, below: bool = False) -> Iterator[Factor]:
    """Return the factors of a product, quotient or power."""
    if tree.kind in ("product", "quotient"):
        yield from factors(tree.parts[0], below)
        yield from factors(tree.parts[1], below ^ (tree.kind == "quotient"))
        return
    if tree.kind == "power" and tree.parts[0].kind != "numeral":  # a numeral's power is to be done
        exponent, sign = _exponent(tree)
        if exponent.kind == "numeral" and exponent.whole and (exponent.whole, sign) != (1, 1):
            yield Factor(tree.parts[0], exponent.whole, below ^ (sign < 0))
            return
    yield Factor(tree, 1, below)


@functools.lru_cache(maxsize=4096)
def key(tree: Tree) -> str:
    """Return text of a tree, the same for trees that differ in the order of terms and factors."""
    parts = list(factors(tree))
    if tree.kind in ("product", "quotient") or parts[0].base is not tree:
        return "*".join(sorted(map(_name, parts)))
    inner = [key(part) for part in tree.parts]
    inner = sorted(inner) if tree.kind == "sum" else inner
    return f"{tree.kind}{'' if tree.value is None else tree.value}({','.join(inner)})"


def _name(factor: Factor) -> str:
    return f"{key(factor.base)}^{factor.times}{'/' * factor.below}"


def _units(tree: Tree, outside: tuple[str, ...] = ()) -> Iterator[str]:
    """Return the terms of a sum without numbers; of a sum in brackets, times its factors."""
    for term in tree.parts if tree.kind == "sum" else (tree,):
        parts = [f for f in factors(term) if f.base.kind not in ("number", "numeral")]
        inner = [f.base for f in parts if f.base.kind == "sum" and f.times == 1 and not f.below]
        names = tuple(_name(f) for f in parts if len(inner) != 1 or f.base is not inner[0])
        if len(inner) == 1:
            yield from _units(inner[0], outside + names)
        else:
            yield "*".join(sorted(outside + names))


def _content(tree: Tree) -> int:
    """Return an integer that plainly divides an expression."""
    if tree.kind == "numeral":
        return int(tree.value.p) or 1
    if tree.kind == "sum":
        return math.gcd(*map(_content, tree.parts))
    if tree.kind in ("product", "quotient"):
        parts = list(factors(tree))
        return 1 if any(f.below for f in parts) else math.prod(_content(f.base) for f in parts)
    return 1


def _shared(bases: Iterable[Tree]) -> set[str]:
    """Return keys of what plainly divides a product of sums, save numbers."""
    names = set()
    for base in bases:
        terms = [{key(f.base) for f in factors(term) if not f.below} for term in base.parts]
        names |= set.intersection(*terms) if base.kind == "sum" else {key(base)}
    return {name for name in names if not name.startswith(("num", "sum"))}


def _frees(n: int, order: int) -> bool:
    """Return True if a root of this order simplifies the radicand, as 12 and 2, or 4 and 4."""
    is_square = order % 2 == 0 and n > 1 and math.isqrt(n) ** 2 == n
    tried = itertools.takewhile(lambda p: p**order <= n, _PRIMES)
    return is_square or any(n % p**order == 0 for p in tried)


class Form:
    """Work that an expression, as written, leaves to be done.

    Attributes: `steps`, operations on numbers that can be done, and kinds of constants;
    `operations` by which forms of one formula differ; `products`, of each product that has a sum
    among its factors, their sizes; `is_closed`, no letters.
    """

    def __init__(self, tree: Tree):
        self.tree, self.is_closed = tree, True
        self.steps: set[str] = set()
        self.operations: Counter[str] = Counter()
        self.products: Counter[tuple[int, ...]] = Counter()
        self._visit(tree)

    def _visit(self, tree: Tree) -> bool:
        """Note the work that is left to do; return True for a part without letters."""
        parts = list(factors(tree))
        if tree.kind in ("product", "quotient") or parts[0].base is not tree:
            closed = self._product(parts)
            is_power = tree.kind == "power" and _exponent(tree)[1] < 0
            if is_power and closed and tree.parts[0].kind not in ("e", "pi"):
                self.steps.add("product")
            return closed
        roots, root = self.operations["root"], _root(tree)
        closed = all([self._visit(part) for part in tree.parts])
        if tree.kind == "symbol":
            closed = self.is_closed = False
            self.steps.add("letters")
        elif tree.kind == "sum":
            units = list(_units(tree))
            if len(units) > len(set(units)) or any(part.whole == 0 for part in tree.parts):
                self.steps.add("sum")  # terms that can be collected
        elif tree.kind == "mixed":
            self.steps.add("product")
        elif root is not None:
            if closed and self.operations["root"] > roots:
                self.steps.add("nested")
            self.operations["root below"] += tree.kind == "power" and _exponent(tree)[1] < 0
            self._radical(*root)
        elif tree.kind == "power":
            if _exponent(tree)[0].kind == "numeral":  # of a numeral, or 0 or 1
                self.steps.add("product")
        elif tree.kind in CONSTANTS or tree.kind == "unread":
            self.steps.add(tree.kind)
        elif tree.parts:
            self.operations[tree.kind] += 1
            if tree.kind == "log" and any(f.base.kind == "e" for f in factors(tree.parts[0])):
                self.steps.add("product")
            if closed or tree.kind in _TO_DO:
                self.steps.add(_STEPS.get(tree.kind, tree.kind))
        return closed

    def _product(self, parts: list[Factor]) -> bool:
        signs = [f for f in parts if f.base.whole == -1]
        parts = [f for f in parts if f.base.kind != "number"]
        sums = [f for f in parts if f.base.kind == "sum"]
        others = [f for f in parts if f.base.kind not in ("sum", "numeral")]
        closed = [self._visit(f.base) for f in parts]
        letters = [f for f, is_closed in zip(parts, closed, strict=True) if not is_closed]
        ratios = [f for f in letters if f.base.kind == "quotient"]  # (x/2)^2 is an ellipse's
        self._numbers_of(parts)
        # x x can be x^2, and equal factors on both sides of the bar cancel.
        names = [key(f.base) for f in others]
        names += [name for name, _ in {(key(f.base), f.below) for f in sums}]
        powers = [f for f in others if f.times > 1 and f.base.kind in _POWER_TO_DO]
        above, below = (_shared(f.base for f in parts if f.below is side) for side in (False, True))
        is_double = len(signs) > 1 or len(set(names)) < len(names) or bool(above & below)
        if is_double or any(f not in ratios for f in powers):
            self.steps.add("product")
        above = sum(f.times for f in sums if not f.below)
        if any(f.below and (f.base.kind == "i" or f in sums) for f in parts):
            self.steps.add("denominator")
        if above > 1 and not letters:
            self.steps.add("unexpanded")
        is_product = above > 1 or above > 0 and any(not f.below for f in others)
        self.operations["unexpanded"] += is_product
        self.operations["below"] += any(f.below for f in letters)
        sizes = [len(f.base.parts) if f in sums else 1 for f in letters for _ in range(f.times)]
        is_whole = any(f.base.kind == "numeral" and not f.below for f in parts)
        has_content = any(_content(f.base) > 1 for f in sums if not f.below)
        self.operations["content"] += has_content
        if (is_whole or above > 1) and has_content:
            self.steps.add("content")  # 2(3x + 9)
        if sums and (len(sizes) > 1 or is_whole):
            self.products[tuple(sorted(sizes))] += 1
        return not letters

    def _numbers_of(self, parts: list[Factor]) -> None:
        """Test for arithmetic among a product's numbers: more than a fraction in lowest terms."""
        sides = [[f.base for f in parts if f.below is below] for below in (False, True)]
        above, below = ([b.value for b in side if b.kind == "numeral"] for side in sides)
        contents = [math.prod(map(_content, side)) for side in sides]
        roots = [[root[0].whole for b in side if (root := _root(b))] for side in sides]
        freed, divided = (math.prod(filter(None, side)) for side in roots)
        has_decimal = bool(below) and any(n.q > 1 for n in above + below)
        is_one = 1 in below or 1 in above and not below and len(sides[0]) > 1
        is_several = max(len(above), len(below)) > 1 or math.gcd(*contents) > 1
        if has_decimal or 0 in above or is_one or is_several:
            self.steps.add("product")
        # One root instead of two, or a factor that a root below the bar cancels.
        if sum(map(bool, roots[0])) > 1 or math.gcd(freed * contents[0], divided) > 1:
            self.steps.add("root")
        self.operations["root below"] += any(roots[1])

    def _radical(self, inside: Tree, order: int) -> None:
        self.operations["root"] += 1
        parts = list(factors(inside))
        kinds = {f.base.kind for f in parts}
        if kinds <= {"number", "numeral"}:
            self.steps.add("surd")
            if "number" in kinds or inside.whole in (0, 1):
                self.steps.add("root")
        self.operations["root below"] += any(f.below and f.base.kind == "numeral" for f in parts)
        for f in parts:
            below = int(f.base.value.q) if f.base.kind == "numeral" else 1
            if f.times >= order or _frees(_content(f.base), order) or _frees(below, order):
                self.steps.add("root")
