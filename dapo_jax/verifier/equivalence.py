"""Comparison of two answers: by shape first, then value by value.

Everything that strings and exact numerals can decide is decided here, in time linear in short
texts. What needs algebra is asked of `Algebra`, which lives in a process that can be killed.
"""

import functools
import re
from fractions import Fraction
from typing import Protocol

from dapo_jax.verifier.answer_shape import Node, read
from dapo_jax.verifier.extraction import extract
from dapo_jax.verifier.normalisation import FORBIDDEN, normalise
from dapo_jax.verifier.numerals import read_integer, read_number
from dapo_jax.verifier.units import split_unit

LONGEST_COMPARED, LONGEST_NAME, MOST_ITEMS = 2_000, 200, 64  # characters; members of a set
_INEQUALITIES = {"<", ">", "<=", ">=", "!="}
_REGIONS = {"union", "intersection", "difference"}
REALS = r"\mathbbR"  # compact
_GREEK = "alpha|beta|gamma|delta|epsilon|theta|lambda|mu|rho|sigma|tau|phi|omega|Delta|Omega|ell"
# Possessive throughout: a long run of names must not be read in exponentially many ways.
_NAME = (
    rf"(?:\\angle ?[A-Z]{{1,3}}+|\\(?:{_GREEK})(?![A-Za-z])|\\(?:text|mathbf)\{{[^{{}}]*+\}}"
    r"|(?<![\\A-Za-z])[A-Za-z]++)(?:_ ?(?:\{[^{}]*+\}|\w))?+'*+"
)
_ARGUMENT = rf"(?:{_NAME}|\d++)"
_VARIABLE = re.compile(
    rf"{_NAME}(?: ?\( ?{_ARGUMENT}(?: ?, ?{_ARGUMENT})*+ ?\))?+(?: {_NAME})*+|\|[A-Z]{{1,3}}\|"
    r"|\\(?:overline|widehat)\{[A-Z]+\}"
)
_DENIALS = set(
    "not never no isn neither but except anything nothing unless without excluding than".split()
)
_NUMERIC_NAMES = {r"\pi", "e", "i", r"\infty"}
_WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{3,}")
_NO_WORDS = set(
    "sin cos tan cot sec csc log exp sqrt arcsin arccos arctan asin acos atan sinh cosh tanh "
    "infinity inf xyz abc abcd text".split()
)
_SHORT_WORDS = {"no", "on", "is", "it", "if", "an", "at", "or", "of", "to", "up", "so"}
_TEXT = re.compile(r"\\(?:text|mathbf) ?\{([^{}]*)\}")
_DECIMAL = re.compile(r"-?\d{1,300}(?:\.\d{1,300})?", re.ASCII)
_OPERATORS = re.compile(r"[\\^_=+*/<>|]")
_RATIO = re.compile(r"(\d{1,30}) ?(?:\\text\{ ?to ?\}|:) ?(\d{1,30})", re.ASCII)
_PRODUCT = re.compile(r".*[\d)}] [A-Za-z]", re.DOTALL)  # or a measured value
_FUNCTION_OF = re.compile(r"([A-Za-z])\(([A-Za-z])\)")
CENTS = 100
_CHOICE = re.compile(r"\(?([A-Za-z])[).:]?")


class Algebra(Protocol):
    """Decisions that strings can't make; arguments are normalised texts."""

    def same_value(self, prediction: str, answer: str) -> bool: ...

    def same_equation(self, prediction: str, answer: str) -> bool: ...

    def same_region(self, prediction: str, answer: str) -> bool: ...


def compact(text: str) -> str:
    """Text without blanks, save between digits, and without braces around single characters."""
    text = re.sub(r"(?<!\d) +| +(?!\d)", "", text)
    return re.sub(r"(?<!\\)\{(\w)\}", r"\1", text) if "{" in text else text


