"""Compare the verdicts of the verifier and, if it is installed, of math-verify.

    python tests/benchmarks/agreement.py data/*.json* --problems 300 --different 3

Prints a row per list and judge: the verifier's own cases, then for each problem file the gold
answers that equal themselves and other problems' gold answers that are accepted, which follow.
"""

import importlib.util
import json
import pathlib
import random
import time

import bench

from dapo_jax.data.sources import read_problems
from dapo_jax.extras.math.verifier import Settings, make_verifier

CASES = pathlib.Path(__file__).parents[1] / "verifier/verifier_cases.jsonl"
Pair = tuple[str, str, bool]  # response, gold answer, whether they are equivalent


def ours(response: str, gold: str) -> bool:
    """Judge in this process."""
    verifier = make_verifier(Settings("math"))
    return verifier(response, gold, "").correct


def math_verify(response: str, gold: str) -> bool:
    """Judge by math-verify as it comes, with 5 s for each of its stages."""
    from math_verify import parse, verify

    return verify(parse(f"${gold}$"), parse(response))


def pairs_of(path: str, problems: int, different: int) -> list[Pair]:
    """Return gold answers in a box, each with itself and with other problems' gold answers."""
    rng = random.Random(path)
    golds = [problem.answer for problem in read_problems((path,), path, 10).problems]
    golds = rng.sample(golds, min(problems, len(golds)))
    pairs = [(rf"\boxed{{{gold}}}", gold, True) for gold in golds]
    for gold in golds:
        drawn = rng.sample(golds, min(different, len(golds)))
        pairs += [(rf"\boxed{{{other}}}", gold, False) for other in drawn if other != gold]
    return pairs


def main() -> None:
    options, files = bench.read_arguments(__doc__, others=True, problems=300, different=3)
    judges = {"dapo_jax": ours}
    if importlib.util.find_spec("math_verify"):
        judges["math-verify"] = math_verify
    rows = [json.loads(line) for line in CASES.read_text().splitlines()]
    lists = {
        kind: [(r["prediction"], r["answer"], r["equivalent"]) for r in rows if r["kind"] == kind]
        for kind in ("core", "convention")
    }
    lists |= {path: pairs_of(path, options.problems, options.different) for path in files}
    bench.print_table(["list", "judge", "equal: accepted", "different: accepted", "per second"])
    accepted = []
    for name, pairs in lists.items():
        for judge_name, is_right in judges.items():
            started = time.perf_counter()
            verdicts = [is_right(response, gold) for response, gold, _ in pairs]
            seconds = time.perf_counter() - started
            right = [v for v, pair in zip(verdicts, pairs, strict=True) if pair[2]]
            wrong = [pair for v, pair in zip(verdicts, pairs, strict=True) if v and not pair[2]]
            counts = f"{sum(right)} of {len(right)}", f"{len(wrong)} of {len(pairs) - len(right)}"
            bench.print_row(
                [pathlib.Path(name).stem, judge_name, *counts, round(len(pairs) / seconds)]
            )
            accepted += [(judge_name, *pair[:2]) for pair in wrong]
    for row in accepted:
        print(*row)


if __name__ == "__main__":
    main()
