r"""Conventions of right answers beyond their value; a run chooses each (`reward`).

`is_unfinished`: the value is right but was not worked out: a relation still to be solved,
arithmetic that the gold answer has done, or the problem's own formula in another order.
`as_percentage`: 20\% for 20 where the problem asks for percent.
"""

import functools
import itertools
import re
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from dapo_jax.extras.math.answer_shape import Node, read
from dapo_jax.extras.math.equivalence import choice_and_value, exact_part
from dapo_jax.extras.math.expression_tree import Refused, Tree, add, negate
from dapo_jax.extras.math.expressions import parse
from dapo_jax.extras.math.names import assigned, compact, has_words, is_variable
from dapo_jax.extras.math.normalisation import normalise
from dapo_jax.extras.math.numerals import read_number
from dapo_jax.extras.math.problem import FORMULA
from dapo_jax.extras.math.units import split_unit
from dapo_jax.extras.math.written_form import CONSTANTS, Form, key, value_at

MAX_FORMULAS, LONGEST_FORMULA = 64, 400  # of a problem, from its end; characters
MAX_PAIRED = 16  # values of an answer
POINTS, NEAR = 3, 1e-9
_RATIO = re.compile(r" ?(?::|\\text\{ ?to ?\}) ?")
_MIXED = re.compile(r"(?<=\d) (\d+) ?/ ?(\d+)")
_SPELLING = re.compile(r"(?<=\d) \d* ?/|/|\.\d*[1-9]|[%^!]")
_ASKS_SPELLING = re.compile(
    r"decimal|fraction|per\s?cent|mixed|scientific|notation|power|exponent|factor", re.IGNORECASE
)
_ASKS_SOLVED = re.compile(r"slope.intercept|\bsolved? .*\bfor\b|mx ?\+", re.IGNORECASE)
_ASKS_PERCENT = re.compile(r"per\s?cent|\\?%", re.IGNORECASE)
_ASKED_FOR = re.compile(
    r"(?:find|compute|evaluate|determine|what is|value of|calculate) ?(?:the value of ?)?"
    r"\$([^$]{1,80})\$|(?:express|write|give) ?\$([^$]{1,80})\$ ?in terms of",
    re.IGNORECASE,
)
_FUNCTION_AT = re.compile(r"[A-Za-z]\([^()]*\)")
_ASKED_FORM = re.compile(
    r"\b(?:as|to|into|in(?= s)|write|express)\b[^.?$]{0,30}\b(percent|mixed|improper|scientific)",
    re.IGNORECASE,
)
_ASKS_SUM = re.compile(r"\bexpand|multiply out|standard form|distribut", re.IGNORECASE)
_ASKS_ONE_LOG = re.compile(r"(?:one|single) logarithm|\bevaluate\b|\bsimplify\b", re.IGNORECASE)
_SCIENTIFIC = re.compile(
    r"(?:(-?[\d.]{1,40})(?:\\times|\\cdot|\*))?10\^\{?([-+]?\d{1,4})\}?"
    r"|(?:-?[\d.]{1,40})[eE]([-+]?\d{1,4})",
    re.ASCII,
)
_REPEATED = re.compile(r"\\(?:overline|bar|dot)|\(")
_FORMS = {  # marks of the forms that a problem can ask for
    "percent": re.compile(".*%"),
    "mixed": re.compile(r"-?\d+(?:\\frac| \d+/)"),
    "improper": re.compile(r"-?(?:\\frac|\d+/)"),
    "scientific": re.compile(r"-?(?:10\^|[1-9](?:\.\d+)?(?:[eE]|\\times|\\cdot|\*))"),
}
_ASKS_NO_PERCENT = re.compile(
    r"\b(?:as|to|write|into) (?:an?|the)? ?(?:[a-z]+ )?(?:fraction|decimal)", re.IGNORECASE
)
_ASKS_FACTORS = re.compile(r"\bfactor(?:i[sz]e)?\b(?! of)", re.IGNORECASE)
_ASKS_RATIONAL = re.compile(r"rationali[sz]e", re.IGNORECASE)
_NEGATIVE_POWER = re.compile(r"\^ ?\{? ?-")
_EVERYTHING_OR_NOTHING = {r"\emptyset", r"\mathbbR"}  # compact
_ROWS = re.compile(r"\\\\|&|\\(?:begin|end)\{[^{}]*\}")
_PROSE = re.compile(
    r"(?<![\\A-Za-z])(?:(?!(?:sin|cos|tan|log)\b)[A-Za-z]{3,}"
    r"|(?:an|as|at|be|by|do|if|in|is|it|no|of|on|or|so|to|we)\b)|[.,;:?!](?=\s|$)",
    re.IGNORECASE,
)