def words_of(text: str) -> str:
    """Words of a text, without commands and braces."""
    text = _TEXT.sub(r" \1 ", text)
    return " ".join(re.sub(r"[{}\\$~]", " ", text).split()).strip(" .,;:!")


def _same_words(mine: str, gold: str) -> bool:
    """Capitals don't count, save inside short tokens that may be a product of letters."""
    if mine.lower() != gold.lower():
        return False
    pairs = zip(mine.split(), gold.split(), strict=True)
    return all(a == b or len(a) > 3 or _is_written(a) and _is_written(b) for a, b in pairs)


def _is_written(word: str) -> bool:
    return word in (word.lower(), word.title(), word.upper()) and bool(
        set(word.lower()) & set("aeiouy")
    )


def has_words(text: str) -> bool:
    """Test for text in words rather than symbols."""
    if any(re.search(r"[A-Za-z]{2}", inner) for inner in _TEXT.findall(text)):
        return True
    bare = _TEXT.sub(" ", text)
    if _OPERATORS.search(bare):
        return False
    if bare.strip(" {}").lower() in _SHORT_WORDS:
        return True
    return any(word.lower() not in _NO_WORDS for word in _WORD.findall(bare))


class _Comparison:
    def __init__(self, algebra: Algebra):
        self._algebra = algebra

    def same(self, mine: Node, gold: Node) -> bool:
        if compact(mine.text) == compact(gold.text):
            return True
        mine, gold = _without_membership(mine), _without_membership(gold)
        if _is_region(mine) or _is_region(gold):
            return self._algebra.same_region(mine.text, gold.text)
        if "relation" in (mine.kind, gold.kind):
            return self._same_relation(mine, gold)
        if "matrix" in (mine.kind, gold.kind):
            return mine.kind == gold.kind and self._in_order(mine.items, gold.items)
        if "tuple" in (mine.kind, gold.kind):
            alike = mine.kind == gold.kind and mine.marks == gold.marks
            return alike and self._in_order(mine.items, gold.items)
        if mine.kind == gold.kind == "value":
            return self._same_value(mine.text, gold.text)
        if mine.kind == "value" and gold.kind == "list" and "," in mine.text:
            mine = Node("list", mine.text, tuple(map(read, mine.text.split(","))))  # 100,200
        named, wanted = _names(mine), _names(gold)
        if len(named) != len(wanted) and max(len(named), len(wanted)) > 1:
            # m = 2, n = 3 is not 3, 2; nor is x = 2, 3 any of them
            return not (named and wanted) and self._in_order(mine.items, gold.items)
        return self._as_sets(_items(mine), _items(gold))

    def _in_order(self, mine: tuple[Node, ...], gold: tuple[Node, ...]) -> bool:
        return len(mine) == len(gold) and all(map(self.same, mine, gold))

    def _as_sets(self, mine: list[Node], gold: list[Node]) -> bool:
        if max(len(mine), len(gold)) > MOST_ITEMS:
            return False
        left = list(gold)
        for item in mine:
            match = next((other for other in left if self.same(item, other)), None)
            if match is None:
                return False
            left.remove(match)
        return not left

    def _same_relation(self, mine: Node, gold: Node) -> bool:
        mine, gold = _without_approximation(mine), _without_approximation(gold)
        if mine.kind == gold.kind == "relation":
            named, wanted = _assigned(mine), _assigned(gold)
            if named and wanted:
                named = _with_variable_of(named, wanted)
                if compact(named[0]) == compact(wanted[0]):
                    return self.same(named[1], wanted[1])
            if len(mine.items) == len(gold.items) == 2:
                return self._algebra.same_equation(mine.text, gold.text)
            return False
        if mine.kind != "relation" and gold.kind != "relation":
            return self.same(mine, gold)
        relation, other = (mine, gold) if mine.kind == "relation" else (gold, mine)
        assigned = _assigned(relation)
        if assigned is None:
            first, *_, last = relation.items
            if not (first.kind == last.kind == "value" and self._same_value(first.text, last.text)):
                return False
            assigned = "", last
        return self.same(assigned[1], other) if mine is relation else self.same(other, assigned[1])

    def _same_value(self, mine: str, gold: str) -> bool:
        mine_number, gold_number = read_number(mine), read_number(gold)
        if mine_number is not None and gold_number is not None:
            return mine_number == gold_number
        whole, wanted = read_integer(mine), read_integer(gold)
        if whole and wanted:  # longer than a numeral may be
            return whole == wanted
        choice = _CHOICE.fullmatch(gold)
        if choice and choice[1].isupper() and (found := _CHOICE.fullmatch(mine)):
            return found[1].upper() == choice[1]
        if (same := _same_ratio(mine, gold)) is not None:
            return same
        if split_unit(mine)[1] or split_unit(gold, trusted=True)[1]:
            return self._same_measure(mine, gold)
        if has_words(mine) or has_words(gold):
            return _same_words(words_of(mine), words_of(gold))
        # What reads as a numeral is that number here too: 1e3 is 1000, never 3 times e.
        texts = _as_read(mine, mine_number), _as_read(gold, gold_number)
        return self._algebra.same_value(*texts)

    def _same_measure(self, mine: str, gold: str) -> bool:
        """Values of which at least one has a unit."""
        mine_value, mine_unit = split_unit(mine)
        gold_value, gold_unit = split_unit(gold, trusted=True)
        if not mine_unit:  # the gold answer says what may stand here
            mine_value, mine_unit = split_unit(mine, trusted=True)
        if not mine_unit and _PRODUCT.fullmatch(gold):  # 2 m may be twice m
            return self._algebra.same_value(mine, gold)
        if split_unit(mine_value)[1] or split_unit(gold_value)[1]:  # one behind another
            return False
        units = {mine_unit, gold_unit}
        if units == {"dollar", "cent"}:
            ours, theirs = read_number(mine_value), read_number(gold_value)
            scales = (1 if mine_unit == "cent" else CENTS), (1 if gold_unit == "cent" else CENTS)
            if ours is None or theirs is None:
                return False
            return ours * scales[0] == theirs * scales[1]
        if mine_unit and gold_unit and mine_unit != gold_unit:
            return False
        if units == {"degree", ""} and r"\pi" in mine + gold:
            return self._algebra.same_value(mine, gold)
        return self.same(read(mine_value), read(gold_value))


