"""Environments of gymnasium as text: actions, renders, formatters, seeds; what is rejected."""

import sys
import types

import pytest

from dapo_jax.environments.registry import open_factory
from dapo_jax.environments.worker import Request, Sessions
from dapo_jax.runtime.user_code import read_options
from dapo_jax.types.errors import ConfigError
from dapo_jax.types.structs import Problem

PROBLEM = Problem("p1", "1+1", "2", "test")


def test_a_missing_package_names_its_installation(monkeypatch):
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    with pytest.raises(ConfigError, match="needs gymnasium: pip install gymnasium"):
        open_factory("gymnasium:FrozenLake-v1")


def test_arguments_are_numbers_lists_or_text():
    options = read_options('desc=["SF","HG"]&size=04&wrap=true&mode=[a&slippery=false')
    expected = {"desc": ["SF", "HG"], "size": 4, "wrap": True, "mode": "[a", "slippery": False}
    assert options == expected


@pytest.fixture
def gymnasium():
    return pytest.importorskip("gymnasium")


def episode(name: str, turns, problem: Problem = PROBLEM):
    """Return the prompt and the replies of a worker to the turns of a trajectory."""
    sessions = Sessions(open_factory(name))
    prompt = sessions.answer(Request(problem)).prompt
    played = [turns[: i + 1] for i in range(len(turns))]
    replies = [sessions.answer(Request(problem, "s", 0, own)) for own in played]
    again = Sessions(open_factory(name)).answer(Request(problem, "s", 0, turns))
    assert again == replies[-1]  # another process repeats the steps
    return prompt, [reply.observation for reply in replies]


@pytest.mark.slow
def test_frozen_lake_is_walked_to_its_goal(gymnasium):
    turns = ["I go down: 1", "up!", "action 7", "1", "2", "2", "1", "2"]
    prompt, replies = episode("gymnasium:FrozenLake-v1?is_slippery=false", turns)
    assert prompt.startswith("Reply with an action, a number from 0 to 3.\n[S]FFF\nFHFH")
    assert replies[0].text == "(Down)\nSFFF\n[F]HFH\nFFFH\nHFFG" and not replies[0].done
    assert [bool(reply.failure) for reply in replies] == [False, True, True] + [False] * 5
    assert replies[1].text == replies[0].text
    assert replies[-1].done and replies[-1].reward == 1
    assert not any(reply.done or reply.reward for reply in replies[:-1])


@pytest.mark.slow
def test_a_formatter_writes_what_has_no_text(gymnasium, monkeypatch):
    module = types.ModuleType("formats")
    module.cards = lambda observation, info: f"{observation[0]}+{observation[1]}="
    monkeypatch.setitem(sys.modules, "formats", module)
    name = "gymnasium:Blackjack-v1?formatter=formats:cards"
    prompt, replies = episode(name, ["0"])
    assert prompt.endswith("=") and replies[0].done and replies[0].reward in (-1, 0, 1)
    others = {episode(name, ["0"], Problem(f"p{i}", "", "", ""))[0] for i in range(8)}
    assert len(others) > 1
    plain, _ = episode("gymnasium:Blackjack-v1", ["0"])
    assert plain.startswith("Reply with an action, a number from 0 to 1.\n(")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("gymnasium:NoLake-v1", "NameNotFound"),
        ("gymnasium:FrozenLake-v1?depth=3", "depth"),
        ("gymnasium:Pendulum-v1", "discrete"),
        ("gymnasium:Blackjack-v1?formatter=nowhere:f", "nowhere"),
    ],
)
def test_what_can_not_be_played_is_rejected(gymnasium, name, words):
    with pytest.raises(ConfigError, match=words):
        open_factory(name)
