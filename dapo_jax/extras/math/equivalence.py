"""Comparison of two answers: by shape first, then value by value.

Strings and exact numerals decide in time linear in short texts; the rest is asked of `Algebra`.
"""

import functools
import re
from fractions import Fraction
from typing import NamedTuple

from dapo_jax.data.extraction import extract
from dapo_jax.extras.math import conditions, names, numerals
from dapo_jax.extras.math.algebra import WORK, Algebra
from dapo_jax.extras.math.answer_shape import Node, read
from dapo_jax.extras.math.ball_arithmetic import enclose, with_bits
from dapo_jax.extras.math.expression_tree import Budget
from dapo_jax.extras.math.expressions import parse
from dapo_jax.extras.math.normalisation import FORBIDDEN, normalise
from dapo_jax.extras.math.problem import NO_PROBLEM, Problem
from dapo_jax.extras.math.units import split_unit

LONGEST_COMPARED, MAX_ITEMS = 2_000, 64  # characters; members of a set
ROUGH_BITS, ROUGH_WORK = 64, 100_000  # of a value that stands beside its decimals
MAX_REMEMBERED = 20_000
_INEQUALITIES = {"<", ">", "<=", ">=", "!="}
_REGIONS = {"union", "intersection", "difference"}
_DECIMAL = re.compile(r"-?\d{1,300}(?:\.\d{1,300})?", re.ASCII)
_CLOCK = re.compile(r"(\d{1,2}):([0-5]\d)", re.ASCII)
_POWER_OF_TEN = re.compile(r"[\d.]+e[-+]\d+", re.ASCII)  # or a multiple of e and a number
_ROUNDED = re.compile(r"-?\d{0,30}(?:\.(\d{1,30}))?(?<=\d)", re.ASCII)
_BASE = re.compile(r"\bbase|binary|octal|hexadecimal")
_E = re.compile(r"(?<![\\A-Za-z])e(?![A-Za-z])")
_PRODUCT = re.compile(r".*[\d)}] [A-Za-z]", re.DOTALL)  # or a measured value
_FUNCTION_OF = re.compile(r"([A-Za-z](?:\^\{-1\})?)\(([A-Za-z])\)")
_POINT = re.compile(r"(?:[A-Z]'?(?:_ ?\{?\w\}?)?|\\text\{[A-Za-z ]*\}) ?(\(.+\))", re.DOTALL)
# Without a problem, n, m, k and N are integers, save where gold oscillates with them.
_PERIODIC = re.compile(r"\\(?:pi|sin|cos|tan|cot|sec|csc)(?![A-Za-z])")
_TUPLE = re.compile(r"\(([A-Za-z](?:_\{?\d\}?)?(?: ?, ?[A-Za-z](?:_\{?\d\}?)?){1,7})\)")
LETTERS = "ABCDEFGHIJ"  # of choices
_CHOICE = re.compile(r"\(?([A-Za-z])[).:]?")
_CHOICE_AND_VALUE = re.compile(
    r"(?:\\text\{ ?(?:\(([A-J])\)|([A-J])[).:]) ?\}|([A-J])(?:\)|[.:] )"
    r"|\(([A-J])\) (?![-(\[])) ?(?![+*/^=<>!_])((?:(?!(?<![A-Za-z\\])[A-J](?![A-Za-z])).)+)"
)