def _as_read(text: str, number: Fraction | None) -> str:
    if number is None:
        return text
    return rf"\frac{{{number.numerator}}}{{{number.denominator}}}"


def _same_ratio(mine: str, gold: str) -> bool | None:
    """Equality of a ratio, 5:8, with a ratio or a fraction; None for anything else."""
    ours, theirs = _RATIO.fullmatch(mine), _RATIO.fullmatch(gold)
    if ours and theirs and int(ours[2]) and int(theirs[2]):
        return Fraction(int(ours[1]), int(ours[2])) == Fraction(int(theirs[1]), int(theirs[2]))
    for match, other in ((ours, gold), (theirs, mine)):
        number = read_number(other) if match and ("/" in other or r"\frac" in other) else None
        if match and number is not None and int(match[2]):
            return Fraction(int(match[1]), int(match[2])) == number
    return None


def _with_variable_of(mine: tuple[str, Node], gold: tuple[str, Node]) -> tuple[str, Node]:
    """f(t) = 2t as f(x) = 2x, where gold has f(x): the letter is free to choose."""
    named, wanted = (
        _FUNCTION_OF.fullmatch(compact(mine[0])),
        _FUNCTION_OF.fullmatch(compact(gold[0])),
    )
    if not (named and wanted and named[1] == wanted[1] and named[2] != wanted[2]):
        return mine
    text, letters = mine[1].text, r"(?<![\\A-Za-z]){}(?![A-Za-z])"
    if re.search(wanted[2], re.sub(r"\\[A-Za-z]+", "", text)):
        return mine
    renamed = re.sub(letters.format(named[2]), wanted[2], text)
    return gold[0], read(renamed)


