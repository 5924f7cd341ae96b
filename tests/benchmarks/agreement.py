"""Compare the verdicts of the verifier and, if it is installed, of math-verify.

    python tests/benchmarks/agreement.py DATA/*.json* --pairs 150

Prints a row per list and judge, for as many pairs of a list that are equal and that are not: the
verifier's own lists with their problems, then published answers with themselves and near misses.
math-verify compares answers only: it is not asked about lists of unfinished ones.
"""

import importlib.util
import pathlib
import random
import sys
import time

import bench

from dapo_jax.extras.math.verifier import Settings, make_verifier

sys.path.append(str(pathlib.Path(__file__).parents[1] / "verifier"))
from pairs import Pair, own_pairs, published_pairs  # noqa: E402


def ours(pair: Pair) -> bool:
    """Judge in this process."""
    return make_verifier(Settings("math", unfinished=pair.unfinished))(*pair[:3]).correct


def math_verify(pair: Pair) -> bool:
    """Judge by math-verify as it comes, with 5 s for each of its stages."""
    from math_verify import parse, verify

    return verify(parse(f"${pair.gold}$"), parse(pair.response))


def main() -> None:
    options, files = bench.read_arguments(__doc__, others=True, pairs=150)
    judges = {"dapo_jax": ours}
    if importlib.util.find_spec("math_verify"):
        judges["math-verify"] = math_verify
    pairs = own_pairs() + [pair for path in files for pair in published_pairs(path)]
    bench.print_table(["list", "judge", "equal: accepted", "different: accepted", "per CPU second"])
    for name in dict.fromkeys(pair.of for pair in pairs if pair.of != "unfinished"):
        rng, drawn = random.Random(name), []
        for is_right in (True, False):
            found = [pair for pair in pairs if pair.of == name and pair.is_right is is_right]
            drawn.append(rng.sample(found, min(options.pairs, len(found))))
        for judge, accepts in judges.items():
            started = time.process_time()
            counts = [f"{sum(map(accepts, group))} of {len(group)}" for group in drawn]
            seconds = time.process_time() - started
            bench.print_row([name, judge, *counts, round(sum(map(len, drawn)) / seconds)])


if __name__ == "__main__":
    main()
