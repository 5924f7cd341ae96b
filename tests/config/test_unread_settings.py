"""A setting that nothing would read has to keep its default."""

import dataclasses
import functools

import pytest
from command_lines import RL, load

from dapo_jax import algorithms
from dapo_jax.algorithms import Algorithm
from dapo_jax.config.experiment import Config, Optimizer
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

# Setting: a legal value that is not the default, and a run (preset, overrides) that reads it.
CHANGES = {
    "algorithm.gamma": (0.9, "reinforce_pp", ""),
    "algorithm.distillation_coefficient": (0.5, "gkd", ""),
    "algorithm.distillation_beta": (0.1, "gkd", ""),
    "algorithm.distillation_top_k": (8, "gkd", ""),
    "algorithm.distillation_temperature": (0.9, "gkd", ""),
    **{
        f"environment.{name}": (value, "dapo", "environment.name=calculator")
        for name, value in {
            "max_turns": 3,
            "max_drawn_tokens": 64,
            "max_observation_tokens": 9,
            "rewards": "last",
            "step_seconds": 2.0,
            "workers": 2,
            "wait_bursts": 3,
        }.items()
    },
    "teacher.folder": ("elsewhere", "gkd", ""),
    "teacher.dtype": ("bfloat16", "on_policy_distillation", ""),
    "teacher.weights_dtype": ("int8", "gkd", ""),
    "algorithm.lambda_policy": (0.9, "ppo", ""),
    "algorithm.lambda_value": (0.9, "vapo", ""),
    "algorithm.lambda_alpha": (0.3, "vapo", ""),
    "algorithm.preference_beta": (0.3, "dpo", ""),
    "algorithm.critic_pretrain_steps": (3, "ppo", ""),
    "algorithm.value_clip": (0.5, "ppo", ""),
    "algorithm.clip_low": (0.1, "grpo", ""),
    "algorithm.clip_high": (0.25, "dapo", ""),
    "algorithm.overlong_buffer_share": (0.5, "dapo", ""),
    "algorithm.kl_estimator": ("k2", "grpo", ""),
    "algorithm.old_logprobs": ("sampler", "rloo", ""),
    "algorithm.advantage_scale": ("batch", "dr_grpo", ""),
    "algorithm.pass_k": (3, "pass_at_k", ""),
    "algorithm.region_sides": ("both", "dapo", ""),
    "algorithm.weight": ("topr", "dapo", ""),
    "algorithm.weight_low": (0.5, "dapo", ""),
    "algorithm.weight_high": (2.0, "dapo", ""),
    "algorithm.decay_positive": (2.0, "sapo", ""),
    "algorithm.decay_negative": (2.0, "sapo", ""),
    "algorithm.power_positive": (3.0, "vespo", ""),
    "algorithm.power_negative": (2.0, "vespo", ""),
    "algorithm.kl_to": ("old", "grpo", "algorithm.reference=false"),
    "algorithm.kl_importance": (True, "grpo", ""),
    "algorithm.importance_ratio": ("product", "tis", ""),
    "algorithm.rejection_low": (0.2, "icepop", ""),
    "algorithm.rejection_high": (8.0, "icepop", ""),
    "algorithm.rejection_of": ("new", "icepop", ""),
    "algorithm.rejection_sign": ("negative", "icepop", ""),
    "critic.folder": ("elsewhere", "ppo", ""),
    "critic.optimizer.learning_rate": (1e-4, "ppo", ""),
    "critic.optimizer.schedule": ("cosine", "ppo", ""),
    "critic.optimizer.warmup_steps": (5, "ppo", ""),
    "critic.optimizer.beta1": (0.8, "ppo", ""),
    "critic.optimizer.beta2": (0.9, "ppo", ""),
    "critic.optimizer.eps": (1e-6, "ppo", ""),
    "critic.optimizer.weight_decay": (0.0, "ppo", ""),
    "critic.optimizer.max_grad_norm": (2.0, "ppo", ""),
    "critic.optimizer.max_skipped_steps": (5, "ppo", ""),
    "model.reference_folder": ("elsewhere", "grpo", ""),
    "rollout.carry_over_max_age": (3, "dapo", "rollout.carry_over=all algorithm.importance_cap=2"),
    "sampler.pages": (64, "dapo", "sampler.cache=paged"),
    "sampler.page_tokens": (16, "dapo", "sampler.cache=paged"),
    "sampler.keep_turns": (True, "dapo", "environment.name=calculator"),
    "reward.unfinished": ("right", "dapo", "reward.verifier=math"),
    "reward.percent": ("as_asked", "dapo", "reward.verifier=math_box"),
    "reward.threshold": (0.7, "dapo", "reward.correct=threshold"),
    "reward.min_spread": (0.1, "dapo", "reward.correct=spread"),
    "log.rollouts_keep": (3, "dapo", ""),
    "log.token_groups": (2, "dapo", ""),
    "log.token_ratios": (True, "dapo", ""),
    "lora.alpha": (16.0, "dapo", "lora.rank=4"),
    "lora.targets": ("query,value", "dapo", "lora.rank=4"),
    "data.few_shot": (2, "dapo", "data.template=few_shot"),
    "data.system_prompt": ("Hi", "dapo", "data.template=chat"),
}


NOWHERE = "--config.sampler.cache=slots", "--config.log.rollouts=false"


def settings_of(config: Config) -> dict:
    return {name: value for name, _, value in leaves(config)}


@functools.cache
def of_presets() -> dict[str, dict]:
    presets = sorted(set(algorithms.PRESETS) - {"sft"})
    return {preset: settings_of(load(Config, f"{RL}:{preset}")) for preset in presets}


@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_setting_is_refused_where_nothing_reads_it_and_only_there(name, capsys):
    value, preset, overrides = CHANGES[name]
    overrides = [f"--config.{text}" for text in overrides.split()]
    change = f"--config.{name}={value}"
    found = settings_of(load(Config, f"{RL}:{preset}", *overrides, change))
    assert found[name] == value and READ_WHEN[name](found)
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
    assert set(CHANGES) == set(READ_WHEN) <= set(settings_of(Config()))
    assert {f"critic.optimizer.{f.name}" for f in dataclasses.fields(Optimizer)} <= set(READ_WHEN)