def _items(node: Node) -> list[Node]:
    """Members without those written twice."""
    members = node.items if node.kind in ("list", "set") else (node,)
    members = [
        inner
        for member in members
        for inner in (member.items if member.kind == "list" else (member,))  # plus-minus
    ]
    return list({compact(member.text): member for member in members}.values())


def _without_membership(node: Node) -> Node:
    inside = node.kind == "relation" and node.marks == ("in",)
    return node.items[1] if inside and _is_variable(node.items[0]) else node


def _names(node: Node) -> set[str]:
    """Variables that the members of a list are the values of."""
    assignments = [_assigned(item) for item in node.items if item.kind == "relation"]
    return {compact(assignment[0]) for assignment in assignments if assignment}


def _is_region(node: Node) -> bool:
    if node.kind in _REGIONS or node.kind == "relation" and _INEQUALITIES & set(node.marks):
        return True
    if node.kind == "value":
        return compact(node.text) == REALS
    return node.kind == "list" and all(_is_region(item) for item in node.items)


def _is_variable(node: Node) -> bool:
    if node.kind == "tuple":
        return all(map(_is_variable, node.items))
    if len(node.text) > LONGEST_NAME:
        return False
    if node.text in _NUMERIC_NAMES or _DENIALS & set(words_of(node.text).lower().split()):
        return False
    return bool(_VARIABLE.fullmatch(node.text))


def _assigned(node: Node) -> tuple[str, Node] | None:
    """(variable, value) of `x = value`, `value = x` or a chain; None for another equation."""
    if set(node.marks) != {"="}:
        return None
    numbers = {read_number(item.text) for item in node.items} - {None}
    if len(numbers) > 1:  # it contradicts itself
        return None
    first, last = node.items[0], node.items[-1]
    if _is_variable(first) or len(node.items) > 2 and not _is_variable(last):
        return first.text, last
    return (last.text, first) if _is_variable(last) and len(node.items) == 2 else None


def _without_approximation(node: Node) -> Node:
    """Exact part of `a = b ~ c`; of `x ~ c` it is c."""
    if node.kind != "relation" or "~" not in node.marks:
        return node
    cut = node.marks.index("~") + 1
    items, marks = node.items[:cut], node.marks[: cut - 1]
    if len(items) == 1:
        return node.items[1] if _is_variable(items[0]) else items[0]
    return node._replace(items=items, marks=marks, text=" = ".join(i.text for i in items))


def decide(prediction: str, answer: str, algebra: Algebra) -> bool:
    """Equivalence of two extracted answers.

    Args:
        prediction: hostile text.
        answer: trusted text.

    Raises:
        Exception: whatever `algebra` raises.
    """
    if prediction == answer:
        return True
    if len(prediction) > LONGEST_COMPARED:
        mine, gold = read_integer(prediction.strip()), read_integer(answer.strip())
        return mine is not None and mine == gold
    mine, gold = prediction.strip(" $"), answer.strip(" $")
    if _DECIMAL.fullmatch(mine) and _DECIMAL.fullmatch(gold):  # most answers; nothing to normalise
        return read_number(mine) == read_number(gold)
    mine, gold = normalise(prediction), _read_gold(answer)
    if FORBIDDEN in mine or not mine or not gold.text or len(mine) > LONGEST_COMPARED:
        return False
    return _Comparison(algebra).same(read(mine), gold)


@functools.lru_cache(maxsize=4096)
def _read_gold(answer: str) -> Node:
    """Shape of a gold answer, kept since many responses are compared with it."""
    return read(normalise(answer))


def gold_answer(answer: str) -> str:
    """Answer inside a gold text: behind its box or marker, or the text itself."""
    return extract(answer).text or answer