class _Comparison:
    """Comparison of two answers. `compared`: equal parts, as deep as they were told apart."""

    def __init__(self, algebra: Algebra, problem: Problem):
        self._problem, self._algebra = problem, algebra
        self.texts = "", ""
        self.compared: list[tuple[Node, Node]] = []

    def whole(self, given: str, gold: Node) -> bool:
        """Test the equality of two whole answers."""
        self.texts, self.compared = (given, gold.text), []
        return self.same(read(given), gold)

    def _ask(self, kind: str, given: Node, gold: Node) -> bool:
        return self._noted(self._algebra.same(kind, given, gold), given, gold)

    def _noted(self, same: bool, given: Node, gold: Node) -> bool:
        if same:
            self.compared.append((given, gold))
        return same

    def same(self, given: Node, gold: Node) -> bool:
        if names.compact(given.text) == names.compact(gold.text):
            return True
        given, gold = _spread(given), _spread(gold)
        if _is_region(given) or _is_region(gold):
            return self._ask("region", given, gold)
        if "relation" in (given.kind, gold.kind):
            return self._same_relation(given, gold)
        if {given.kind, gold.kind} == {"list", "tuple"} and ("(", ")") in (given.marks, gold.marks):
            named = given if given.kind == "list" else gold
            if named.marks == ("or",) or len(_names(named)) != len(named.items):
                return False
            lists = (self._sorted(node) if node is named else node.items for node in (given, gold))
            return self._in_order(*lists)  # x = 1, y = 2 and (1, 2)
        if gold.kind == "tuple" and (point := _POINT.fullmatch(given.text)):  # B(2, 3)
            return self.same(read(point[1]), gold)
        if {"matrix", "determinant", "norm", "tuple"} & {given.kind, gold.kind}:
            alike = given.kind == gold.kind and given.marks == gold.marks
            return alike and self._in_order(given.items, gold.items)
        if given.kind == gold.kind == "value":
            return self._same_value(given.text, gold.text)
        named, wanted = _names(given), _names(gold)
        if len(named) != len(wanted) and max(len(named), len(wanted)) > 1:
            # m = 2, n = 3 is not 3, 2; nor is x = 2, 3 any of them
            return not (named and wanted) and self._in_order(given.items, gold.items)
        return self._same_members(given, gold)

    def _sorted(self, node: Node) -> tuple[Node, ...]:
        """Return assignments in the order of the problem's tuple of their variables, or of abc."""
        assigned = [(names.assigned(item), item) for item in node.items]
        pairs = {names.compact(pair[0]): item for pair, item in assigned if pair}
        for match in _TUPLE.finditer(self._problem.text):
            order = [names.compact(name) for name in match[1].split(",")]
            if set(order) == pairs.keys():
                return tuple(pairs[name] for name in order)
        return node.items if node.marks == ("=",) else tuple(pairs[name] for name in sorted(pairs))

    def _in_order(self, given: tuple[Node, ...], gold: tuple[Node, ...]) -> bool:
        return len(given) == len(gold) and all(map(self.same, given, gold))

    def _same_members(self, given: Node, gold: Node) -> bool:
        """Test the equality of members, as often as they are written unless gold is a set."""
        ours, theirs = _items(given), _items(gold)
        if max(len(ours), len(theirs)) > MAX_ITEMS:
            return False
        if gold.kind == "set":
            is_known = all(any(self._same_member(item, other) for other in theirs) for item in ours)
            return is_known and all(
                any(self._same_member(item, other) for item in ours) for other in theirs
            )
        for item in ours:
            match = next((other for other in theirs if self._same_member(item, other)), None)
            if match is None:
                return False
            theirs.remove(match)
        return not theirs

    def _same_member(self, given: Node, gold: Node) -> bool:
        return (given.kind == "set") == (gold.kind == "set") and self.same(given, gold)

    def _same_relation(self, given: Node, gold: Node) -> bool:
        if (exact := exact_part(given)) is None:
            return False
        given, gold = exact, exact_part(gold) or gold
        if given.kind == gold.kind == "relation":
            named, wanted = names.assigned(given), names.assigned(gold)
            if named and wanted:
                named = _with_variable_of(named, wanted)
                ours, theirs = names.compact(named[0]), names.compact(wanted[0])
                if ours == theirs or ours == "y" and _FUNCTION_OF.fullmatch(theirs):
                    return self.same(named[1], wanted[1])
            if wanted and _FUNCTION_OF.fullmatch(names.compact(wanted[0])):
                return False  # not solved for the function
            if len(given.items) == len(gold.items) == 2:
                return self._ask("equation", given, gold)
            return False
        if given.kind != "relation" and gold.kind != "relation":
            return self.same(given, gold)
        relation, other = (given, gold) if given.kind == "relation" else (gold, given)
        if (named := names.assigned(relation)) is None:
            first, *_, last = relation.items
            if not (first.kind == last.kind == "value" and self._same_value(first.text, last.text)):
                return False
            self.compared.pop()  # steps to the last member are no answer
            named = "", last
        return self.same(named[1], other) if given is relation else self.same(other, named[1])

    def _same_value(self, given: str, gold: str) -> bool:
        if numerals.read_digits(given) or numerals.read_digits(gold):
            return self._same_digits(given, gold)
        nodes = Node("value", given), Node("value", gold)
        if (same := self._same_literal(given, gold)) is not None:
            return self._noted(same, *nodes)
        if split_unit(given, self._problem)[1] or split_unit(gold, trusted=True)[1]:
            return self._same_measure(given, gold)
        if names.has_words(given) or names.has_words(gold):
            return names.same_words(names.words_of(given), names.words_of(gold))
        read_as = Node("value", _as_read(given, gold)), Node("value", _as_read(gold, ""))
        return self._noted(self._algebra.same("value", *read_as), *nodes)

    def _same_literal(self, given: str, gold: str) -> bool | None:
        """Compare numbers, ratios, codes and dates; None if that does not decide."""
        ours, theirs = numerals.read_literal(given), numerals.read_literal(gold)
        kinds = {ours and ours.kind, theirs and theirs.kind}
        if ours and theirs and "ratio" in kinds and kinds <= {"ratio", "number"}:
            is_fraction = "/" in given + gold or r"\frac" in given + gold
            is_free = (is_fraction or kinds == {"ratio"}) and not _CLOCK.fullmatch(gold)
            return ours == theirs or is_free and numerals.same_ratio(ours, theirs)
        return ours == theirs if len(kinds) == 1 and ours or "written" in kinds else None

    def _same_digits(self, given: str, gold: str) -> bool:
        """Compare numerals of which one names a base, as 52_8; the problem may name it too."""
        ours, theirs = numerals.read_digits(given), numerals.read_digits(gold)
        base = (theirs or ours or ("", 0))[1]
        is_asked = _BASE.search(self._problem.text) or theirs and not self._problem.text
        if base == 10 or is_asked:
            ours = ours or numerals.read_digits(f"{given}_{base}")
            theirs = theirs or numerals.read_digits(f"{gold}_{base}")
        return ours == theirs

    def _same_measure(self, given: str, gold: str) -> bool:
        """Compare values if at least one has a unit."""
        mine_value, mine_unit = split_unit(given, self._problem)
        gold_value, gold_unit = split_unit(gold, trusted=True)
        if not mine_unit:  # the gold answer says what may stand here
            mine_value, mine_unit = split_unit(given, trusted=True)
        if not mine_unit and _PRODUCT.fullmatch(gold):  # 2 m may be twice m
            return self._ask("value", Node("value", given), Node("value", gold))
        if split_unit(mine_value, self._problem)[1] or split_unit(gold_value)[1]:  # two of them
            return False
        units = {mine_unit, gold_unit}
        if units == {"dollar", "cent"}:
            ours, theirs = numerals.read_number(mine_value), numerals.read_number(gold_value)
            factor = Fraction(1, 100) if mine_unit == "cent" else 100
            return ours is not None and ours * factor == theirs
        if mine_unit and gold_unit not in ("", mine_unit, mine_unit[:6]):  # -7 C is -7 degrees
            return False
        if units == {"degree", ""} and r"\pi" in given + gold:
            return self._ask("value", Node("value", given), Node("value", gold))
        return self.same(read(mine_value), read(gold_value))


