"""Loads files of problems and judges what must be right: their own gold answers.

    python tests/benchmarks/gold.py data/*.json*

Prints a row per file: problems, malformed rows, and how many gold answers equal themselves, their
boxed form, and what their reference solution ends in, where that says so by a marker.
"""

import sys

from dapo_jax.data.files import read_problems
from dapo_jax.verifier import is_equivalent
from dapo_jax.verifier.extraction import extract


def reference(solution: str) -> str | None:
    """The solution as a response; None where it marks no answer."""
    found = extract(solution)
    return solution if found.text is not None and found.how != "line" else None


def main() -> int:
    """The exit code: 1 where anything is not right."""
    print("| file | problems | malformed | itself | boxed | solution |\n|---|---|---|---|---|---|")
    failures = []
    for path in sys.argv[1:]:
        loaded = read_problems((path,), path, 10)
        tries = {"itself": [], "boxed": [], "solution": []}
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
        rates = " | ".join(f"{sum(t)} of {len(t)}" for t in tries.values())
        print(f"| {path} | {len(loaded.problems)} | {loaded.counts['malformed']} | {rates} |")
    for failure in failures:
        print(*failure)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
