r"""Conventions of right answers beyond their value; a run chooses each (`reward`).

`is_unfinished`: the value is right but was not worked out: a relation still to be solved,
arithmetic that the gold answer has done, or the problem's own formula in another order.
`as_percentage`: 20\% for 20 where the problem asks for percent.
"""

import functools
import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import NamedTuple

from dapo_jax.extras.math.answer_shape import Node, read
from dapo_jax.extras.math.conditions import split_condition, without_label
from dapo_jax.extras.math.equivalence import choice_and_value, exact_part
from dapo_jax.extras.math.expression_tree import Refused, Tree, add, negate
from dapo_jax.extras.math.expressions import parse
from dapo_jax.extras.math.names import REALS, assigned, compact, has_words, is_variable
from dapo_jax.extras.math.normalisation import normalise
from dapo_jax.extras.math.numerals import read_number
from dapo_jax.extras.math.problem import FORMULA, read_problem
from dapo_jax.extras.math.units import split_unit
from dapo_jax.extras.math.written_form import CONSTANTS, Form

LONGEST_FORMULA = 400  # characters
_RATIO = re.compile(r" ?(?::|\\text\{ ?to ?\}) ?")
_MIXED = re.compile(r"(?<=\d) (\d+) ?/ ?(\d+)")
_ASKS_SPELLING = re.compile(
    r"decimal|fraction|per\s?cent|mixed|scientific|notation|power|exponent|factor", re.IGNORECASE
)
_ASKS_PRIMES = re.compile(r"prime (?:factori|power)", re.IGNORECASE)
_NUMERAL = re.compile(r"[\d.,]+(?: \d+/\d+|\\?%)?")
_ASKS_SOLVED = re.compile(r"slope.intercept|\bsolved? .*\bfor\b|mx ?\+|in terms of", re.IGNORECASE)
_ASKS_PERCENT = re.compile(r"per\s?cent|\\?%", re.IGNORECASE)
_ASKED_FOR = re.compile(
    r"(?:find|compute|evaluate|determine|what is|value of|calculate) ?(?:the value of ?)?"
    r"\$([^$]{1,80})\$|(?:express|write|give) ?\$([^$]{1,80})\$ ?in terms of",
    re.IGNORECASE,
)
_FUNCTION_AT = re.compile(r"[A-Za-z]\([^()]*\)")
_ASKED_KIND = re.compile(
    r"\b(?:as|to|into|in(?= s)|write|express)\b[^.?$]{0,30}\b(percent|mixed|improper|scientific)",
    re.IGNORECASE,
)
_ASKS_NO_PERCENT = re.compile(
    r"\b(?:as|to|write|into) (?:an?|the)? ?(?:[a-z]+ )?(?:fraction|decimal)", re.IGNORECASE
)
_KINDS = (  # of numerals, by marks in their compact text
    ("percent", re.compile(r".*%")),
    ("mixed", re.compile(r"-?\d+(?:\\frac| \d+/)")),
    ("improper", re.compile(r".*(?:\\frac|/)")),
    (
        "scientific",
        re.compile(
            r"-?(?:[1-9](?:\.\d+)?(?:\\times|\\cdot|\*))?10\^\{?[-+]?\d{1,4}\}?$"
            r"|-?[1-9](?:\.\d+)?[eE][-+]?\d{1,4}$"
        ),
    ),
    ("repeating", re.compile(r".*(?:\\overline|\\bar|\\dot|\()")),
    ("power", re.compile(r".*[\^!]|[-\d.]+[eE]")),
    ("decimal", re.compile(r".*\.\d*[1-9]")),
)
_BASE, MAX_DIVISOR = re.compile(r"(?<![\^{\d.])\d{1,9}(?![\d.])"), 1_000
_EVERYTHING_OR_NOTHING = {r"\emptyset", REALS}


class _Parts(NamedTuple):
    """Parts of an answer: texts of values without units and words, their forms save of numerals,
    and `unsolved`: forms of relations that have to be solved, as differences."""

    texts: list[str]
    forms: list[Form]
    unsolved: list[Form]


def _form(*texts: str) -> Form:
    """Return the form of a value, or of a difference; 'unread' if it is no expression."""
    texts = tuple(_MIXED.sub(r"\\frac{\1}{\2}", text).replace("%", "") for text in texts)
    try:
        trees = [parse(text, folds=False) for text in texts]
    except Refused:
        trees = [Tree("unread", value=texts[0])]
    return Form(trees[0] if len(trees) == 1 else add([trees[0], negate(trees[1])]))


