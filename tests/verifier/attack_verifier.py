"""Attacks golds of all kinds with expressions made to look equal to them, and reports by family.

    python tests/verifier/attack_verifier.py    (300 golds, all attacks: some minutes)
    python tests/verifier/attack_verifier.py --golds 30 --every 20

No attack is equal to its gold, so each that is accepted is a failure; so is a killed worker. An
attack holds `GOLD` where the gold's text belongs. Then problems are restated as answers
(`unfinished_answers.jsonl`): equal to gold, but accepted only where `is_unfinished` misses it.
Exit code 1 for failures.
"""

import argparse
import itertools
import json
import pathlib
import random
import statistics
import time
from collections.abc import Iterator
from typing import NamedTuple

from dapo_jax.extras.math.algebra_process import WORKER, verify
from dapo_jax.extras.math.verifier import Question, Settings
from dapo_jax.runtime.workers.parent import RestartingWorker

SECONDS = 60.0  # of a verdict, after which its worker is killed
RESTATED = pathlib.Path(__file__).with_name("unfinished_answers.jsonl")


class Gold(NamedTuple):
    """An answer. kind: 'number' (a real constant), 'formula' (with a variable), or 'other'."""

    text: str
    kind: str


def golds(count: int, seed: int = 0) -> list[Gold]:
    """Answers of all kinds, as many of each, none twice."""
    rng = random.Random(seed)
    shapes = [
        (kind, shape)
        for kind, found in {
            "number": r"A|-A|\frac{A}{B}|A.B|A\sqrt{B}|\frac{A\pi}{B}|A+\sqrt{B}|\sqrt[3]{B}|A\%|"
            r"10^{A}|\ln B|e^{A}|A^\circ|\log_2 B|\frac{A-\sqrt{B}}{C}|A!|\binom{B}{2}|2^{B}|\$A|"
            r"A\text{ cm}|\sin A|\arctan\frac{A}{B}|\sqrt{A+\sqrt{B}}|A\pi+B",
            "formula": r"x^2+Ax+B|Ax-B|\frac{A}{x+B}|A\sqrt{x}+B|\frac{n(n+A)}{B}|2^n+A|A\sin x+B|"
            r"e^{Ax}|(x+A)(x-B)|A-x|x^2-B|\lfloor\frac{n}{A}\rfloor|\frac{x-A}{x^2+B}|a^2+Ab",
            "other": r"(A,B)|\{A,B\}|[A,\infty)|(-\infty,A)\cup(B,\infty)|x=A|y=Ax+B|x\ge A|"
            r"\begin{pmatrix}A\\B\end{pmatrix}|\text{Monday A}|A\pm\sqrt{B}|A+Bi|x^2+y^2=A",
        }.items()
        for shape in found.split("|")
    ]
    seen: dict[str, Gold] = {}
    for kind, shape in itertools.cycle(shapes):
        a, b, c = rng.randrange(2, 90), rng.randrange(91, 400), rng.randrange(2, 9)
        text = shape.replace("A", str(a)).replace("B", str(b)).replace("C", str(c))
        seen.setdefault(text, Gold(text, kind))
        if len(seen) == count:
            return list(seen.values())
    raise AssertionError


def _table(name: str) -> list[str]:
    """The expressions of `attack_verifier.txt` below that name."""
    text = pathlib.Path(__file__).with_suffix(".txt").read_text()
    return text.split(f"== {name}\n")[1].split("\n== ")[0].strip().splitlines()


