"""Functions of the user in place of an advantage, ratio, region, weight, KL or aggregate."""

import pathlib
import re

import jax.numpy as jnp
import numpy as np
import pytest
from command_lines import RL, load
from row_files import read_table
from small_runs import make_quick_config

from dapo_jax.config.algorithm import OWN_FUNCTIONS
from dapo_jax.config.algorithms import Algorithm
from dapo_jax.config.experiment import Config
from dapo_jax.learner.advantages import estimate, gather_feedback
from dapo_jax.learner.losses import policy_loss
from dapo_jax.run.identity import run_settings
from dapo_jax.types.errors import ConfigError

PAGE = pathlib.Path(__file__).parents[2] / "docs/own_algorithm.md"
INDEX = np.array([[[0, 0, 1, 1, 1, 2, -1, -1]]])


def make_feedback(rewards=(1.0, 0.0, 5.0)):
    groups, correct = np.zeros(3, int), np.array([True, False, True])
    return gather_feedback(INDEX, np.array(rewards), groups=groups, correct=correct)


@pytest.fixture
def mine(write_module):
    """The module of the page."""
    write_module("mine", re.search(r"```python\n(# mine\.py.*?)```", PAGE.read_text(), re.S)[1])
    import mine

    return mine


def test_the_page_shows_an_advantage_and_a_region(mine):
    algorithm = Algorithm(advantage="mine:median_centre", region=mine.wide_region)
    assert algorithm.region == "mine:wide_region"
    found = estimate(algorithm, make_feedback()).advantages
    assert found.tolist() == [[[0, 0, -1, -1, -1, 4, 0, 0]]]
    old, ones = jnp.log(jnp.array([[0.5, 0.9]])), jnp.ones((1, 2))
    new = old + jnp.log(1.35)
    _, info = policy_loss(algorithm, new, old, ones, ones, ones.astype(int))
    assert info["clipped_high"].tolist() == [[0.0, 1.0]]  # 1 + 0.28 * 1.5 and 1 + 0.28 * 1.1


def test_a_changed_function_has_another_name_and_an_equal_one_the_same():
    def make(factor):
        return lambda logprobs, reference: factor * (logprobs - reference)

    algorithm = Algorithm(kl_estimator=make(1.0))
    first = algorithm.kl_estimator
    algorithm.kl_estimator = make(1.0)
    assert algorithm.kl_estimator == first
    algorithm.kl_estimator = make(2.0)
    assert algorithm.kl_estimator != first


@pytest.mark.parametrize("field", OWN_FUNCTIONS)
@pytest.mark.parametrize(("name", "words"), read_table(__file__, "wrong names"))
def test_a_function_that_can_not_be_called_is_named_before_the_run(
    field, name, words, write_module, capsys
):
    write_module("mine", "def takes_nothing(): ...")
    with pytest.raises(SystemExit):
        load(Config, f"{RL}:grpo", f"--config.algorithm.{field}={name}")
    message = capsys.readouterr().err
    assert f"config.algorithm.{field} = {name!r}: " in message and words in message
    assert len(message.splitlines()) == 1


@pytest.mark.parametrize("result", [0.5, [1.0, 2.0], np.zeros((1, 1, 7))])
def test_an_advantage_of_another_shape_is_an_error(result):
    algorithm = Algorithm(advantage=lambda algorithm, feedback: result)
    with pytest.raises(ConfigError, match=r"algorithm.advantage = .*returns \(1, 1, 8\) or \(3,\)"):
        estimate(algorithm, make_feedback())


def test_the_code_of_an_own_function_is_kept_with_the_run(mine, tiny_folder, tmp_path):
    from dapo_jax.run.identity import gather_inputs

    config = make_quick_config(tiny_folder, tmp_path)
    config.algorithm.region = mine.wide_region
    assert run_settings(config)["algorithm.region"] == "mine:wide_region"
    prompts = type("Prompts", (), {"digests": {}})()
    assert [*gather_inputs(config, prompts)["code"]] == ["mine:wide_region"]
