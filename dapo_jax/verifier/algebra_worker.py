"""Worker process of the verifier: verdicts, with the `Algebra` of `equivalence.py` by proof.

`python -m dapo_jax.verifier.algebra_worker` serves one JSON line per batch of `Question`s.
"""

import collections
import functools
import hashlib
import time
from collections.abc import Callable
from typing import NamedTuple

from dapo_jax.contracts import Verifier
from dapo_jax.runtime.workers.child import limit_process, serve
from dapo_jax.verifier.algebra import proportional, same_expression
from dapo_jax.verifier.answer_shape import Node, read
from dapo_jax.verifier.equivalence import compact
from dapo_jax.verifier.expression_tree import (
    Budget,
    Refused,
    Tree,
    Undecided,
    add,
    conditions,
    negate,
    symbols,
)
from dapo_jax.verifier.expressions import parse
from dapo_jax.verifier.number_field import NumberField
from dapo_jax.verifier.real_sets import FLIPPED, RealSets
from dapo_jax.verifier.roots import content_of
from dapo_jax.verifier.tree_to_element import read as read_tree
from dapo_jax.verifier.verifier import BATCH_SECONDS, Question, Settings, make_verifier

WORK = 400_000  # units of a verdict; a unit is about a microsecond
MAX_REMEMBERED = 100_000
BATCH_CHARACTERS = 50_000  # of answers; JSON takes up to 12 bytes for one, of 1 MiB for a reply


class ProvenAlgebra:
    """`Algebra` that parses and proves, within a budget. Raises `Undecided`."""

    def __init__(self, budget: Budget):
        self._budget = budget

    def same(self, kind: str, prediction: str, answer: str) -> bool:
        return getattr(self, f"_same_{kind}")(prediction, answer)

    def _same_value(self, prediction: str, answer: str) -> bool:
        try:
            gold = parse(answer)
            return same_expression(parse(prediction, symbols(gold)), gold, self._budget)
        except Refused:
            return False

    def _same_equation(self, prediction: str, answer: str) -> bool:
        mine, gold = read(prediction), read(answer)
        try:
            return self._proportional(mine, gold) != 0
        except Refused:
            return False

    def _same_region(self, prediction: str, answer: str) -> bool:
        mine, gold = read(prediction), read(answer)
        try:
            if len(_variables(mine) | _variables(gold)) <= 1:
                regions = RealSets(NumberField(self._budget))
                return regions.same(regions.read(mine), regions.read(gold))
        except Refused:
            pass  # then only a factor may differ
        return self._same_inequality(mine, gold)

    def _proportional(self, mine: Node, gold: Node) -> int:
        ours, theirs = _difference(*mine.items), _difference(*gold.items)
        sign = proportional(ours, theirs, self._budget)
        field = NumberField(self._budget)
        return sign if sign and _domain(field, ours) == _domain(field, theirs) else 0

    def _same_inequality(self, mine: Node, gold: Node) -> bool:
        """Test the equality, up to a factor, of two relations in several variables."""
        if not (mine.kind == gold.kind == "relation" and len(mine.marks) == len(gold.marks) == 1):
            return False
        if mine.marks[0] not in FLIPPED or gold.marks[0] not in FLIPPED:
            return False
        try:
            sign = self._proportional(mine, gold)
        except Refused:
            return False
        wanted = gold.marks[0] if sign > 0 else FLIPPED[gold.marks[0]]
        return sign != 0 and mine.marks[0] == wanted


def _difference(left: Node, right: Node) -> Tree:
    return add([parse(left.text), negate(parse(right.text))])


def _domain(field: NumberField, tree: Tree) -> set[tuple[str, str]]:
    """Return the conditions of an equation's expressions on its variables, in normal form."""
    asked = set()
    for mark, inside in conditions(tree):
        element = read_tree(field, inside)
        for poly in element if mark == "!=" else ():
            field.budget.spend(50 * len(poly) + int(poly.total_degree()) ** 2)
            asked |= {(mark, str(factor)) for factor, _ in poly.factor()[1]}
        if mark != "!=":
            asked.add((mark, str(field.scale(element, 1 / content_of(element.above)))))
    return asked


def _variables(node: Node) -> set[str]:
    if node.kind == "relation":
        if node.marks == ("in",):
            return {compact(node.items[0].text)} | _variables(node.items[1])
        return set().union(*(symbols(parse(item.text)) for item in node.items))
    return set().union(*(_variables(item) for item in node.items))


class Proof(NamedTuple):
    """Reply to one question of a verdict, and the units of work that it took."""

    same: bool
    work: int
    undecided: bool = False


Memory = collections.OrderedDict[bytes, Proof]  # the oldest are forgotten


class RememberedAlgebra:
    """`Algebra` of one verdict, which has work to spend over all its questions.

    A remembered proof costs what it cost before, so that verdicts don't depend on what was asked
    earlier.

    Attributes:
        asked, remembered, undecided: counts of proofs, of questions that the memory answered, and
            of those that were neither proven equal nor different.
    """

    def __init__(self, memory: Memory):
        self._memory, self._work = memory, WORK
        self.asked = self.remembered = self.undecided = 0

    def same(self, kind: str, prediction: str, answer: str) -> bool:
        texts = repr((kind, prediction, answer)).encode("utf-8", "backslashreplace")
        key = hashlib.blake2b(texts, digest_size=16).digest()
        proof = self._memory.get(key)
        if proof is not None and proof.work <= self._work:
            self.remembered += 1
        else:
            proof = _prove(kind, prediction, answer, self._work)
            self.asked += 1
            if not proof.undecided or self._work == WORK:  # more work may decide it
                self._memory[key] = proof
                if len(self._memory) > MAX_REMEMBERED:
                    self._memory.popitem(last=False)
        self._work -= proof.work
        self.undecided += proof.undecided
        return proof.same

    def describe(self, correct: bool) -> str:
        """Return how the verdict was decided."""
        if self.undecided and not correct:
            return "undecided"
        if self.asked:
            return "algebra"
        return "remembered" if self.remembered else "direct"


def _prove(kind: str, prediction: str, answer: str, work: int) -> Proof:
    budget, same, undecided = Budget(work), False, False
    try:
        same = ProvenAlgebra(budget).same(kind, prediction, answer)
    except Undecided:
        undecided = True
    except Exception:  # not understood is not equal, whatever the reason
        same = False
    return Proof(same, work - max(0, int(budget.left)), undecided)


def _verify(verifier: Verifier, question: Question) -> tuple | str:
    try:
        return verifier(*question)
    except Exception as error:
        return repr(error)[:200]


def make_answer() -> Callable[[dict], dict]:
    """Return the function that answers `{"settings", "questions"}` with `{"replies"}`.

    The replies are to the first questions, at least to one of them. A reply has the fields of a
    `VerifierResult`, or is the text of an error.
    """
    limit_process()
    memory = Memory()

    @functools.cache
    def find(settings: Settings) -> Verifier:
        return make_verifier(settings, lambda: RememberedAlgebra(memory))

    def answer(job: dict) -> dict:
        verifier = find(Settings(*job["settings"]))
        until, replies, characters = time.monotonic() + BATCH_SECONDS, [], 0
        for fields in job["questions"]:
            reply = _verify(verifier, Question(*fields))
            replies.append(reply)
            characters += sum(len(part) for part in reply if isinstance(part, str))
            if time.monotonic() > until or characters > BATCH_CHARACTERS:
                break
        return {"replies": replies}

    return answer


if __name__ == "__main__":
    serve(make_answer)
