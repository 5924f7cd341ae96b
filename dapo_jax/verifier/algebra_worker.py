"""Worker process of the verifier: verdicts, with the `Algebra` of `equivalence.py` by proof.

`python -m dapo_jax.verifier.algebra_worker` serves one JSON line per batch of `Question`s.
"""

import collections
import hashlib
import time
from collections.abc import Callable
from typing import NamedTuple

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
from dapo_jax.verifier.polynomials import NotRational, RationalFunctions
from dapo_jax.verifier.real_sets import FLIPPED, RealSets
from dapo_jax.verifier.verifier import BATCH_SECONDS, Question, judge

WORK = 400_000  # units of a verdict; a unit is about a microsecond
MAX_REMEMBERED = 100_000


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
                regions = RealSets(self._budget)
                return regions.same(regions.read(mine), regions.read(gold))
        except Refused:
            pass  # then only a factor may differ
        return self._same_inequality(mine, gold)

    def _proportional(self, mine: Node, gold: Node) -> int:
        ours, theirs = _difference(*mine.items), _difference(*gold.items)
        sign = proportional(ours, theirs, self._budget)
        domains = [_domain(tree, self._budget) for tree in (ours, theirs) if sign]
        return sign if sign and domains[0] == domains[1] else 0

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


def _domain(tree: Tree, budget: Budget) -> set[tuple[str, str]]:
    """Return the conditions of an equation's expressions on its variables, in normal form."""
    asked = set()
    for mark, inside in conditions(tree):
        try:
            field = RationalFunctions((tree,), budget)
            asked |= {(mark, factor) for factor in field.factors(inside)}
        except NotRational:
            asked.add((mark, repr(inside)))
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


def _answer(question: Question, memory: Memory) -> dict:
    algebra = RememberedAlgebra(memory)
    try:
        ruling = judge(question, algebra)
    except Exception as error:
        return {"failure": repr(error)[:200]}
    if ruling.extracted is not None and ruling.how != "unfinished":
        ruling = ruling._replace(how=algebra.describe(ruling.correct))
    return ruling._asdict()


def make_verifier() -> Callable[[dict], dict]:
    """Return the function that answers `{"questions"}` with `{"replies"}` to the first of them.

    A reply is a `Ruling` or a `"failure"`; there is at least one.
    """
    limit_process()
    memory = Memory()

    def answer(job: dict) -> dict:
        until, replies = time.monotonic() + BATCH_SECONDS, []
        for fields in job["questions"]:
            replies.append(_answer(Question(**fields), memory))
            if time.monotonic() > until:
                break
        return {"replies": replies}

    return answer


if __name__ == "__main__":
    serve(make_verifier)
