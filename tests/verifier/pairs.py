"""Pairs of a response and a gold answer: own lists, attacks, near misses of published answers."""

import itertools
import json
import pathlib
import random
import re
from collections.abc import Iterator
from typing import NamedTuple

from dapo_jax.data.sources import read_problems
from dapo_jax.extras.math.problem import FORMULA

HERE = pathlib.Path(__file__).parent
CHANGES = ((r"\d", "3"), (r"\+", "-"), (r"\(", "["), (r"\)", "]"), (",", ";"), ("[a-z]$", "w"))


class Pair(NamedTuple):
    """A response, its gold answer and problem, the right verdict, and the pair's list and group."""

    response: str
    gold: str
    problem: str
    is_right: bool
    of: str
    group: str = ""
    unfinished: str = "right"  # the setting


def rows(name: str) -> list[dict]:
    return [json.loads(line) for line in (HERE / name).read_text().splitlines()]


def own_pairs() -> list[Pair]:
    """Return the pairs of the project's lists."""
    pairs = []
    for row in rows("verifier_cases.jsonl") + rows("verifier_readings.jsonl"):
        of, group = row.get("kind", "readings"), row.get("clause") or row["family"]
        pairs.append(Pair(row["prediction"], row["answer"], "", row["equivalent"], of, group))
    group = ""
    for line in (HERE / "causes.txt").read_text().splitlines():
        if line.startswith("== "):
            group = line[3:]
        elif line[0] in "+-":
            sign, answer, gold, *problem = line.replace("⏎", "\n").split(" ;; ")
            text = answer[4:] if answer.startswith("RAW:") else rf"\boxed{{{answer}}}"
            wanted = sign == "+", "causes", group, "wrong"
            pairs.append(Pair(text, gold.strip(), "".join(problem), *wanted))
    for name, is_right in (("finished", True), ("unfinished", False)):
        for row in rows(f"{name}_answers.jsonl"):
            wanted = is_right, name, row.get("family", row.get("kind")), "wrong"
            texts = (rf"\boxed{{{answer} }}" for answer in row["answers"])
            pairs += [Pair(text, row["gold"], row["problem"], *wanted) for text in texts]
    return pairs


def published_pairs(path: str, most: int = 700) -> list[Pair]:
    """Return answers of a problem file beside themselves, near misses, formulas and solutions."""
    pairs = []
    for problem in read_problems((path,), path, 10).problems[:most]:
        gold, of = problem.answer, pathlib.Path(path).stem
        pairs.append(Pair(rf"\boxed{{{gold}}}", gold, problem.text, True, of, "itself", "wrong"))
        others = {f"-{gold}", f"{gold}1", f"2{gold}", f"{gold}+1"}
        others |= {re.sub(old, new, gold, count=1) for old, new in CHANGES}
        others |= {max(pair) for pair in FORMULA.findall(problem.text)}
        for text in sorted(others - {gold, "-0"}):
            wanted = False, of, "near", "wrong"
            pairs.append(Pair(rf"\boxed{{{text}}}", gold, problem.text, *wanted))
    return pairs


def _attack_table(name: str) -> list[str]:
    """Return the lines of `attacks.txt` below that name."""
    text = (HERE / "attacks.txt").read_text()
    return text.split(f"== {name}\n")[1].split("\n== ")[0].strip().splitlines()


def _made_golds(count: int) -> dict[str, str]:
    """Return answers and their kinds: 'number' (a constant), 'formula' (with letters), 'other'."""
    rng, found = random.Random(0), {}
    for line in itertools.cycle(_attack_table("golds")):
        kind, _, shape = line.partition(" ")
        for name, most in {"A": (2, 90), "B": (91, 400), "C": (2, 9)}.items():
            shape = shape.replace(name, str(rng.randrange(*most)))
        found.setdefault(shape, kind)
        if len(found) == count:
            return found
    return found


def attacks(golds: int, every: int) -> Iterator[Pair]:
    """Yield every so many-th pair of an expression made to look equal, and a gold to which none is.

    An attack holds `GOLD` where the gold's text belongs.
    """
    lines = (line.split(" | ") for line in _attack_table("attacks"))
    texts = [(row, text) for row in lines for text in _attack_table(row[0])]
    pairs = itertools.product(texts, _made_golds(golds).items())
    for ((_, family, kinds, template), text), (gold, kind) in itertools.islice(
        pairs, 0, None, every
    ):
        if kind in kinds or not kinds.strip("-"):
            answer = template.replace("TEXT", text).replace("GOLD", gold)
            yield Pair(rf"\boxed{{{answer} }}", gold, "", False, "attacks", family)
