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


def answers(file: str, family: str = "") -> list[tuple[str, str, str]]:
    rows = [json.loads(line) for line in (HERE / file).read_text().splitlines()]
    rows = [row for row in rows if not family or row["family"] == family]
    return [(mine, row["gold"], row["problem"]) for row in rows for mine in row["answers"]]


def test_an_unfinished_answer_is_right_by_value_alone():
    undone = answers("unfinished_answers.jsonl", "a computation left undone")
    assert len(undone) == 18
    assert all(is_equivalent(rf"\boxed{{{mine}}}", gold) for mine, gold, _ in undone)


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
