r"""Conventions of right answers beyond their value; a run chooses each (`reward`).

`is_unfinished`: the value is right but was not worked out: a relation still to be solved,
arithmetic that the gold answer has done, or the problem's own formula in another order.
`as_percentage`: 20\% for 20 where the problem asks for percent.
"""

import functools
import itertools
import re
from collections import Counter
from collections.abc import Callable
from fractions import Fraction

from dapo_jax.extras.math.answer_shape import Node, read
from dapo_jax.extras.math.equivalence import Decision
from dapo_jax.extras.math.expression_tree import Refused, Tree, add, negate
from dapo_jax.extras.math.expressions import parse
from dapo_jax.extras.math.names import assigned, compact, has_words, is_variable
from dapo_jax.extras.math.normalisation import normalise
from dapo_jax.extras.math.numerals import COLON, read_number
from dapo_jax.extras.math.problem import FORMULA
from dapo_jax.extras.math.units import split_unit
from dapo_jax.extras.math.written_form import CONSTANTS, Form

LONGEST_FORMULA = 400  # characters
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
    r"\b(?:as|to|into|in(?= s)|write|express)\b[^.?$]{0,30}?"
    r"\b(percent|mixed|scientific|decimal|fraction)",
    re.IGNORECASE,
)
# Kinds of numerals, by the beginning of their compact text.
_TABLE = r"""
    percent .*%
    mixed -?\d+(?:\\frac| \d+/)
    fraction .*(?:\\frac|/)
    scientific -?(?:[1-9](?:\.\d+)?(?:\\times|\\cdot|\*))?10\^\{?[-+]?\d{1,4}\}?$
    scientific -?[1-9](?:\.\d+)?[eE][-+]?\d{1,4}$
    repeating .*(?:\\overline|\\bar|\\dot|\()
    power .*[\^!]|[-\d.]+[eE]
    decimal .*\.\d*[1-9]
"""
_KINDS = [
    (kind, re.compile(pattern))
    for kind, _, pattern in (line.strip().partition(" ") for line in _TABLE.strip().splitlines())
]
_BASE, MAX_DIVISOR = re.compile(r"(?<![\^{\d.])\d{1,9}(?![\d.])"), 1_000


def _tree(text: str) -> Tree:
    """Return a value as written; 'unread' if it is no expression."""
    try:
        return parse(_MIXED.sub(r"\\frac{\1}{\2}", text).replace("%", ""), folds=False)
    except Refused:
        return Tree("unread", value=text)


@functools.lru_cache(maxsize=4096)
def _form(text: str) -> Form:
    return Form(_tree(text))


def _equation(node: Node) -> Form:
    """Return the form of the difference of both sides."""
    left, right = node.items[0].text, node.items[-1].text
    form = Form(add([_tree(left), negate(_tree(right))]))
    # x + y = 1 and y = 1 - x differ in the sides that have letters.
    form.operations[f"{2 - _form(left).is_closed - _form(right).is_closed} sides"] += 1
    return form


def _is_plain(text: str) -> bool:
    """Test for a numeral that is no fraction."""
    return "/" not in text and r"\frac" not in text and read_number(text) is not None


def _forms(node: Node) -> list[Form]:
    """Return the forms of the values in an answer, save of numerals."""
    if node.kind == "value":
        text = COLON.sub("/", split_unit(node.text, trusted=True)[0])
        return [] if has_words(text) or _is_plain(text) else [_form(text)]
    items = [item for item in node.items if node.kind != "relation" or not is_variable(item)]
    return [form for item in items for form in _forms(item)]


@functools.lru_cache(maxsize=256)
def _asked_numerals(problem: str) -> set[tuple[str, Fraction | None]]:
    """Return kind and value of the numerals in a problem."""
    pieces = itertools.chain(_NUMERAL.findall(problem), map(max, FORMULA.findall(problem)))
    return {(_kind(text), read_number(text)) for text in map(normalise, pieces)}


def _kind(text: str) -> str:
    text = compact(text)
    return next((kind for kind, pattern in _KINDS if pattern.match(text)), "")


