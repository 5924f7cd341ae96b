"""A second try after a wrong answer, by value and by the scorers of reasoning-gym's tasks."""

import dataclasses
import json

import pytest
from conftest import make_prompt
from gym_items import write_package

from dapo_jax.config.experiment import Environment, Reward
from dapo_jax.data.prompts.tokenizer import arithmetic_tokenizer
from dapo_jax.environments.builtin import SecondTry
from dapo_jax.environments.registry import with_reward_settings
from dapo_jax.environments.sessions import Environments

TOKENIZER = arithmetic_tokenizer()
# Its task takes longer to make ready than a step may take.
PACKAGE = """
import time

class Task:
    def score_answer(self, answer, entry):
        return 1.0 if answer == entry["answer"] else 0.5

class factory:
    DATASETS = {"odd": Task}

    def create_dataset(task):
        time.sleep(1.5)
        return Task()
"""


@pytest.fixture
def opened():
    made = []

    def open_one(verifier="math", **settings):
        settings = Environment(name="second_try", workers=1, **settings)
        settings = with_reward_settings(settings, Reward(verifier=verifier))
        made.append(Environments(settings, TOKENIZER, chat=False))
        return made[-1]

    yield open_one
    for one in made:
        one.close()


def replies(environments, prompt, *said):
    """Steps of a trajectory, turn by turn, as (text, reward, failure)."""
    found = []
    for turns in range(1, len(said) + 1):
        job = prompt, 7, said[:turns], [""] * (turns - 1)
        (step,) = environments.steps([environments.submit(*job)])
        assert bool(step.tokens) == bool(step.text) and not step.late
        found.append((step.text, step.reward, step.failure))
    return found


WRONG, RIGHT = (SecondTry.FEEDBACK, 0.0, ""), ("", 1.0, "")


@pytest.mark.parametrize(
    ("verifier", "wrong", "right"),
    [
        ("math", ["\\boxed{3}", "none", "1-0.5"], "so \\boxed{\\frac{1}{2}}"),
        ("final_number", ["#### 5", "4"], "it is #### 4"),
    ],
)
def test_an_answer_is_wrong_where_the_reward_calls_it_so(verifier, wrong, right, opened):
    prompt = make_prompt(0, [3, 4], "0.5" if verifier == "math" else "4")
    found = replies(opened(verifier), prompt, *wrong, right)
    assert found == [WRONG] * len(wrong) + [RIGHT]


def test_a_gym_task_is_asked_again_by_its_own_scorer(opened, tmp_path, monkeypatch):
    """In a process with the limits of reward workers, made ready before a step's time begins."""
    write_package(tmp_path, PACKAGE)
    monkeypatch.syspath_prepend(tmp_path)
    metadata = json.dumps({"answer": "seven"})
    prompt = make_prompt(0, [3, 4], "another")
    prompt = dataclasses.replace(prompt, source="gym:odd", metadata=metadata)
    said = ["\\boxed{another}", "no marker\nat all", "#### seven"]
    assert replies(opened(step_seconds=1.0), prompt, *said) == [WRONG, WRONG, RIGHT]
