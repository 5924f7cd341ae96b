"""A setting that nothing would read has to keep its default."""

import contextlib
import dataclasses
import functools
import itertools

import pytest
from command_lines import RL, load
from row_files import read_table

from dapo_jax import algorithms
from dapo_jax.algorithms import Algorithm
from dapo_jax.config.experiment import Config, Optimizer
from dapo_jax.runtime.rules import Choices
from dapo_jax.runtime.settings import leaves, rules

READ_WHEN = {name: rule.read for name, rule in rules(Config).items() if rule.read}

# Read whatever the algorithm, or refused by a check of its own where it makes no sense.
ALWAYS_READ = set(
    "advantage whiten critic ratio region dual_clip aggregate trained_responses token_weights "
    "reference kl kl_coefficient entropy_coefficient positive_nll_coefficient importance_cap "
    "router_replay router_balance_coefficient "
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
    texts = allowed if isinstance(allowed, Choices) else ["elsewhere", "query,value"]
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
                arguments = [*flags(extra), f"--config.{name}={value}"]
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