def _equation(node: Node) -> Form:
    sides = [node.items[0].text, node.items[-1].text]
    form = _form(*sides)  # x + y = 1 and y = 1 - x differ in the sides that have letters
    form.operations[f"{sum(not _form(side).is_closed for side in sides)} sides"] += 1
    return form


def _names(node: Node) -> set[str]:
    """Return the variables with a value in an answer."""
    if node.kind != "relation":
        return set().union(*map(_names, node.items))
    pair = assigned(node)
    return {compact(pair[0])} if pair and is_variable(read(pair[0])) else set()


def _values(node: Node, names: set[str] | None, unsolved: list[Form]) -> Iterator[Node]:
    """Return the values of an answer; relations that are no values are put into `unsolved`."""
    node = exact_part(node) or node
    if node.kind != "relation":
        for item in node.items:
            yield from _values(item, names, unsolved)
        if not node.items:
            yield node
        return
    pair = assigned(node)
    if node.marks == ("in",) and is_variable(node.items[0]):
        yield from _values(node.items[1], names, unsolved)
    elif pair and names is not None and (not names or compact(pair[0]) in names or "(" in pair[0]):
        yield from _values(pair[1], names, unsolved)
    elif set(node.marks) == {"="} and names == set():  # a chain
        yield from _values(node.items[-1], names, unsolved)
    else:
        sides = [item for item in node.items if not is_variable(item)]
        if "=" in node.marks or not all(_form(item.text).is_closed for item in sides):
            unsolved.append(_equation(node))
        yield from sides


def _is_plain(text: str) -> bool:
    """Test for a numeral that is no fraction."""
    return "/" not in text and r"\frac" not in text and read_number(text) is not None


def _parts(node: Node, names: set[str] | None) -> _Parts:
    """Return the parts of an answer, of which gold has these names (None: it is to be solved)."""
    parts = _Parts([], [], [])
    for item in _values(node, names, parts.unsolved):
        text = split_unit(_RATIO.sub("/", item.text), trusted=True)[0]
        if has_words(text) or text in parts.texts:
            continue
        parts.texts.append(text)
        if not _is_plain(text):
            parts.forms.append(_form(text))
    return parts


@functools.lru_cache(maxsize=1024)
def _gold_parts(answer: str) -> tuple[str, _Parts, set[str] | None]:
    """Return text, parts and names of a gold answer; cached for its many responses."""
    text = normalise(answer)
    text = split_condition(text).text
    node = read(text)
    names = _names(node)
    parts = _parts(node, names or None)
    return compact(text), parts, None if parts.unsolved else names


@functools.lru_cache(maxsize=256)
def _asked_numerals(problem: str) -> set[tuple[str, Fraction | None]]:
    """Return kind and value of the numerals in a problem."""
    pieces = itertools.chain(_NUMERAL.findall(problem), map(max, FORMULA.findall(problem)))
    return {(_kind(text), read_number(text)) for text in map(normalise, pieces)}


def _kind(text: str) -> str:
    text = compact(text)
    return next((kind for kind, pattern in _KINDS if pattern.match(text)), "")


def _has_other_kind(mine: str, gold: str, problem: str) -> bool:
    """Return True for a numeral as the problem has it, or not as the problem wants it."""
    mine = mine.rpartition("=")[2].strip()
    value, own, wanted = read_number(mine), _kind(mine), _kind(gold)
    if value is None or own == wanted:
        return False
    if own == "repeating" and 10**400 % value.denominator == 0:  # 0.999...
        return True
    if own == "percent" and _ASKS_NO_PERCENT.search(problem):
        return True
    named = _ASKED_KIND.search(problem)
    if named and named[1].lower() == wanted and read_number(gold) is not None:
        return True
    if own != "scientific" and not _ASKS_SPELLING.search(problem):
        return False
    return (own, value) in _asked_numerals(problem)


def _has_other_measure(mine: str, gold: str, problem: str) -> bool:
    """Return True for degrees or radians where the problem asks for the other."""
    asks_degrees, asks_radians = (re.search(unit, problem) for unit in (r"degrees?\b", "radian"))
    if r"\pi" in mine and r"\pi" not in gold and asks_degrees:
        return True
    if r"\circ" in mine or "degree" in mine:
        is_given = compact(split_unit(mine)[0]) in re.findall(r"[\d.]*\d", problem)
        is_converted = is_given and re.search("degree|[Cc]onvert", problem)
        return bool(asks_radians and not asks_degrees or r"\pi" in gold and is_converted)
    return bool(split_unit(mine)[1] == "radian" and asks_degrees and not asks_radians)


def _has_composite(text: str) -> bool:
    numbers = map(int, _BASE.findall(text.rpartition("=")[2]))
    return any(n % k == 0 for n in numbers for k in range(2, min(n, MAX_DIVISOR)))