def exact_part(node: Node) -> Node | None:
    """Return a of `a ~ b`, or b if a is b rounded, or c of `x ~ c`; None if they are not near."""
    if node.kind != "relation" or "~" not in node.marks:
        return node
    cut = node.marks.index("~") + 1
    left = Node("relation", "=".join(i.text for i in node.items[:cut]), node.items[:cut], ("=",))
    exact = (names.assigned(left) or ("", node.items[0]))[1] if cut > 1 else node.items[0]
    if names.is_variable(exact):
        exact, cut = node.items[cut], cut + 1
    for item in node.items[cut:]:
        if _is_rounded(exact.text, item.text):
            continue
        if item is not node.items[-1] or not _is_rounded(item.text, exact.text):
            return None
        exact = item
    return exact


def _is_rounded(exact: str, decimal: str) -> bool:
    """Test for a decimal near a value that is not as short; three decimals may be cut off."""
    written, other = (_ROUNDED.fullmatch(split_unit(text)[0]) for text in (decimal, exact))
    if written is None or other and len(other[1] or "") <= len(written[1] or ""):
        return False
    try:
        with with_bits(ROUGH_BITS):
            value = complex(enclose(parse(exact), Budget(ROUGH_WORK)))
    except (ValueError, ArithmeticError, LookupError, TypeError):
        return False
    digits = len(written[1] or "")
    slack = 10.0**-digits * (1 if digits > 2 else 0.5)
    return abs(value - float(written[0])) <= slack * (1 + 1e-9)


