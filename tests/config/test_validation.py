"""Combinations of settings that make no sense, preset by preset, as a command line gives them."""

import dataclasses

import pytest
from command_lines import BASE, RL, load
from row_files import read_table

from dapo_jax import algorithms
from dapo_jax.config.experiment import Config, ExportConfig, SftConfig
from dapo_jax.data.prompts.templates import TEMPLATES, open_template
from dapo_jax.learner.advantages import ESTIMATORS
from dapo_jax.learner.losses import KL_ESTIMATORS, LOSS_WEIGHTS, RATIOS, TRAINED_RESPONSES
from dapo_jax.learner.update import SCHEDULES
from dapo_jax.model.load_huggingface import DTYPES
from dapo_jax.runtime.settings import rules
from dapo_jax.verifier.verifier import BY_VALUE, VERIFIERS

# preset | overrides below `config.` | what the message has to name: field, value, what is allowed
REFUSED = read_table(__file__, "refused")


@pytest.mark.parametrize(("preset", "overrides", "words"), REFUSED)
def test_a_senseless_combination_names_field_value_and_allowed(preset, overrides, words, capsys):
    arguments = [f"--config.{override}" for override in overrides.split()]
    with pytest.raises(SystemExit) as stopped:
        load(Config, f"{RL}:{preset}", *arguments)
    message = capsys.readouterr().err
    assert stopped.value.code == 2 and len(message.splitlines()) == 1
    field, allowed = message.split("must be", 1)
    name, value, *rest = words.split()
    assert field.endswith(f"{name} = {value}: "), message
    assert all(word in allowed for word in rest), message


@pytest.mark.parametrize("preset", sorted(set(algorithms.PRESETS) - {"sft"}))
def test_every_preset_of_rewards_is_a_valid_run(preset):
    config = load(Config, f"{RL}:{preset}")
    alpha = 1.0 if preset == "vapo" else 0.05
    assert config.algorithm == dataclasses.replace(algorithms.preset(preset), lambda_alpha=alpha)
    on_policy = config.algorithm.ratio == "none" and config.algorithm.kl_to == "reference"
    assert config.rollout.updates_per_rollout == (1 if on_policy else 4)


@pytest.mark.parametrize(("preset", "overrides"), read_table(__file__, "allowed"))
def test_the_other_side_of_a_refusal_is_allowed(preset, overrides):
    load(Config, f"{RL}:{preset}", *(f"--config.{text}" for text in overrides.split()))


def test_a_supervised_run_is_refused_what_it_can_not_use(capsys):
    for override, words in read_table(__file__, "supervised"):
        with pytest.raises(SystemExit):
            load(SftConfig, BASE, f"--config.{override}")
        message = capsys.readouterr().err
        assert all(word in message for word in words), message


CHOICES = {
    "algorithm.advantage": ESTIMATORS,
    "algorithm.ratio": RATIOS,
    "algorithm.aggregate": LOSS_WEIGHTS,
    "algorithm.trained_responses": TRAINED_RESPONSES,
    "algorithm.kl_estimator": KL_ESTIMATORS,
    "optimizer.schedule": SCHEDULES,
    "critic.optimizer.schedule": SCHEDULES,
    "reward.verifier": VERIFIERS,
}


@pytest.mark.parametrize("name", CHOICES)
def test_the_choices_of_a_setting_are_the_keys_of_its_table(name):
    assert rules(Config)[name].allowed == tuple(CHOICES[name])


def test_conditions_name_what_lower_packages_define():
    asked = rules(Config)
    by_value = {
        name for name in VERIFIERS if asked["reward.percent"].read({"reward.verifier": name})
    }
    assert by_value == set(BY_VALUE)
    shows = asked["data.system_prompt"].read
    assert {name for name in TEMPLATES if shows({"data.template": name})} == {
        name for name in TEMPLATES if open_template(name).shows_system
    }
    assert set(rules(ExportConfig)["dtype"].allowed) == {"auto", *DTYPES.values()}