def attacks() -> Iterator[tuple[str, str, str]]:
    """(family, kind of golds it is for ('' for all), text)."""
    for tiny in _table("tiny"):
        yield "a tiny number", "", tiny
        yield "gold and a tiny number", "number formula", rf"GOLD+({tiny})"
        yield "gold times nearly 1", "number formula", rf"(GOLD)(1+({tiny}))"
    for zero in _table("zeros"):
        yield "zero over zero", "", rf"\frac{{{zero}}}{{{zero}}}"
        yield "gold over a hidden zero", "", rf"GOLD+\frac{{0}}{{{zero}}}"
        yield "hidden zeros around gold", "number formula", rf"\frac{{({zero})(GOLD)}}{{{zero}}}"
        yield "a power of a hidden zero", "", rf"({zero})^{{-1}}"
    for step in _table("steps"):
        if "T" not in step:
            yield "a floor", "number formula", rf"GOLD+({step})"
    for corner in _table("corners"):
        yield "a corner", "number formula", rf"GOLD+({corner})"
        yield "a corner alone", "", corner
    for vanishing in _table("vanishing"):
        yield "zero at many points", "number formula", rf"GOLD+({vanishing})"
    for expensive in _table("expensive"):
        yield "expensive", "", expensive
        yield "expensive beside gold", "number formula", rf"GOLD+({expensive})"
    for text in _table("candidates"):
        yield "candidates", "", text
    yield "candidates", "number formula", "GOLD GOLD"
    for text in _table("notations"):  # each is gold only in a reading that it does not have
        yield "notations", "number formula", text


class _Tally:
    """A row per family, and (family, response, gold) of all that was accepted."""

    def __init__(self, worker: RestartingWorker):
        self.rows: dict[str, dict] = {}
        self.accepted: list[tuple[str, str, str]] = []
        self._worker = worker

    def judge(self, family: str, answer: str, gold: str, problem: str | None = None) -> None:
        """Counts an answer; with its problem, it also has to be finished to be accepted."""
        empty = {"attacks": 0, "accepted": 0, "undecided": 0, "seconds": []}
        row = self.rows.setdefault(family, empty)
        unfinished = "right" if problem is None else "wrong"
        response, started = rf"\boxed{{{answer} }}", time.perf_counter()
        settings = Settings("math", unfinished=unfinished)
        question = Question(response, gold, problem or "")
        (result,) = verify(self._worker, settings, [question], SECONDS)
        if isinstance(result, Exception):
            raise result
        row["seconds"].append(time.perf_counter() - started)
        row["undecided"] += result.decided == "undecided"
        row["attacks"] += 1
        row["accepted"] += result.correct
        if result.correct:
            self.accepted.append((family, answer, gold))


def run(gold_count: int, every: int, worker: RestartingWorker) -> tuple[list[dict], list[tuple]]:
    """Rows and accepted attacks of a `_Tally`."""
    tally = _Tally(worker)
    pairs = itertools.product(attacks(), golds(gold_count))
    for number, ((family, kinds, text), gold) in enumerate(pairs):
        if number % every == 0 and (not kinds or gold.kind in kinds):
            tally.judge(family, text.replace("GOLD", gold.text), gold.text)
    for line in RESTATED.read_text().splitlines():
        row = json.loads(line)
        for answer in row["answers"]:
            tally.judge(f"restated: {row['family']}", answer, row["gold"], row["problem"])
    return [{"family": family} | row for family, row in tally.rows.items()], tally.accepted


def main() -> int:
    """The exit code: 1 where an attack was accepted or a worker killed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--golds", type=int, default=300)
    parser.add_argument("--every", type=int, default=1, help="only every so many-th pair")
    arguments = parser.parse_args()
    worker = RestartingWorker(WORKER)
    # The process starts before the first attack is timed.
    verify(worker, Settings("math"), [Question("x", "y")], SECONDS)
    rows, accepted = run(arguments.golds, arguments.every, worker)
    names = "attacks accepted undecided".split()
    print("| family | " + " | ".join(names) + " | median ms | worst ms |\n" + "|---" * 6 + "|")
    for row in rows:
        counts = " | ".join(str(row[name]) for name in names)
        median, worst = statistics.median(row["seconds"]), max(row["seconds"])
        print(f"| {row['family']} | {counts} | {1e3 * median:.2f} | {1e3 * worst:.0f} |")
    total = {name: sum(row[name] for row in rows) for name in names}
    print(json.dumps(total | {"golds": arguments.golds, "killed": worker.kills}))
    for family, response, gold in accepted[:40]:
        print(f"ACCEPTED {family}: {response} for {gold}")
    worker.close()
    return int(bool(accepted) or worker.kills > 0)


if __name__ == "__main__":
    raise SystemExit(main())
