"""Check that the gold answers of problem files equal themselves.

    python tests/benchmarks/gold.py data/*.json*

Prints a row per file: problems; malformed rows; gold answers that equal themselves, their boxed
form, and the marked answer of their reference solution; correct answers that
reward.unfinished=wrong rejects; problems that a box around their longest formula answers, by value
and if unfinished answers are wrong.
"""

import re
import sys

import bench

from dapo_jax.data.sources import read_problems
from dapo_jax.structs import Problem
from dapo_jax.verifier import is_equivalent
from dapo_jax.verifier.answer_conventions import is_unfinished
from dapo_jax.verifier.extraction import extract


def reference(solution: str) -> str | None:
    """Return the solution as a response; None if it marks no answer."""
    answer = extract(solution)
    return solution if answer.text is not None and answer.how != "line" else None


def echoes(problems: list[Problem]) -> tuple[int, int]:
    """Count the problems that their longest formula answers: by value, and finished."""
    right = finished = 0
    for problem in problems:
        formula = max(re.findall(r"\$+([^$]+)\$", problem.text), key=len, default="")
        if formula and is_equivalent(rf"\boxed{{{formula}}}", problem.answer):
            right += 1
            finished += not is_unfinished(formula, problem.answer, problem.text)
    return right, finished


def main() -> int:
    """Return the exit code: 1 if any answer is not correct."""
    bench.print_table(
        "file problems malformed itself boxed solution unfinished echo finished".split()
    )
    failures = []
    for path in sys.argv[1:]:
        loaded = read_problems((path,), path, 10)
        tries = {"itself": [], "boxed": [], "solution": []}
        unfinished = 0
        for problem in loaded.problems:
            shapes = {
                "itself": problem.answer,
                "boxed": rf"\boxed{{{problem.answer}}}",
                "solution": reference(problem.solution),
            }
            for shape, text in shapes.items():
                if text is None:
                    continue
                tries[shape].append(is_equivalent(text, problem.answer))
                if not tries[shape][-1]:
                    failures.append((path, problem.id, shape, problem.answer))
                elif is_unfinished(extract(text).text or text, problem.answer, problem.text):
                    unfinished += 1
                    failures.append((path, problem.id, f"{shape} unfinished", problem.answer))
        rates = [f"{sum(t)} of {len(t)}" for t in tries.values()]
        row = [path, len(loaded.problems), loaded.counts["malformed"], *rates, unfinished]
        bench.print_row([*row, *echoes(loaded.problems)])
    for failure in failures:
        print(*failure)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