class _Parts(NamedTuple):
    """Parts of an answer, or of a problem.

    texts: of values without their units, save words. forms: of those that are no plain numerals
    (of a problem: of all). unsolved: forms of relations that have to be solved, as differences.
    """

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
    node = read(text)
    names = _names(node)
    parts = _parts(node, names or None)
    return compact(text), parts, None if parts.unsolved else names


@functools.lru_cache(maxsize=256)
def _asked(problem: str) -> _Parts:
    """Return all formulas of a problem, between dollar signs or between words."""
    pieces = _PROSE.split(FORMULA.sub(" . ", problem))
    for inline, display in FORMULA.findall(problem):
        pieces += _ROWS.split(inline or display)
    pieces = [piece for piece in pieces if piece.strip() and len(piece) <= LONGEST_FORMULA]
    texts, equations = [], []
    for piece in pieces[-MAX_FORMULAS:]:
        node = read(normalise(piece))
        for item in (node, *node.items):
            is_relation = item.kind == "relation"
            texts += [side.text for side in (item.items if is_relation else (item,))]
            equations += [_equation(item)] if is_relation else []
    return _Parts(texts, list(map(_form, texts)), equations)


def _agree(mine: Form, asked: Form, *, is_equation: bool) -> bool:
    """Test for the same value at some points, roughly; of equations, up to a factor."""
    try:
        pairs = [(value_at(mine.tree, n), value_at(asked.tree, n)) for n in range(POINTS)]
        factor = pairs[0][0] / pairs[0][1] if is_equation else 1
        return all(abs(a - b * factor) <= NEAR * max(abs(a), abs(b * factor)) for a, b in pairs)
    except (ArithmeticError, ValueError, LookupError, TypeError):
        return False


def _is_as_asked(mine: Form, gold: Form, asked: list[Form], *, is_equation: bool) -> bool:
    """Return True for a formula copied from the problem if gold has another form."""
    excess = mine.operations - gold.operations
    if excess["unexpanded"] and mine.sums & {key(form.tree) for form in asked}:
        return True  # a product of the problem's own factors
    for form in asked:
        if not _agree(mine, form, is_equation=is_equation):
            continue
        to_do = form.operations - gold.operations
        is_left = to_do & excess or "product" in gold.steps and mine.bases - gold.bases
        is_copied = mine.tree.parts and key(mine.tree) == key(form.tree) != key(gold.tree)
        lacks = not to_do and form.lacks_product(gold) and mine.lacks_product(gold)
        if is_left or is_copied or lacks:
            return True
    return False


def _spelling(text: str) -> frozenset[str]:
    """Return marks of a numeral: a mixed number, a fraction, decimals, a percent sign, a power."""
    marks = _SPELLING.findall(compact(text).replace(r"\frac", " /"))
    return frozenset(mark[:1] + mark[-1:] for mark in marks)


def _is_left_as_asked(ours: _Parts, theirs: _Parts, problem: str) -> bool:
    """Return True for text of the problem in its own form if gold has another."""
    asked = _asked(problem)
    for mine, gold in itertools.zip_longest(ours.unsolved, theirs.unsolved):
        if mine and not gold:  # gold is solved for a letter
            agree = any(_agree(mine, form, is_equation=True) for form in asked.unsolved)
            if agree or _ASKS_SOLVED.search(problem):
                return True
        if mine and gold and _is_as_asked(mine, gold, asked.unsolved, is_equation=True):
            return True
    forms = itertools.product(ours.forms[:MAX_PAIRED], theirs.forms[:MAX_PAIRED])
    pairs = [pair for pair in forms if _agree(*pair, is_equation=False)]
    if any(_is_as_asked(*pair, asked.forms, is_equation=False) for pair in pairs):
        return True
    if not len(ours.texts) == len(theirs.texts) == 1:
        return False
    mine, value = _spelling(ours.texts[0]), read_number(ours.texts[0])
    if mine == _spelling(theirs.texts[0]) or not _ASKS_SPELLING.search(problem) or value is None:
        return False
    return value in {read_number(text) for text in asked.texts if _spelling(text) == mine}


