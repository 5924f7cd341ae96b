"""Environments that print, raise at their start or are interrupted; the ready second try."""

import dataclasses
import json
import os
import textwrap

import pytest
import tokenizers
from conftest import make_prompt
from gym_items import write_package
from row_files import read_table

from dapo_jax.config.experiment import Config, Environment, Reward
from dapo_jax.data.prompts.tokenizer import Tokenizer
from dapo_jax.extras.arithmetic import arithmetic_tokenizer
from dapo_jax.rewards.second_try import SecondTry
from dapo_jax.rollout.environments.registry import with_reward_settings
from dapo_jax.rollout.environments.sessions import Environments
from dapo_jax.types.errors import ConfigError
from dapo_jax.types.structs import Interrupted, Problem

TOKENIZER = arithmetic_tokenizer()
HOSTILE = textwrap.dedent(
    """
    import os, sys, time
    from dapo_jax import Observation

    class Hostile:
        def __init__(self, seed):
            self.seed, self.steps = seed, 0

        def reset(self, problem):
            if problem.answer == "raise":
                raise RuntimeError("no such problem")

        def step(self, text):
            self.steps += 1
            if text == "1":
                time.sleep(3600)
            if text == "3":
                print("x" * 10_000_000)
                sys.stderr.write("y" * 10_000_000)
                os.write(1, b"z" * 1_000_000)
                return Observation("9" * 10_000_000)
            if text == "a":
                return Observation("letters")
            return Observation(f"{self.steps}+{self.seed}", reward=self.steps)
    """
)


@pytest.fixture
def opened(tmp_path, monkeypatch):
    (tmp_path / "hostile_module.py").write_text(HOSTILE)
    monkeypatch.syspath_prepend(tmp_path)
    made = []

    def open_one(tokenizer=TOKENIZER, should_abort=lambda: False, verifier="math", **settings):
        settings = {"name": "hostile_module:Hostile", "workers": 1, "step_seconds": 1.0} | settings
        environment, reward = Environment(**settings), Reward(verifier=verifier)
        settings = with_reward_settings(Config(environment=environment, reward=reward))
        made.append(Environments(settings, tokenizer, chat=False, should_abort=should_abort))
        return made[-1]

    yield open_one
    for one in made:
        one.close()


def step(environments, said, seed=7, prompt=None, **changes):
    prompt = prompt or make_prompt(0, [3, 4])
    prompt, failed = dataclasses.replace(prompt, **changes), [""] * (len(said) - 1)
    (reply,) = environments.steps([environments.submit(prompt, seed, said, failed)])
    return reply


def test_a_reply_of_which_nothing_has_a_token_is_cut(opened):
    letters = {letter: number for number, letter in enumerate("_|0123456789+")}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(letters, []))  # leaves others out
    environments = opened(Tokenizer(backend, end_ids=(1,), pad_id=0))
    reply = step(environments, ["a"])
    assert (reply.tokens, reply.cut, reply.lost) == ([], True, False)
    assert step(environments, ["0"]).tokens == backend.encode("1+7").ids


def test_a_first_reset_that_raises_is_told_at_the_door_and_a_later_one_costs_nothing(opened):
    environments = opened()
    broken = Problem("p1", "1+1=", "raise", "arithmetic")
    with pytest.raises(ConfigError, match="config.environment.name: reset of p1: .*no such"):
        environments.open(broken)
    assert environments.open(Problem("p2", "1+1=", "2", "")).text == "1+1="
    assert environments.open(broken).text == "1+1="
    reply = step(environments, ["0"], answer="raise")
    assert "RuntimeError: no such problem" in reply.failure and reply.lost


@pytest.mark.parametrize(("name", "message"), read_table(__file__, "names"))
def test_a_name_that_is_no_environment_is_refused_at_the_door(opened, name, message):
    with pytest.raises(ConfigError, match=message):
        opened(name=name)


def test_who_waits_for_a_slow_step_can_be_interrupted(opened):
    environments = opened(should_abort=lambda: True, step_seconds=600.0)
    with pytest.raises(Interrupted):
        step(environments, ["1"])


def test_any_worker_takes_any_step_and_gives_the_same_reply(opened):
    one, several = opened(), opened(workers=3)
    said = []
    for _ in range(4):
        said.append("0")
        expected = [step(one, said, seed=seed, index=seed) for seed in range(5)]
        found = [step(several, said, seed=seed, index=seed) for seed in range(5)]
        assert found == expected
    assert json.dumps([list(reply) for reply in expected])
    assert expected[3].text == "4+3" and os.getpid()


# --- a second try --------------------------------------------------------------------------------

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


def replies(environments, prompt, *said):
    """Steps of a trajectory, turn by turn, as (text, reward, failure)."""
    found = [step(environments, said[: n + 1], prompt=prompt) for n in range(len(said))]
    assert all(bool(reply.tokens) == bool(reply.text) and not reply.late for reply in found)
    return [(reply.text, reply.reward, reply.failure) for reply in found]


WRONG, RIGHT, ENDED = (SecondTry.FEEDBACK, 0.0, ""), ("", 1.0, ""), ("", 0.0, "")


@pytest.mark.parametrize(
    ("verifier", "wrong", "right"),
    [("math", "1-0.5", "so \\boxed{\\frac{1}{2}}"), ("final_number", "4", "it is #### 4")],
)
def test_an_answer_is_wrong_where_the_reward_calls_it_so(verifier, wrong, right, opened):
    prompt = make_prompt(0, [3, 4], "0.5" if verifier == "math" else "4")
    environments = opened(name="second_try", verifier=verifier)
    assert replies(environments, prompt, wrong, right) == [WRONG, RIGHT]
    assert replies(environments, prompt, wrong, wrong) == [WRONG, ENDED]


def test_a_gym_task_is_asked_again_by_its_own_scorer(opened, tmp_path, monkeypatch):
    """In a process with the limits of reward workers, made ready before a step's time begins."""
    write_package(tmp_path, PACKAGE)
    monkeypatch.syspath_prepend(tmp_path)
    metadata = json.dumps({"answer": "seven"})
    prompt = make_prompt(0, [3, 4], "another")
    prompt = dataclasses.replace(prompt, source="gym:odd", metadata=metadata)
    environments = opened(name="second_try")
    for said in ("\\boxed{another}", "no marker\nat all"):
        assert replies(environments, prompt, said, "#### seven") == [WRONG, RIGHT]
