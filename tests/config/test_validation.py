"""Combinations of settings that make no sense, and settings that nothing would read."""

import contextlib
import dataclasses
import functools
import itertools

import pytest
from command_lines import BASE, RL, load
from row_files import read_table

from dapo_jax import algorithms
from dapo_jax.algorithms import Algorithm
from dapo_jax.config.experiment import Config, ExportConfig, Optimizer, SftConfig
from dapo_jax.config.rules import Choices
from dapo_jax.config.settings import leaves, rules
from dapo_jax.data.prompts.templates import TEMPLATES, open_template
from dapo_jax.extras.math.verifier import BY_VALUE, VERIFIERS
from dapo_jax.learner.advantages import ESTIMATORS
from dapo_jax.learner.losses import KL_ESTIMATORS, LOSS_WEIGHTS, RATIOS, TRAINED_RESPONSES
from dapo_jax.learner.update import SCHEDULES
from dapo_jax.model.load_huggingface import DTYPES

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


# --- settings that nothing reads -----------------------------------------------------------------

READ_WHEN = {name: rule.read for name, rule in rules(Config).items() if rule.read}

# Read whatever the algorithm, or refused by a check of its own where it makes no sense.
ALWAYS_READ = set(
    "advantage whiten critic ratio region covariance dual_clip aggregate trained_responses "
    "token_weights reference kl kl_coefficient entropy_coefficient positive_nll_coefficient "
    "importance_cap router_replay router_balance_coefficient "
    "distillation rejection dynamic_sampling reward_correct reward_wrong overlong_punishment "
    "overlong_filtering".split()
)

# Overrides with which one or the other condition holds.
EXTRAS = read_table(__file__, "extras")
NUMBERS = (0.9, 0.5, 0.1, 0.25, 2.0, 3.0, 8.0, 1e-4, 3, 2, 8, 16)


NOWHERE = "--config.sampler.cache=slots", "--config.log.rollouts=false"


def settings_of(config: Config) -> dict:
    return {name: value for name, _, value in leaves(config)}


@functools.cache
def of_presets() -> dict[str, dict]:
    presets = sorted(set(algorithms.PRESETS) - {"sft"})
    return {preset: settings_of(load(Config, f"{RL}:{preset}")) for preset in presets}


def flags(overrides: str) -> list[str]:
    return [f"--config.{text}" for text in overrides.split()]


def other_values(name: str) -> list:
    """Legal values of a setting that are not its default, of its type."""
    default, allowed = settings_of(Config())[name], rules(Config)[name].allowed
    if isinstance(default, bool):
        return [not default]
    texts = (
        allowed
        if isinstance(allowed, Choices)
        else [*("elsewhere", "query,value", "{problem}", "http://elsewhere/v1")]
    )
    values = texts if isinstance(default, str) else NUMBERS
    legal = (v for v in values if type(v) is type(default) and (allowed is None or allowed(v)))
    return [value for value in legal if value != default]


def run_that_reads(name: str) -> dict:
    """The settings of the first valid run that reads the setting, which is not its default."""
    for extra, value in itertools.product(EXTRAS, other_values(name)):
        for preset, plain in of_presets().items():
            given = dict(text.split("=", 1) for text in extra.split())
            if name not in given and not READ_WHEN[name](plain | given):
                continue
            with contextlib.suppress(SystemExit):
                others = [flag for flag in flags(extra) if not flag.startswith(f"--config.{name}=")]
                arguments = [*others, f"--config.{name}={value}"]
                return settings_of(load(Config, f"{RL}:{preset}", *arguments))
    raise AssertionError(f"no run reads {name}")


@pytest.mark.parametrize("name", READ_WHEN)
def test_a_changed_setting_is_refused_where_nothing_reads_it_and_only_there(name, capsys):
    found = run_that_reads(name)
    value = found[name]
    assert READ_WHEN[name](found)
    change = f"--config.{name}={value}"
    capsys.readouterr()
    unread = [preset for preset, plain in of_presets().items() if not READ_WHEN[name](plain)]
    # What is no preset's choice is named.
    where = [f"{RL}:{unread[0]}"] if unread else [f"{RL}:dapo", *NOWHERE]
    with pytest.raises(SystemExit) as stopped:
        load(Config, *where, change)
    message = capsys.readouterr().err
    default = settings_of(Config())[name]
    allowed = "empty" if default == "" else repr(default)
    decider = READ_WHEN[name].names.split()[0]
    assert stopped.value.code == 2 and len(message.splitlines()) == 1
    assert f"config.{name} = {value!r}: must be {allowed} with {decider} = " in message
    assert "nothing reads it" in message


def test_every_field_of_an_algorithm_has_a_condition_or_is_always_read():
    fields = {field.name for field in dataclasses.fields(Algorithm)}
    listed = {name.removeprefix("algorithm.") for name in READ_WHEN if name.startswith("alg")}
    assert listed | ALWAYS_READ == fields and not listed & ALWAYS_READ
    assert set(READ_WHEN) <= set(settings_of(Config()))
    assert {f"critic.optimizer.{f.name}" for f in dataclasses.fields(Optimizer)} <= set(READ_WHEN)