def _exceeds(*names: str) -> Callable[[Form, Form], bool]:
    """Return a test for more of some operations than gold has."""
    return lambda mine, gold: any((mine.operations - gold.operations)[name] for name in names)


def _is_sum_of_product(mine: Form, gold: Form) -> bool:
    return mine.tree.kind == "sum" and gold.tree.kind in ("product", "power")


def _is_factored_less(mine: Form, gold: Form) -> bool:
    return _is_sum_of_product(mine, gold) or bool(gold.products - mine.products)


# What a problem can ask for, and tests for an answer that lacks it though gold has it.
_ASKED_FORMS = [
    (re.compile(pattern), lacks)
    for pattern, lacks in (
        (r"\bexpand|multiply out|distribut|standard form", _exceeds("unexpanded")),
        (r"\bmultipl|product of|\bsquare\b", lambda mine, gold: _is_sum_of_product(gold, mine)),
        (r"\bfactor(?:i[sz]e)?\b(?! of)|(?:vertex|standard) form|complet", _is_factored_less),
        (r"rationali[sz]e", _exceeds("root below")),
        (r"simplify|\bcombine|(?:single|one) fraction", _exceeds("below")),
        (r"(?:one|single) logarithm|\bevaluate\b|\bsimplify\b", _exceeds("log")),
        (r"\bform\b", _exceeds("0 sides", "1 sides", "2 sides")),
        (
            r"simplif|\b(?:re)?write\b|\bexpress\b|\breduce",
            _exceeds("root", "abs", "factorial", "exp", *"sin cos tan cot sec csc".split()),
        ),
    )
]


def is_unfinished(prediction: str, answer: str, problem: str) -> bool:
    """Return True for an equivalent answer that is not simplified as far as the gold answer."""
    text = normalise(prediction)
    text = choice_and_value(text)[1] or text  # the guard sees what is compared
    text = split_condition(without_label(text, read_problem(problem))).text
    if _has_other_kind(text, normalise(answer), problem):
        return True
    if _is_plain(text) and not _ASKS_SPELLING.search(problem):  # most answers
        return False
    gold, theirs, names = _gold_parts(answer)
    if compact(text) == gold:
        return False
    if _has_other_measure(text, normalise(answer), problem):
        return True
    if "prime" in problem and _ASKS_PRIMES.search(problem) and _has_composite(text):
        return True
    ours = _parts(read(text), names)
    left, done = (Counter(step for f in p.forms for step in f.steps) for p in (ours, theirs))
    if set(done) - CONSTANTS - {"letters"} or r"\circ" in gold:  # functions may have constants
        left.subtract({constant: left[constant] for constant in CONSTANTS})
    if gold in _EVERYTHING_OR_NOTHING and ours.unsolved:
        return True
    left.pop("unread", None)
    if any(left[step] > done[step] for step in left if step != "letters" or not done[step]):
        return True
    asked = problem.lower()
    if len(ours.unsolved) > len(theirs.unsolved) and _ASKS_SOLVED.search(asked):
        return True
    is_single = len(ours.forms) == len(theirs.forms) == 1
    pairs = [*zip(ours.unsolved, theirs.unsolved, strict=False)]
    pairs += zip(ours.forms, theirs.forms, strict=True) if is_single else ()
    tests = [lacks for pattern, lacks in _ASKED_FORMS if pattern.search(asked)]
    return any(lacks(*pair) for lacks in tests for pair in pairs)


def as_percentage(prediction: str, problem: str) -> str | None:
    """Return the answer without percent sign if the problem asks for percent; else None."""
    text = normalise(prediction)
    return text.removesuffix("%") if text.endswith("%") and _ASKS_PERCENT.search(problem) else None


def asked_value(prediction: str, problem: str) -> str | None:
    """Return b of an answer a = b if the problem asks for a; '' if for another value of a function.

    None: the answer is no such equation.
    """
    if "=" not in prediction or len(prediction) > LONGEST_FORMULA:
        return None
    node = read(normalise(prediction))
    if node.kind != "relation" or node.marks != ("=",):
        return None
    asked = {compact(normalise(max(pair))) for pair in _ASKED_FOR.findall(problem)}
    text = node.items[0].text
    left, has_letters = compact(text), re.search(r"(?<!\\)\b[A-Za-z]", text)
    if left in asked and (has_letters or not _form(text).is_closed):
        return node.items[1].text
    is_other = _FUNCTION_AT.fullmatch(left) and left not in asked
    return "" if is_other and any(map(_FUNCTION_AT.fullmatch, asked)) else None
