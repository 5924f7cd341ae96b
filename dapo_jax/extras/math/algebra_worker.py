"""Worker process of the verifier: verdicts, with the `Algebra` of `equivalence.py` by trees.

`python -m dapo_jax.extras.math.algebra_worker` serves one JSON line per batch of `Question`s.
"""

import functools
import itertools
import time
from collections.abc import Callable
from typing import NamedTuple

from dapo_jax.extras.math import expression_tree as trees
from dapo_jax.extras.math.algebra import proportional, same_expression
from dapo_jax.extras.math.answer_shape import Node, read
from dapo_jax.extras.math.equivalence import is_by_cases
from dapo_jax.extras.math.expression_tree import Budget, Refused, Tree, Undecided, symbols
from dapo_jax.extras.math.expressions import parse
from dapo_jax.extras.math.polynomials import NotRational, RationalFunctions
from dapo_jax.extras.math.real_sets import EVERYTHING, RealSets, Region
from dapo_jax.extras.math.sympy_stage import OPERATORS, closed_form
from dapo_jax.extras.math.verifier import BATCH_SECONDS, LOAD, Question, Settings, make_verifier
from dapo_jax.runtime.workers.child import limit_process, serve
from dapo_jax.types.contracts import Verifier

WORK = 400_000  # units of a verdict; a unit is about a microsecond
MAX_REMEMBERED = 20_000
BATCH_CHARACTERS = 50_000  # of answers; JSON takes up to 12 bytes for one, of 1 MiB for a reply


class TreeAlgebra:
    """`Algebra` that parses and compares trees, within a budget.

    Args:
        closes: a prediction's sums and integrals may be worked out; else only if gold has some,
            since they are unfinished beside any other gold.
        whole: variables that stand for integers.

    Raises:
        Undecided: neither equal nor different.
    """

    def __init__(self, budget: Budget, *, closes: bool = True, whole: frozenset[str] = frozenset()):
        self._budget, self._regions, self._closes = budget, RealSets(budget), closes
        self._whole = whole

    def same(self, kind: str, prediction: str, answer: str) -> bool:
        return getattr(self, f"_same_{kind}")(prediction, answer)

    def _same_value(self, prediction: str, answer: str) -> bool:
        try:
            gold = parse(answer)
            mine = parse(prediction, symbols(gold))
            try:
                return same_expression(mine, gold, self._budget, whole=self._whole)
            except (Refused, Undecided):
                inside = [
                    node for tree in (gold, *[mine] * self._closes) for node in trees.nodes(tree)
                ]
                if not any(node.kind in OPERATORS for node in inside):
                    raise
            mine, gold = closed_form(mine, self._budget), closed_form(gold, self._budget)
            return same_expression(mine, gold, self._budget, whole=self._whole)
        except Refused:
            return False

    def _same_cases(self, prediction: str, answer: str) -> bool:
        ours, theirs = self._branches(read(prediction)), self._branches(read(answer))
        names = set().union(*(symbols(value) for _, value in ours + theirs))
        regions = self._regions
        covered = [regions.combine(any, *(region for region, _ in side)) for side in (ours, theirs)]
        if len(names) > 1 or not regions.same(*covered):
            return False
        for (region, mine), (other, gold) in itertools.product(ours, theirs):
            shared = regions.combine(all, region, other)
            cells = [cell for cell, is_member in enumerate(shared.cells) if is_member]
            values = [value for cell in cells for value in regions.inside(shared, cell, 2)]
            points = [dict.fromkeys(names, value) for value in values]
            if points and not same_expression(mine, gold, self._budget, points):
                return False
        return True

    def _branches(self, node: Node) -> list[tuple[Region, Tree]]:
        """Return the regions of a function by cases, each without earlier ones, and its values."""
        if not is_by_cases(node):
            return [(EVERYTHING, parse(node.text))]
        branches, left = [], EVERYTHING
        for value, condition in (row.items for row in node.items):
            region = left
            if condition.text != "otherwise":
                region = self._regions.combine(all, left, self._regions.read(condition))
            branches.append((region, parse(value.text)))
            left = self._regions.without(left, region)
        return branches

    def _same_equation(self, prediction: str, answer: str) -> bool:
        mine, gold = read(prediction), read(answer)
        try:
            return self._proportional(mine, gold) != 0
        except Refused:
            return False

    def _same_region(self, prediction: str, answer: str) -> bool:
        mine, gold = read(prediction), read(answer)
        try:
            return self._regions.same(self._regions.read(mine), self._regions.read(gold))
        except Refused:
            return False

    def _proportional(self, mine: Node, gold: Node) -> int:
        ours, theirs = _difference(*mine.items), _difference(*gold.items)
        sign = proportional(ours, theirs, self._budget, self._whole)
        field = RationalFunctions(self._budget)
        domains = [_domain(field, tree) for tree in (ours, theirs) if sign]
        return sign if sign and domains[0] == domains[1] else 0