def _as_read(text: str, other: str) -> str:
    """Return what reads as a numeral as that number: 1e3 is 1000, never 3 times e."""
    number = numerals.read_number(text)
    if number is None or _POWER_OF_TEN.fullmatch(text) and _E.search(other):  # 2e-3 beside 3+2e
        return text
    return rf"\frac{{{number.numerator}}}{{{number.denominator}}}"


def _with_variable_of(given: tuple[str, Node], gold: tuple[str, Node]) -> tuple[str, Node]:
    """Read f(t) = 2t as f(x) = 2x if gold has f(x): the letter is free to choose."""
    own, wanted = (_FUNCTION_OF.fullmatch(names.compact(name)) for name, _ in (given, gold))
    text = given[1].text
    if not (own and wanted and own[1] == wanted[1]) or wanted[2] in conditions.letters_of(text):
        return given
    return gold[0], read(conditions.rename(text, own[2], wanted[2]))


def _items(node: Node) -> list[Node]:
    """Return the members; those of a set once."""
    members = [
        inner
        for member in (node.items if node.kind in ("list", "set") else (node,))
        for inner in (member.items if member.kind == "list" and not _names(member) else (member,))
    ]
    if node.kind == "set":
        return list({names.compact(member.text): member for member in members}.values())
    return members


def _spread(node: Node) -> Node:
    """Return the set S of `x in S`, and x = 1, y = 2 for an equation of tuples, (x, y) = (1, 2)."""
    sides = node.items if node.marks in (("=",), ("in",)) else ()
    if not sides or not names.is_variable(sides[0]):
        return node
    if node.marks == ("in",):
        return sides[1]
    if {(side.kind, side.marks, len(side.items)) for side in sides} != {
        ("tuple", ("(", ")"), len(sides[0].items))
    }:
        return node
    pairs = list(zip(*(side.items for side in sides), strict=True))
    each = (Node("relation", f"{pair[0].text}={pair[1].text}", pair, ("=",)) for pair in pairs)
    return Node("list", node.text, tuple(each), ("=",))


def _names(node: Node) -> set[str]:
    """Return the variables that the members of a list are the values of."""
    assignments = [names.assigned(item) for item in node.items if item.kind == "relation"]
    return {names.compact(assignment[0]) for assignment in assignments if assignment}


def _is_region(node: Node) -> bool:
    if node.kind in _REGIONS or node.kind == "relation" and _INEQUALITIES & {*node.marks}:
        return True
    if node.kind == "value":
        return names.compact(node.text) == names.REALS
    inside = [item.marks == ("in",) for item in node.items]  # x in R, x != 3
    if node.kind != "list" or all(inside) and node.marks != ("or",):
        return False
    return all(is_in or _is_region(item) for is_in, item in zip(inside, node.items, strict=True))


