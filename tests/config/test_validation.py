"""Combinations of settings that make no sense, and settings that nothing reads."""

import copy
import dataclasses
import json
import operator
from typing import Any

import pytest
from command_lines import BASE, RL, load, refusal
from row_files import read_table

from dapo_jax import algorithms
from dapo_jax.config.algorithms import Algorithm
from dapo_jax.config.checks import OWN, TRAINING, parse_table, tables, validate
from dapo_jax.config.experiment import Config, ExportConfig
from dapo_jax.config.settings import (
    Section,
    allowed_values,
    check_settings,
    fields,
    from_dict,
    setting,
)
from dapo_jax.data.prompts.templates import TEMPLATES, open_template
from dapo_jax.extras.math.settings import MathSettings
from dapo_jax.extras.math.verifier import BY_VALUE
from dapo_jax.extras.serve.settings import ServeConfig
from dapo_jax.extras.sft.settings import DpoConfig, SftConfig
from dapo_jax.learner.advantages import ESTIMATORS
from dapo_jax.learner.losses import KL_ESTIMATORS, LOSS_WEIGHTS, RATIOS, TRAINED_RESPONSES
from dapo_jax.learner.update import SCHEDULES
from dapo_jax.model.load_huggingface import DTYPES
from dapo_jax.types.errors import ConfigError, present_name
from dapo_jax.types.rules import Choices, Count


# preset, or base: a supervised run | overrides | words of the message: field, value, allowed
@pytest.mark.parametrize(("preset", "overrides", "words"), read_table(__file__, "refused"))
def test_a_wrong_setting_or_combination_names_field_value_and_allowed(
    preset, overrides, words, capsys
):
    kind, file = (SftConfig, BASE) if preset == "base" else (Config, f"{RL}:{preset}")
    flags = [f"--config.{text}" for text in overrides.split()]
    message = refusal(kind, [file, *flags], capsys)
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


CHOICES = {
    "algorithm.advantage": ESTIMATORS,
    "algorithm.ratio": RATIOS,
    "algorithm.aggregate": LOSS_WEIGHTS,
    "algorithm.trained_responses": TRAINED_RESPONSES,
    "algorithm.kl_estimator": KL_ESTIMATORS,
    "optimizer.schedule": SCHEDULES,
    "critic.optimizer.schedule": SCHEDULES,
}


@pytest.mark.parametrize("name", CHOICES)
def test_the_choices_of_a_setting_are_the_keys_of_its_table(name):
    assert allowed_values(fields(Config)[name]) == tuple(CHOICES[name])


def test_conditions_name_what_lower_packages_define():
    silent = [name for name in TEMPLATES if not open_template(name).shows_system]
    assert f"data.template={'|'.join(silent)} -> data.system_prompt" in TRAINING
    assert f"reward.verifier!={'|'.join(BY_VALUE)} -> extras.math" in MathSettings.combinations
    assert set(allowed_values(fields(ExportConfig)["dtype"])) == {"auto", *DTYPES.values()}


@pytest.mark.parametrize("kind", [Config, SftConfig, DpoConfig, ServeConfig, ExportConfig])
def test_tables_of_combinations_name_settings_and_values_that_exist(kind):
    config, known = kind(), fields(kind)
    rows = [row for table, prefix in tables(config) for row in parse_table(table, prefix)]
    for term in [term for conditions, needs, _ in rows for term in [*conditions, *needs]]:
        value = operator.attrgetter(term.name)(config)
        values = {*term.values} - {"", OWN, *known}  # to compare with
        allowed = allowed_values(known[term.name]) if term.sign else None
        if isinstance(allowed, Choices):
            assert values <= {*allowed}, term
        elif values and not isinstance(value, str):
            assert values <= ({"true", "false"} if isinstance(value, bool) else {"-1", "0", "1"})


def test_a_users_function_may_read_any_setting_of_its_choice():
    algorithm = Algorithm(advantage="own:f", gamma=0.9, pass_k=8, dynamic_sampling=False)
    validate(Config(algorithm=algorithm))


@pytest.mark.parametrize("name", ["teacher.folder", "reward.judge.model", "sampler.port"])
def test_the_old_name_of_a_setting_of_an_extra_leads_to_the_new_one(name, capsys):
    hint = f"did you mean --config.{present_name(name)}?"
    assert hint in refusal(Config, [RL, f"--config.{name}=x"], capsys)
    tables: Any = "x"
    for part in reversed(name.split(".")):
        tables = {part: tables}
    with pytest.raises(ConfigError, match="it is now config.extras"):
        from_dict(Config, tables)
    with pytest.raises(AttributeError, match="it is now config.extras"):
        operator.attrgetter(name)(Config())


def test_a_table_with_a_setting_that_went_says_what_replaces_it():
    with pytest.raises(ConfigError, match="top_k: there is no such setting; 'jsd' compares whole"):
        from_dict(Config, {"algorithm": {"distillation_top_k": 8}})


def test_a_table_of_some_settings_of_a_section_keeps_the_others():
    config = from_dict(DpoConfig, {"optimizer": {"eps": 1e-6}, "data": {"fields": "prompt=x"}})
    assert (config.optimizer.schedule, config.data.passes) == ("linear", 1.0)


class Quoted(Section):
    number: "Count" = setting(1, "A setting whose annotation is a text.")


def test_quoted_annotations_limit_the_values_too():
    with pytest.raises(ConfigError, match="config.number = 0: must be above 0"):
        check_settings(Quoted(number=0))


def test_sections_of_extras_are_read_from_tables_and_equal_their_defaults():
    config = from_dict(Config, {"extras": {"judge": {"model": "m"}}})
    assert config.extras.judge.model == "m" and config != Config()
    again = from_dict(Config, json.loads(json.dumps(dataclasses.asdict(config))))
    assert again == config == copy.deepcopy(config)
    config.extras.judge.model = ""
    assert config == Config()
    with pytest.raises(ConfigError, match="Extras.jugde: .*did you mean judge"):
        config.extras.jugde = "m"