def _difference(left: Node, right: Node) -> Tree:
    return trees.add([parse(left.text), trees.negate(parse(right.text))])


def _domain(field: RationalFunctions, tree: Tree) -> set[tuple[str, str]]:
    """Return the conditions of an equation's expressions on its variables, in normal form."""
    asked = set()
    for mark, inside in trees.conditions(tree):
        try:
            asked |= {(mark, factor) for factor in field.factors(inside)}
        except NotRational:
            asked.add((mark, repr(inside)))
    return asked


class Reply(NamedTuple):
    """Reply to one question of a verdict, and the units of work that it took."""

    same: bool
    work: int
    undecided: bool = False


@functools.lru_cache(maxsize=MAX_REMEMBERED)
def _compare(
    kind: str, prediction: str, answer: str, whole: frozenset[str], closes: bool, work: int
) -> Reply:
    budget, same, undecided = Budget(work), False, False
    try:
        algebra = TreeAlgebra(budget, closes=closes, whole=whole)
        same = algebra.same(kind, prediction, answer)
    except Undecided:
        undecided = True
    except Exception:  # not understood is not equal, whatever the reason
        same = False
    return Reply(same, work - max(0, int(budget.left)), undecided)


class RememberedAlgebra:
    """`Algebra` of one verdict; its questions share a budget of work.

    Replies are remembered for the same work left, so that verdicts don't depend on earlier ones.

    Attributes:
        asked, remembered, undecided: counts of comparisons, of questions that the memory answered,
            and of those that were neither equal nor different.
    """

    def __init__(self, *, closes: bool = True):
        self._work, self._closes = WORK, closes
        self.asked = self.remembered = self.undecided = 0

    def same(
        self, kind: str, prediction: str, answer: str, whole: frozenset[str] = frozenset()
    ) -> bool:
        hits = _compare.cache_info().hits
        reply = _compare(kind, prediction, answer, whole, self._closes, self._work)
        is_hit = _compare.cache_info().hits > hits
        self.remembered += is_hit
        self.asked += not is_hit
        self.undecided += reply.undecided
        self._work -= reply.work
        return reply.same

    def describe(self, correct: bool) -> str:
        """Return how the verdict was decided."""
        if self.undecided and not correct:
            return "undecided"
        if self.asked:
            return "algebra"
        return "remembered" if self.remembered else "direct"


def _verify(verifier: Verifier, question: Question) -> tuple | str:
    try:
        return verifier(*question)
    except Exception as error:
        return repr(error)[:200]


def make_answer() -> Callable[[dict], dict]:
    """Return the function that answers `{"settings", "questions"}` with `{"replies"}`.

    The replies are to the first questions, at least to one of them. A reply has the fields of a
    `VerifierResult` or is the text of an error. `LOAD` imports sympy.
    """
    limit_process()

    @functools.cache
    def find(settings: Settings) -> Verifier:
        closes = settings.unfinished != "wrong"
        return make_verifier(settings, functools.partial(RememberedAlgebra, closes=closes))

    def answer(job: dict) -> dict:
        if job == LOAD:
            budget = Budget(WORK)
            for text in (r"\int_0^1 x^2 dx", r"\sum_{k=1}^{\infty} k^{-2}"):
                closed_form(parse(text), budget)
            return {}
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
