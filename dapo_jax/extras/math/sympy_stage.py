"""Closed forms of integrals and infinite sums by sympy, which rough numbers have to confirm.

Sympy sees small trees, never text, and its calls of functions are counted, not its time.
"""

import functools
import inspect
import sys
from types import FrameType

from flint import fmpq

from dapo_jax.extras.math import expression_tree as trees
from dapo_jax.extras.math.ball_arithmetic import PRECISIONS, enclose, with_bits
from dapo_jax.extras.math.expression_tree import Budget, Refused, Tree, Undecided, number

MAX_CALLS, MAX_NODES, LARGEST, TERMS = 300_000, 60, 1_000, 200  # LARGEST: of numbers
OPERATORS = {"total": "Sum", "integral": "Integral"}
_SAME_NAME = "log sin cos tan cot sec csc sinh cosh tanh asin acos atan exp factorial pi".split()
_NAMES = {"sum": "Add", "product": "Mul", "power": "Pow", "abs": "Abs", **OPERATORS}
_NAMES |= {"e": "E", "i": "I", "infinity": "oo", **dict(zip(_SAME_NAME, _SAME_NAME, strict=True))}
_KINDS = {name: kind for kind, name in _NAMES.items()}


def _to_sympy(tree: Tree):
    import sympy  # slow; a worker loads it outside the time of a verdict

    if tree.kind == "number" and max(abs(tree.value.p), tree.value.q) <= LARGEST:
        return sympy.Rational(int(tree.value.p), int(tree.value.q))
    if tree.kind in ("symbol", "bound"):
        return sympy.Symbol(tree.value, real=True)
    if sum(1 for _ in trees.nodes(tree)) > MAX_NODES:
        raise Refused("too large for sympy")
    parts = [_to_sympy(part) for part in tree.parts]
    if tree.kind == "quotient":
        return parts[0] / parts[1]
    if tree.kind == "total" and not parts[1].is_infinite:
        raise Refused("a sum that is written out, or too long")
    if tree.kind in OPERATORS:
        parts = [parts[-1], (sympy.Symbol(tree.value, real=True), *parts[:-1])]
    function = getattr(sympy, _NAMES[tree.kind])
    return function(*parts) if parts else function


def _from_sympy(expression) -> Tree:
    if expression.is_Rational:
        return number(fmpq(int(expression.p), int(expression.q)))
    if expression.is_Symbol:
        return Tree("symbol", value=expression.name)
    parts = [_from_sympy(part) for part in expression.args]
    kind = _KINDS[type(expression).__name__ if parts else str(expression)]
    return functools.reduce(trees.multiply, parts) if kind == "product" else Tree(kind, (*parts,))


def _work_out(tree: Tree, budget: Budget) -> Tree:
    operator = _to_sympy(tree)
    result = _from_sympy(operator.doit())
    point = {name: number(fmpq(3 + i, 8 + i)) for i, name in enumerate(sorted(trees.symbols(tree)))}

    def at(body: Tree, k: int = 0) -> complex:
        with with_bits(PRECISIONS[0]):
            body = trees.substitute(body, {**point, str(tree.value): number(k)}, budget)
            return complex(enclose(body, budget))

    if tree.kind == "integral":
        places = {symbol: _to_sympy(point[str(symbol)]) for symbol in operator.free_symbols}
        rough = complex(operator.subs(places).n())
    else:  # as if the terms left out were like 1/k^2
        terms = [at(tree.parts[2], (tree.parts[0].whole or 0) + n) for n in range(2 * TERMS)]
        rough = sum(terms) + sum(terms[TERMS:])
    if abs(rough - at(result)) > 1e-4 * max(1, abs(rough)):
        raise Undecided("a closed form that rough numbers do not confirm")
    return result


def closed_form(tree: Tree, budget: Budget) -> Tree:
    """Return an expression without integrals and infinite sums; raise `Undecided` without one."""
    tree = tree._replace(parts=tuple(closed_form(part, budget) for part in tree.parts))
    if tree.kind not in OPERATORS:
        return tree
    calls, most = 0, min(MAX_CALLS, budget.left)

    def count(frame: FrameType, event: str, _argument) -> None:
        nonlocal calls
        calls += event == "call"
        # Not in a generator: what is raised while one is closed is lost, and the count with it.
        if calls > most and not frame.f_code.co_flags & inspect.CO_GENERATOR:
            raise KeyboardInterrupt  # since sympy catches every Exception

    import sympy

    sympy.core.cache.clear_cache()  # for the same count after other verdicts
    sys.setprofile(count)
    try:
        return _work_out(tree, budget)
    except (KeyboardInterrupt, Exception) as error:
        raise Undecided(f"sympy: {error!r}") from None
    finally:
        sys.setprofile(None)
        budget.spend(calls)
