"""Switch off each rule of the verifier in turn and count the verdicts of its lists that change.

python tests/benchmarks/ablation.py --every 1
"""

import importlib
import json
import pathlib
from unittest import mock

import bench

from dapo_jax.extras.math.algebra_worker import RememberedAlgebra
from dapo_jax.extras.math.verifier import Settings, make_verifier

LISTS = pathlib.Path(__file__).parents[1] / "verifier"
HOME = "dapo_jax.extras.math."
ALGEBRA = HOME + "algebra_worker.TreeAlgebra."
MODES = ("right", "wrong")
CACHES = (
    "normalisation.normalise answer_shape.read equivalence._read_gold algebra_worker._compare "
    "answer_conventions._gold_parts answer_conventions._asked"
).split()
RULES = {  # what replaces each: a function's value
    "unfinished answers": (HOME + "verifier.is_unfinished", False),
    "- formulas of the problem": (HOME + "answer_conventions._is_left_as_asked", False),
    "- forms that the problem names": (HOME + "answer_conventions._has_other_form", False),
    "left sides that the problem asks for": (HOME + "verifier.asked_value", None),
    "intervals and inequalities": (ALGEBRA + "_same_region", False),
    "equations up to a factor": (ALGEBRA + "_same_equation", False),
    "- domains of equations": (HOME + "algebra_worker._domain", frozenset()),
    "functions by cases, piece by piece": (ALGEBRA + "_same_cases", False),
    "numbers in words": (HOME + "normalisation.number_in_words", None),
    "choices with a value": (HOME + "equivalence.choice_and_value", ("", "")),
    "ratios": (HOME + "equivalence._same_ratio", None),
    "more points at corners": (HOME + "sample_points.corners", ()),
    "exact polynomials, beside balls": (HOME + "algebra.same_rational", None),
}


def read_lists() -> list[tuple[str, str, str, str, bool]]:
    """Return (setting `unfinished`, response, gold, problem, whether it is right)."""
    cases = []
    for name in ("verifier_cases.jsonl", "verifier_readings.jsonl"):
        rows = map(json.loads, (LISTS / name).read_text().splitlines())
        cases += [("right", r["prediction"], r["answer"], "", r["equivalent"]) for r in rows]
    for line in (LISTS / "causes.txt").read_text().splitlines():
        if line[:2] in ("+ ", "- "):
            sign, text, gold, *problem = line.replace("⏎", "\n").split(" ;; ")
            text = text[4:] if text.startswith("RAW:") else rf"\boxed{{{text}}}"
            cases.append(("wrong", text, gold.strip(), "".join(problem), sign == "+"))
    for name in ("finished", "unfinished"):
        for row in map(json.loads, (LISTS / f"{name}_answers.jsonl").read_text().splitlines()):
            for text in row["answers"]:
                case = ("wrong", rf"\boxed{{{text} }}", row["gold"], row["problem"])
                cases.append((*case, name == "finished"))
    return cases


def count_wrong(cases: list[tuple[str, str, str, str, bool]]) -> tuple[int, int]:
    """Return how many wrong answers are accepted and how many right ones are rejected."""
    for name in CACHES:
        module, function = name.split(".")
        getattr(importlib.import_module(HOME + module), function).cache_clear()
    verifiers = {u: make_verifier(Settings("math", unfinished=u), RememberedAlgebra) for u in MODES}
    verdicts = [(verifiers[mode](*texts).correct, right) for mode, *texts, right in cases]
    return verdicts.count((True, False)), verdicts.count((False, True))


def main() -> None:
    cases = read_lists()[:: bench.read_arguments(__doc__, every=1).every]
    base = count_wrong(cases)
    bench.print_table([f"switched off ({len(cases)} pairs)", "wrong, accepted", "right, rejected"])
    for name, (target, value) in RULES.items():
        with mock.patch(target, lambda *_arguments, value=value, **_options: value):
            counts = count_wrong(cases)
        bench.print_row([name, *(f"{n - b:+}" for n, b in zip(counts, base, strict=True))])


if __name__ == "__main__":
    main()
