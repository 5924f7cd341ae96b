"""The shipped policy of two strategies, and the examples that it was made of."""

import importlib

import pytest

import dapo_jax
from dapo_jax.config.experiment import Examples
from dapo_jax.data.arithmetic import make_worked_example
from dapo_jax.runtime.settings import ConfigError

base = importlib.import_module("configs.two_strategies_base")
task = importlib.import_module("configs.two_strategies")


def is_right(text: str, worked: str) -> bool:
    return sum(map(int, text[:-1].split("+"))) % 10 == int(worked[-1])


def test_the_second_stage_begins_with_the_first():
    first, second = base.get_config("0.9"), base.get_config()
    assert first.start == "" and second.start == first.out
    with pytest.raises(ConfigError, match=r"0\.95: must be above 0, at most 0\.9"):
        base.get_config("0.95")
    assert task.get_config().model.folder == "dapo_jax:two_strategies_base"


def share_again(examples) -> float:
    return sum("again" in worked for _, worked in examples) / len(examples)


def test_examples_that_work_are_right_and_those_at_once_add_two_operands():
    examples = base.get_config().examples
    made = [make_worked_example(0, i, examples) for i in range(4000)]
    at_once = [(text, worked) for text, worked in made if worked.startswith("####")]
    working = [(text, worked) for text, worked in made if not worked.startswith("####")]
    assert len(working) / len(made) == pytest.approx(0.05, abs=0.015)
    assert all(is_right(text, worked) for text, worked in working)
    assert share_again(working) == pytest.approx(0.2, abs=0.1)
    assert share_again(at_once) == pytest.approx(0.03, abs=0.015)
    for text, worked in at_once:
        assert int(worked[-1]) == sum(map(int, text[:-1].split("+")[:2])) % 10
    right = sum(is_right(text, worked) for text, worked in at_once if len(text) > 4)
    assert right < 0.2 * len(at_once)


def test_a_share_that_leaves_no_work_is_refused(tmp_path):
    config = dapo_jax.SftConfig(out=str(tmp_path / "base"), examples=Examples(direct_share=1.0))
    with pytest.raises(ConfigError, match=r"examples.direct_share = 1.0: must be .*below 1"):
        dapo_jax.sft(config)


def test_the_shipped_policy_seldom_works_and_is_then_right():
    policy = dapo_jax.Policy(
        "dapo_jax:two_strategies_base", max_prompt_tokens=16, max_response_tokens=64, slots=64
    )
    problems = ["3+7+5+1=", "9+8+7+6+5=", "4+2+0+3+9+1="]
    working = [
        (text, response.text)
        for text, responses in zip(problems, policy.sample(problems, samples=200), strict=True)
        for response in responses
        if not response.text.startswith("####")
    ]
    assert 0.02 < len(working) / 600 < 0.1
    whole = [(text, worked) for text, worked in working if "#### " in worked]
    assert len(whole) > 10
    assert sum(is_right(text, worked) for text, worked in whole) > 0.8 * len(whole)