def _has_other_kind(given: str, gold: str, problem: str) -> bool:
    """Return True for a numeral as the problem has it, or not as the problem wants it."""
    given = given.rpartition("=")[2].strip()
    value, own, wanted = read_number(given), _kind(given), _kind(gold)
    if value is None or own == wanted:
        return False
    if own == "repeating" and 10**400 % value.denominator == 0:  # 0.999...
        return True
    asked = {kind.lower() for kind in _ASKED_KIND.findall(problem)}
    if asked and own == "percent" and own not in asked:
        return True
    if wanted in asked and read_number(gold) is not None:
        return True
    if own != "scientific" and not _ASKS_SPELLING.search(problem):
        return False
    return (own, value) in _asked_numerals(problem)


def _has_other_measure(given: str, gold: str, problem: str) -> bool:
    """Test whether an answer is in degrees where radians are asked, or the reverse."""
    asks_degrees, asks_radians = (re.search(unit, problem) for unit in (r"degrees?\b", "radian"))
    if r"\pi" in given and r"\pi" not in gold and asks_degrees:
        return True
    if r"\circ" in given or "degree" in given:
        is_given = compact(split_unit(given)[0]) in re.findall(r"[\d.]*\d", problem)
        is_converted = is_given and re.search("degree|[Cc]onvert", problem)
        return bool(asks_radians and not asks_degrees or r"\pi" in gold and is_converted)
    return bool(split_unit(given)[1] == "radian" and asks_degrees and not asks_radians)


def _exceeds(*names: str) -> Callable[[Form, Form], bool]:
    """Return a test for more of some operations than gold has."""
    return lambda given, gold: any((given.operations - gold.operations)[name] for name in names)


def _is_sum_of_product(given: Form, gold: Form) -> bool:
    return given.tree.kind == "sum" and gold.tree.kind in ("product", "power")


def _is_factored_less(given: Form, gold: Form) -> bool:
    has_less = gold.products - given.products or _exceeds("content")(given, gold)
    return _is_sum_of_product(given, gold) or bool(has_less)


# What a problem can ask for, and tests for an answer that lacks it though gold has it.
_FUNCTIONS = "root abs factorial exp sin cos tan cot sec csc".split()
_LACKS = {
    r"\bexpand|multiply out|distribut|standard form": _exceeds("unexpanded"),
    r"\bmultipl|product of|\bsquare\b": lambda given, gold: _is_sum_of_product(gold, given),
    r"\bfactor(?:i[sz]e)?\b(?! of)|(?:vertex|standard) form|complet": _is_factored_less,
    r"rationali[sz]e": _exceeds("root below"),
    r"simplify|\bcombine|(?:single|one) fraction": _exceeds("below"),
    r"(?:one|single) logarithm|\bevaluate\b|\bsimplify\b": _exceeds("log"),
    r"\bform\b": _exceeds("0 sides", "1 sides", "2 sides"),
    r"simplif|\b(?:re)?write\b|\bexpress\b|\breduce": _exceeds(*_FUNCTIONS),
}
_ASKED_FORMS = [(re.compile(pattern), lacks) for pattern, lacks in _LACKS.items()]


def is_unfinished(decision: Decision, problem: str) -> bool:
    """Return True for an equivalent answer that is not simplified as far as the gold answer."""
    text, gold = decision.texts
    if _has_other_kind(text, gold, problem):
        return True
    if compact(text) == compact(gold) or _is_plain(text) and not _ASKS_SPELLING.search(problem):
        return False
    if _has_other_measure(text, gold, problem):
        return True
    if "prime" in problem and _ASKS_PRIMES.search(problem):
        numbers = map(int, _BASE.findall(text.rpartition("=")[2]))
        if any(n < 2 or any(n % k == 0 for k in range(2, min(n, MAX_DIVISOR))) for n in numbers):
            return True
    left, done = (
        Counter(step for pair in decision.compared for f in _forms(pair[side]) for step in f.steps)
        for side in (0, 1)
    )
    if set(done) - CONSTANTS - {"letters"} or r"\circ" in gold:  # functions may have constants
        left.subtract({constant: left[constant] for constant in CONSTANTS})
    left.pop("unread", None)
    if any(left[step] > done[step] for step in left if step != "letters" or not done[step]):
        return True
    asked = problem.lower()
    tests = [lacks for pattern, lacks in _ASKED_FORMS if pattern.search(asked)]
    for given, other in decision.compared:
        ours, theirs = map(_forms, (given, other))
        if other.marks == ("=",):
            if assigned(other) and _ASKS_SOLVED.search(asked):
                return True
            ours, theirs = [_equation(given)], [_equation(other)]
        if ours and theirs and any(lacks(ours[0], theirs[0]) for lacks in tests):
            return True
    return False


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
