"""What counts beside the value: answers left unfinished, percent as asked.

`finished_answers.jsonl`: honest spellings of gold answers, by kind; `unfinished_answers.jsonl`:
problems restated as answers, by family, also judged by `attack_verifier.py`.
"""

import json
import pathlib
import time

import pytest

from dapo_jax.config.experiment import Reward
from dapo_jax.rewards.pool import RewardPool
from dapo_jax.verifier import is_equivalent
from dapo_jax.verifier.answer_conventions import as_percentage, is_unfinished

HERE = pathlib.Path(__file__).parent
UNFINISHED = [
    ("102^2-98^2", "800", "Compute $102^2-98^2$."),
    ("x^2-5x+6", "(x-2)(x-3)", "Factor $x^2 - 5x + 6$."),
    (r"\dfrac{6}{8}", r"\frac34", r"Simplify $\frac{6}{8}$."),
    ("120/5", "24", ""),
    ("2^{10}", "1024", ""),
    ("5!", "120", ""),
    (r"\sqrt{16}", "4", ""),
    (r"\binom{5}{2}", "10", ""),
    ("x = 2+2", "4", ""),
    ("2+2 = x", "4", ""),
    (r"102^2-98^2\text{ apples}", "800", ""),
    ("(2)(3)", "6", ""),
    (r"1\frac{14}{4}", "4.5", ""),
    (r"\frac64\text{ cm}", "1.5", ""),
    (r"\frac{1.5}{3}", "0.5", ""),
    ("(1+1,3)", "(2,3)", ""),
    (r"\frac{3}{20}", "0.15", r"Write $\frac{3}{20}$ as a decimal."),
    (r"\sqrt{3+2\sqrt2}", r"1+\sqrt2", r"Simplify $\sqrt{3+2\sqrt{2}}$."),
]
FINISHED = [
    ("1/2", "0.5", ""),
    ("x=4", "4", ""),
    ("x = 2+2 = 4", "4", ""),
    (r"3\frac12", "7/2", ""),
    ("3 1/2", "3.5", ""),
    (r"5\text{ cm}", "5", ""),
    (r"\$3.50", "3.5", ""),
    (r"1.5\times 10^3", "1500", ""),
    (r"\text{(B)}", "B", ""),
    ("2^{10}", "2^{10}", "What is $2^{10}$ in powers of two?"),
    ("3/4", r"\frac{3}{4}", "Is 2/3 or 3/4 larger?"),
    (r"x\ge 2", r"[2,\infty)", ""),
    ("3, 4", "4,3", "Which of 3, 4, 5 ...?"),
    ("(x-3)(x-2)", "(x-2)(x-3)", "Factor $x^2-5x+6$."),
    ("2\\pi", r"\pi\cdot 2", "The circumference?"),
    ("2+x", "x+2", "A formula that is cut off: $i.1-5{$"),
]


@pytest.mark.parametrize(("mine", "gold", "problem"), UNFINISHED)
def test_an_unfinished_answer_is_right_by_value_alone(mine, gold, problem):
    assert is_unfinished(mine, gold, problem)
    assert is_equivalent(rf"\boxed{{{mine}}}", gold)


@pytest.mark.parametrize(("mine", "gold", "problem"), FINISHED)
def test_what_is_worked_out_or_spelled_like_gold_is_finished(mine, gold, problem):
    assert not is_unfinished(mine, gold, problem)


def answers(file: str) -> list[tuple[str, str, str]]:
    rows = [json.loads(line) for line in (HERE / file).read_text().splitlines()]
    return [(mine, row["gold"], row["problem"]) for row in rows for mine in row["answers"]]


def test_honest_spellings_are_finished():
    spellings = answers("finished_answers.jsonl")
    assert len(spellings) > 800
    assert [case for case in spellings if is_unfinished(*case)] == []


def test_restated_problems_are_unfinished():
    attacks = answers("unfinished_answers.jsonl")
    assert len(attacks) > 700
    assert [case for case in attacks if not is_unfinished(*case)] == []


@pytest.mark.parametrize("gold", ["5", "x+1", r"\sqrt2", "(x-2)^2+y^2=9"])
def test_long_and_nested_answers_are_judged_in_no_time(gold):
    nested = [("(x+", "1", ")"), (r"\sqrt{x", "", "}"), ("x^{", "2", "}"), ("(x+y)(", "z", ")")]
    texts = [start * 39 + middle + end * 39 for start, middle, end in nested]
    texts += [
        "/".join("x" * 199),
        r"\sqrt" * 390 + "2",
        "999!^{999!^{999!}}",
        "|" * 200,
        "x<" * 300,
    ]
    texts += [",".join(rf"\sqrt{{{10**9 + i}}}" for i in range(100)), r"\sqrt[97]{9}" * 40]
    started = time.process_time()
    for text in texts:
        is_unfinished(text, gold, f"Simplify ${text[:380]}$.")
    assert time.process_time() - started < 3


def test_a_run_chooses_whether_unfinished_answers_are_right():
    for choice, right in (("wrong", False), ("right", True)):
        pool = RewardPool(Reward(verifier="math", unfinished=choice))
        verdict = pool.submit("Say: Compute 2^5.", r"\boxed{2^5}", "32").result()
        other = pool.submit("Say: Compute 2^5.", r"\boxed{32}", "32").result()
        pool.close()
        assert verdict.correct is right and other.correct
        assert (verdict.decided == "unfinished") is not right


def test_a_run_chooses_whether_percent_may_be_left_out_of_the_value():
    asked, text = "What percent of 50 is 10?", r"\boxed{20\%}"
    for choice, right in (("exact", False), ("as_asked", True)):
        pool = RewardPool(Reward(verifier="math", percent=choice))
        verdicts = [
            pool.submit(problem, text, gold).result().correct
            for gold, problem in (("20", asked), ("20", "10 of 50?"), ("0.2", asked), ("21", asked))
        ]
        pool.close()
        assert verdicts == [right, False, True, False]
    assert as_percentage("20", asked) is None
