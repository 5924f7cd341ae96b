"""Time the verifier, and math-verify if it is installed, on the same responses.

    python tests/benchmarks/verifier.py --responses 8192 --characters 24000 --workers 2

'dapo-like' responses end in an `Answer:` line with an integer, 'math-like' ones in a box with a
MATH-style answer, correct or wrong by one. Ours caches repeated answers, about one in ten.
"""

import concurrent.futures
import importlib.util
import json
import random
import time

import bench
import scored

from dapo_jax.config.experiment import Reward
from dapo_jax.rewards.pool import RewardPool

WORDS = "so we let the sum of all terms be equal to x and then divide both sides by two".split()
SHAPES = (
    (r"\frac{{{a}}}{{{b}}}", r"\dfrac{{{a}}}{{{b}}}"),
    (r"{a}\sqrt{{{b}}}", r"\sqrt{{{b}}} \cdot {a}"),
    (r"\left({a}, {b}\right)", r"({a},{b})"),
    (r"[{a},\infty)", r"x \ge {a}"),
    (r"x^2+{a}x+{b}", r"{b}+x({a}+x)"),
    (r"\frac{{\pi}}{{{a}}}", r"\pi/{a}"),
    (r"{a}", r"{a}.0"),
    (r"{a},{b}", r"{b}, {a}"),
    (r"{a}^\circ", r"{a}"),
    (r"(-\infty,{a})\cup({b},\infty)", r"(-\infty, {a}) \cup ({b}, \infty)"),
)


def filler(rng: random.Random, characters: int) -> str:
    words = rng.choices(WORDS, k=characters // 4)
    return " ".join(words)[:characters] + "\n"


def dapo_like(rng: random.Random, characters: int) -> tuple[str, str]:
    answer = rng.randrange(100_000)
    given = answer + (rng.random() >= 0.5)
    return filler(rng, characters) + f"Answer: ${given}$", str(answer)


def math_like(rng: random.Random, characters: int) -> tuple[str, str]:
    gold, same = rng.choice(SHAPES)
    a = rng.randrange(2, 2_000)
    b = a + rng.randrange(1, 40)
    found = b + (rng.random() < 0.5)
    text = same.format(a=a, b=found) if "b}" in same else same.format(a=a + found - b)
    return filler(rng, characters) + rf"\boxed{{{text}}}.", gold.format(a=a, b=b)


def ours(pairs: list[tuple[str, str]], workers: int) -> int:
    """Judge the answers in a new pool; return the number of correct ones."""
    pool = RewardPool(Reward(verifier="math", workers=workers))
    scored.ask(pool, [("1", "1")])  # a process's start is no verdict's time
    right = sum(verdict.correct for verdict in scored.ask(pool, pairs))
    pool.close()
    return right


def _judge(pair: tuple[str, str]) -> bool:
    from math_verify import parse, verify

    text, answer = pair
    gold = parse(f"${answer}$", parsing_timeout=None)
    return verify(gold, parse(text, parsing_timeout=None), timeout_seconds=None)


def math_verify(pairs: list[tuple[str, str]], workers: int) -> int:
    """Do the same by math-verify with as many processes."""
    with concurrent.futures.ProcessPoolExecutor(workers) as pool:
        return sum(pool.map(_judge, pairs, chunksize=64))


def main() -> None:
    options = bench.read_arguments(__doc__, responses=8192, characters=24_000, workers=2, rounds=3)
    judges = {"dapo_jax": ours}
    if importlib.util.find_spec("math_verify"):
        judges["math-verify"] = math_verify
    for kind, make in (("dapo-like", dapo_like), ("math-like", math_like)):
        rng = random.Random(kind)
        pairs = [make(rng, options.characters) for _ in range(options.responses)]
        for _ in range(options.rounds):  # interleaved: a shared machine's speed drifts
            for name, judge in judges.items():
                started = time.perf_counter()
                right = judge(pairs, options.workers)
                seconds = round(time.perf_counter() - started, 2)
                line = {"kind": kind, "judge": name, "seconds": seconds, "right": right}
                print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