class Decision(NamedTuple):
    """Equality of two answers, how it was decided, and the units of work that are left.

    `texts`: the normalised answers; `compared`: their parts that were found to be equal.
    """

    same: bool = False
    how: str = "direct"
    work: int = WORK
    texts: tuple[str, str] = ("", "")
    compared: tuple[tuple[Node, Node], ...] = ()


@functools.lru_cache(maxsize=MAX_REMEMBERED)
def decide(
    prediction: str,
    answer: str,
    problem: Problem = NO_PROBLEM,
    closes: bool = True,
    work: int = WORK,
) -> Decision:
    """Decide the equivalence of a hostile and a trusted answer; `closes` as in `Algebra`.

    Remembered for the same work left, so that no decision depends on earlier ones.
    """
    given, gold = prediction.strip(" $"), answer.strip(" $")
    if given == gold:
        return Decision(True, work=work)
    if len(prediction) > LONGEST_COMPARED:
        whole = numerals.read_integer(given)
        return Decision(whole is not None and whole == numerals.read_integer(gold), work=work)
    if _DECIMAL.fullmatch(given) and _DECIMAL.fullmatch(gold):  # most answers; nothing to normalise
        return Decision(numerals.read_number(given) == numerals.read_number(gold), work=work)
    given, node = normalise(prediction), read(normalise(answer))
    by_habit = frozenset() if problem.text or _PERIODIC.search(node.text) else frozenset("nmkN")
    budget = Budget(work)
    algebra = Algebra(budget, closes=closes, whole=problem.whole | by_habit)
    comparison = _Comparison(algebra, problem)
    same = _is_same(comparison, given, node, problem)
    how = "algebra" if same and algebra.how == "undecided" else algebra.how
    compared = tuple(comparison.compared) if same else ()
    return Decision(same, how, max(0, int(budget.left)), comparison.texts, compared)


def _is_same(comparison: _Comparison, given: str, gold: Node, problem: Problem) -> bool:
    """Test the equivalence of normalised answers."""
    if FORBIDDEN in given or not given or not gold.text or len(given) > LONGEST_COMPARED:
        return False
    choice = _CHOICE.fullmatch(gold.text)
    if choice and choice[1] in (problem.choices if problem.text else LETTERS):
        own = _CHOICE.fullmatch(given)
        if own or "=" in given and problem.text:  # x = c is no choice of C
            return own is not None and own[1].upper() == choice[1]
    if comparison.whole(given, gold) or _same_choice(comparison, given, gold):
        return True
    own = conditions.split_condition(conditions.without_label(given, problem))
    wanted = conditions.split_condition(gold.text)
    if (own.text, wanted.text) == (given, gold.text) or len({own.members, wanted.members, ""}) > 2:
        return False
    if own.relation != wanted.relation:
        if not all(conditions.is_harmless(each, problem) for each in (own, wanted)):
            return False
    return comparison.whole(conditions.with_letter_of(own, wanted), read(wanted.text))


def _same_choice(comparison: _Comparison, given: str, gold: Node) -> bool:
    """Compare by letter or value if an answer is a choice with its value, `C) 12`."""
    (ours, value), (theirs, wanted) = choice_and_value(given), choice_and_value(gold.text)
    if not (value and wanted):
        letter, other = (ours, gold.text) if value else (theirs, given)
        if choice := _CHOICE.fullmatch(other) if letter else None:
            return (choice[1] if value else choice[1].upper()) == letter
    elif ours != theirs:
        return False
    return bool(value or wanted) and comparison.whole(value or given, read(wanted or gold.text))


def choice_and_value(text: str) -> tuple[str, str]:
    """Return the letter and the value of a choice, `C) 12`; both empty for anything else."""
    match = _CHOICE_AND_VALUE.fullmatch(text)
    if match is None or (names.DENIALS | {"or", "and"}) & set(names.words_of(text).lower().split()):
        return "", ""
    *letters, value = match.groups()
    return next(filter(None, letters)), value


def gold_answer(answer: str) -> str:
    """Return the answer inside a gold text: behind its box or marker, or the text itself."""
    return extract(answer).text or answer