def _leaves_power(text: str, gold: str, problem: str) -> bool:
    """Return True for the problem's power of ten that gold works out, or a numeral as 0.999..."""
    value = read_number(text)
    if _SCIENTIFIC.fullmatch(compact(text)) and not _SCIENTIFIC.fullmatch(compact(gold)):
        asked = (t for t in _asked(problem).texts if _SCIENTIFIC.fullmatch(compact(t)))
        return value in map(read_number, asked)
    if value is None or not _REPEATED.search(text):
        return False
    return 10**400 % value.denominator == 0


def _has_other_form(mine: str, gold: str, problem: str) -> bool:
    """Return True for a measure or a form other than the one that the problem names."""
    if r"\pi" in mine and r"\pi" not in gold and re.search(r"degrees?\b", problem):
        return True
    in_degrees = r"\circ" in mine or "degree" in mine
    if in_degrees and r"\pi" in gold and re.search("radian|degree|[Cc]onvert", problem):
        return compact(split_unit(mine)[0]) in re.findall(r"[\d.]*\d", problem)
    in_radians = split_unit(mine)[1] == "radian" and "degree" in problem
    has_percent = mine.endswith("%") and not gold.endswith("%")
    if in_radians and "radian" not in problem or has_percent and _ASKS_NO_PERCENT.search(problem):
        return True
    asked = _ASKED_FORM.search(problem)
    if asked and read_number(mine) is not None and read_number(gold) is not None:
        shown = _FORMS[asked[1].lower()]
        if shown.match(compact(gold)) and not shown.match(compact(mine)):
            return True
    if _ASKS_SUM.search(problem) and _form(gold).tree.kind == "sum":
        side = _form(mine.rpartition("=")[2])
        return side.operations["unexpanded"] > 0 and not side.is_closed
    if _ASKS_ONE_LOG.search(problem):
        return _form(mine).operations["log"] > _form(gold).operations["log"]
    if _ASKS_RATIONAL.search(problem) and _NEGATIVE_POWER.search(mine):
        return not _NEGATIVE_POWER.search(gold)
    if _ASKS_FACTORS.search(problem):
        return _form(mine).tree.kind == "sum" and _form(gold).tree.kind in ("product", "power")
    return False


def is_unfinished(prediction: str, answer: str, problem: str) -> bool:
    """Return True for an equivalent answer without work that the gold answer has done."""
    text = normalise(prediction)
    text = choice_and_value(text)[1] or text  # the guard sees what is compared
    if _leaves_power(text, normalise(answer), problem):
        return True
    if _is_plain(text) and not _ASKS_SPELLING.search(problem):  # most answers
        return False
    gold, theirs, names = _gold_parts(answer)
    if compact(text) == gold:
        return False
    if _has_other_form(text, normalise(answer), problem):
        return True
    ours = _parts(read(text), names)
    left, done = (Counter(step for f in p.forms for step in f.steps) for p in (ours, theirs))
    if set(done) - CONSTANTS - {"letters"} or r"\circ" in gold:  # functions may have constants
        left.subtract({constant: left[constant] for constant in CONSTANTS})
    elif done:
        left.pop("surd", None)
    if gold in _EVERYTHING_OR_NOTHING and ours.unsolved:
        return True
    if done["unread"]:
        return False
    left.pop("unread", None)
    if any(left[step] > done[step] for step in left if step != "letters" or not done[step]):
        return True
    if ours.unsolved and not theirs.unsolved and not done["letters"]:
        return True
    return _is_left_as_asked(ours, theirs, problem)


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
