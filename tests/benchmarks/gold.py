"""Check that the gold answers of problem files equal themselves.

    python tests/benchmarks/gold.py data/*.json*

Prints a row per file: problems; malformed rows; gold answers that equal themselves, their boxed
form, and the marked answer of their reference solution. Then every answer that does not.
"""

import sys

import bench

from dapo_jax.data.sources import read_problems
from dapo_jax.extras.math import is_equivalent
from dapo_jax.extras.math.extraction import extract
from dapo_jax.types.structs import Problem

SHAPES = ("itself", "boxed", "solution")


def responses(problem: Problem) -> dict[str, str]:
    """Return the responses that have to be correct; the solution only if it marks its answer."""
    shapes = {"itself": problem.answer, "boxed": rf"\boxed{{{problem.answer}}}"}
    marked = extract(problem.solution)
    if marked.text is not None and marked.how != "line":
        shapes["solution"] = problem.solution
    return shapes


def main() -> int:
    """Return the exit code: 1 if any answer is not correct."""
    bench.print_table(["file", "problems", "malformed", *SHAPES])
    failures = []
    for path in sys.argv[1:]:
        loaded = read_problems((path,), path, 10)
        right = {shape: [] for shape in SHAPES}
        for problem in loaded.problems:
            for shape, text in responses(problem).items():
                right[shape].append(is_equivalent(text, problem.answer))
                if not right[shape][-1]:
                    failures.append((path, problem.id, shape, problem.answer))
        rates = [f"{sum(verdicts)} of {len(verdicts)}" for verdicts in right.values()]
        bench.print_row([path, len(loaded.problems), loaded.counts["malformed"], *rates])
    for failure in failures:
        print(*failure)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
