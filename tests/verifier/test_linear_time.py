"""Regular expressions over text that a model wrote take linear time on degenerate text."""

import importlib
import inspect
import pkgutil
import re
import time
from collections.abc import Iterator

import pytest

import dapo_jax.extras.math
from dapo_jax.data import extraction
from dapo_jax.extras.math import units
from dapo_jax.rewards import functions, spelling
from dapo_jax.rollout.environments import builtin

SHORT, LONG = 50, 400  # repeats of a piece; some 800 characters
ALLOWED_SECONDS = 0.0003  # below it, a clock says nothing
MOST_GROWTH = 3  # times that of a linear one
PIECES = r"""
  \, \\,~ \! \quad~ \text{ \text{a} \text{a}/ \frac{1}{2} \circ ^\circ { } ( ) [ ] | , . - + / * ^
  _ ' 1 12 1.5 1,000 1~000 1/2 1:2 a A ab e m~ m* cm cm/ f(x) x_1 x, \pi \angle~ $ \{ \} % ! : ; =
  < \le and~ A)~ (A)~ \begin{a} \mathbf{1} \overline{1} answer answer:~ ** # \boxed{ \boxed{1} the~
  <think> <answer> x\in~ \cup ]0,1[ \pm 5~a~ \color{a} {\color 2024- th~ ~ ~~
""".split()
PIECES = [piece.replace("~", " ") for piece in (*PIECES, "\t")] + ["~"]


def patterns(value) -> Iterator[re.Pattern]:
    if isinstance(value, re.Pattern):
        yield value
    elif isinstance(value, list | tuple | dict):
        for item in value.values() if isinstance(value, dict) else value:
            yield from patterns(item)


OWN = [module.name for module in pkgutil.iter_modules(dapo_jax.extras.math.__path__)]
MODULES = {name: importlib.import_module(f"dapo_jax.extras.math.{name}") for name in OWN}
MODULES |= {"functions": functions, "builtin": builtin}
MODULES |= {"extraction": extraction, "spelling": spelling}
PATTERNS = {
    f"{module}.{name}.{i}": pattern
    for module in MODULES
    for name, value in vars(MODULES[module]).items()
    for i, pattern in enumerate(patterns(value))
}
SOURCES = {name: inspect.getsource(module) for name, module in MODULES.items()}
LONGEST = {"units._PLAIN_TAIL.0": units.LONGEST_WITH_UNIT}  # characters that reach a pattern


def is_anchored(name: str) -> bool:
    """Test for a pattern that is tried at one place only."""
    module, name, _ = name.split(".")
    return not re.search(
        rf"(?<!\w){name}\.(?:search|sub|split|find)|\({name}[,.]|, {name}\)", SOURCES[module]
    )


def seconds(pattern: re.Pattern, text: str, anchored: bool) -> float:
    started = time.thread_time()
    pattern.fullmatch(text)
    if not anchored:
        for _ in pattern.finditer(text):
            pass
    return time.thread_time() - started


def is_superlinear(name: str, pattern: re.Pattern, case: tuple) -> bool:
    start, piece, end = case
    longest, anchored = LONGEST.get(name, LONG * 40), is_anchored(name)

    def best(repeats: int, times: int = 1) -> float:
        return min(
            seconds(pattern, (start + piece * repeats + end)[-longest:], anchored)
            for _ in range(times)
        )

    if best(SHORT) > ALLOWED_SECONDS and (short := best(SHORT, 3)) > ALLOWED_SECONDS:
        return short > 5 * best(SHORT // 5, 3) * MOST_GROWTH
    if best(LONG) < ALLOWED_SECONDS or (long := best(LONG, 3)) < ALLOWED_SECONDS:
        return False
    return long > LONG / SHORT * MOST_GROWTH * best(SHORT, 3)


@pytest.mark.parametrize("name", sorted(PATTERNS))
@pytest.mark.parametrize(
    "ends",
    [
        pytest.param([("4", "5")], id="between"),
        pytest.param(
            [("A", "\n"), ("", ""), ("\\text{", "!")], id="others", marks=pytest.mark.slow
        ),
    ],
)
def test_a_pattern_is_linear_in_runs_of_all_that_it_names(name, ends):
    pattern = PATTERNS[name]
    source = pattern.pattern
    text = source.decode() if isinstance(source, bytes) else source
    named = {*PIECES, *re.findall(r"[A-Za-z]{2,}", text), *text}
    cases = [(start, piece, end) for piece in sorted(named) if piece for start, end in ends]
    if isinstance(source, bytes):
        cases = [tuple(part.encode() for part in case) for case in cases]
    slow = [case for case in cases if is_superlinear(name, pattern, case)]
    # Again: a busy machine slows a single measurement.
    assert [case for case in slow if is_superlinear(name, pattern, case)] == []
