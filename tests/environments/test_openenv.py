"""OpenEnv's environments, unchanged. Slow: the package is installed by hand.

An environment comes from OpenEnv's repository, as a package: `pip install openenv textarena nltk`
and its folder envs/textarena_env on PYTHONPATH as textarena_env.
"""

import importlib.util

import pytest

from dapo_jax.rollout.environments.registry import open_factory
from dapo_jax.runtime.user_code import read_options
from dapo_jax.types.errors import ConfigError
from dapo_jax.types.structs import Problem

GAME = (
    "openenv:textarena_env.server.environment:TextArenaEnvironment"
    "?env_id=GuessTheNumber-v0&download_nltk=false"
)


@pytest.mark.skipif(importlib.util.find_spec("openenv") is not None, reason="it is installed")
def test_a_missing_package_is_told_with_its_extra():
    with pytest.raises(ConfigError, match=r"openenv:a:B.*pip install 'openenv'"):
        open_factory("openenv:a:B")


def test_arguments_are_numbers_lists_or_text():
    options = read_options('desc=["SF","HG"]&size=04&wrap=true&mode=[a&slippery=false')
    expected = {"desc": ["SF", "HG"], "size": 4, "wrap": True, "mode": "[a", "slippery": False}
    assert options == expected


def search(environment):
    """Plays the game by halving; turns that were observed."""
    low, high, shown = 1, 20, []
    while not shown or not shown[-1].done:
        guess = (low + high) // 2
        shown.append(environment.step(f"I say [{guess}]"))
        if "higher" in shown[-1].text:
            low = guess + 1
        else:
            high = guess - 1
    return shown


@pytest.mark.slow
def test_a_published_game_is_played_turn_by_turn():
    pytest.importorskip("openenv")
    pytest.importorskip("textarena_env")
    make, lengths = open_factory(GAME), set()
    for number in range(8):
        environment, again = make(), make()
        problem = Problem(str(number), "Play.", "", "")
        prompt = environment.reset(problem)
        assert "between 1 and 20" in prompt and again.reset(problem) == prompt
        shown = search(environment)
        assert search(again) == shown
        assert [one.reward for one in shown] == [0.0] * (len(shown) - 1) + [1.0]
        assert all("between 1 and 20" not in one.text for one in shown)
        lengths.add(len(shown))
    assert len(lengths) > 1
    environment = make()
    environment.reset(Problem("0", "Play.", "", ""))
    wrong = environment.step("no number")
    assert not wrong.done and "invalid" in wrong.text
