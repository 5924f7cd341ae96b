"""Attacks golds of all kinds with expressions made to look equal to them, and reports by family.

    python tests/verifier/attack_verifier.py    (300 golds, all attacks: some minutes)
    python tests/verifier/attack_verifier.py --golds 30 --every 20

No attack is equal to its gold, so each that is accepted is a failure; so is a killed worker. An
attack holds `GOLD` where the gold's text belongs. Then problems are restated as answers
(`unfinished_answers.jsonl`): equal to gold, but accepted only where `is_unfinished` misses it.
Exit code 1 for failures.
"""

import argparse
import collections
import itertools
import json
import pathlib
import random
import statistics
import time
from collections.abc import Iterator

from dapo_jax.extras.math.algebra_process import WORKER, verify
from dapo_jax.extras.math.verifier import Question, Settings
from dapo_jax.runtime.workers.parent import RestartingWorker

SECONDS = 60.0  # of a verdict, after which its worker is killed
RESTATED = pathlib.Path(__file__).with_name("unfinished_answers.jsonl")


def _table(name: str) -> list[str]:
    """Return the lines of `attack_verifier.txt` below that name."""
    text = pathlib.Path(__file__).with_suffix(".txt").read_text()
    return text.split(f"== {name}\n")[1].split("\n== ")[0].strip().splitlines()


def golds(count: int, seed: int = 0) -> dict[str, str]:
    """Return answers and their kinds: 'number' (a constant), 'formula' (with letters), 'other'."""
    rng, found = random.Random(seed), {}
    for line in itertools.cycle(_table("golds")):
        kind, _, shape = line.partition(" ")
        a, b, c = rng.randrange(2, 90), rng.randrange(91, 400), rng.randrange(2, 9)
        text = shape.replace("A", str(a)).replace("B", str(b)).replace("C", str(c))
        found.setdefault(text, kind)
        if len(found) == count:
            break
    return found


def attacks() -> Iterator[tuple[str, str, str]]:
    """Yield (family, kind of golds it is for ('' for all), text)."""
    for line in _table("attacks"):
        table, family, kinds, template = line.split(" | ")
        for text in _table(table):
            yield family, kinds.strip("-"), template.replace("TEXT", text)


def judge(worker: RestartingWorker, answer: str, gold: str, problem: str | None) -> tuple:
    """Return the result for an answer, which has to be finished if there is a problem; seconds."""
    settings = Settings("math", unfinished="right" if problem is None else "wrong")
    question = Question(rf"\boxed{{{answer} }}", gold, problem or "")
    started = time.perf_counter()
    (result,) = verify(worker, settings, [question], SECONDS)
    if isinstance(result, Exception):
        raise result
    return result, time.perf_counter() - started


def questions(gold_count: int, every: int) -> Iterator[tuple[str, str, str, str | None]]:
    """Yield (family, answer, gold, problem) of attacks, then of restated problems."""
    pairs = itertools.product(attacks(), golds(gold_count).items())
    for (family, kinds, text), (gold, kind) in itertools.islice(pairs, 0, None, every):
        if not kinds or kind in kinds:
            yield family, text.replace("GOLD", gold), gold, None
    for row in map(json.loads, RESTATED.read_text().splitlines()):
        for answer in row["answers"]:
            yield f"restated: {row['family']}", answer, row["gold"], row["problem"]


def main() -> int:
    """Return the exit code: 1 if an attack was accepted or a worker killed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--golds", type=int, default=300)
    parser.add_argument("--every", type=int, default=1, help="only every so many-th pair")
    arguments = parser.parse_args()
    worker, families, accepted = RestartingWorker(WORKER), collections.defaultdict(list), []
    judge(worker, "x", "y", None)  # the process starts before the first attack is timed
    for family, *question in questions(arguments.golds, arguments.every):
        result, seconds = judge(worker, *question)
        families[family].append((result.correct, result.decided == "undecided", seconds))
        accepted += [(family, *question[:2])] if result.correct else []
    print("| family | attacks | accepted | undecided | median ms | worst ms |\n" + "|---" * 6 + "|")
    for family, rows in families.items():
        correct, undecided, seconds = zip(*rows, strict=True)
        times = f"{1e3 * statistics.median(seconds):.2f} | {1e3 * max(seconds):.0f}"
        print(f"| {family} | {len(rows)} | {sum(correct)} | {sum(undecided)} | {times} |")
    every = [row for rows in families.values() for row in rows]
    counts = {"attacks": len(every), "accepted": len(accepted), "killed": worker.kills}
    counts |= {"undecided": sum(row[1] for row in every), "golds": arguments.golds}
    print(json.dumps(counts))
    for family, response, gold in accepted[:40]:
        print(f"ACCEPTED {family}: {response} for {gold}")
    worker.close()
    return int(bool(accepted) or worker.kills > 0)


if __name__ == "__main__":
    raise SystemExit(main())
