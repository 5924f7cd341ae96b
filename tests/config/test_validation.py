"""Combinations of settings that make no sense, preset by preset, as a command line gives them."""

import dataclasses

import pytest
from command_lines import BASE, RL, load

from dapo_jax import algorithms
from dapo_jax.config.experiment import Config, ExportConfig, SftConfig
from dapo_jax.data.prompts.templates import TEMPLATES, open_template
from dapo_jax.learner.advantages import ESTIMATORS
from dapo_jax.learner.losses import KL_ESTIMATORS, LOSS_WEIGHTS, RATIOS, TRAINED_RESPONSES
from dapo_jax.learner.update import SCHEDULES
from dapo_jax.model.load_huggingface import DTYPES
from dapo_jax.runtime.settings import rules
from dapo_jax.verifier.verifier import BY_VALUE, VERIFIERS

# preset, overrides below `config.`, and what the message has to name: field, value, what is allowed
REFUSED = {
    # choices and ranges
    "kl is no place": ("grpo", "algorithm.kl=loss+reward", "algorithm.kl 'loss+reward' none"),
    "correct is no judge": ("grpo", "reward.correct=model", "reward.correct 'model' threshold"),
    "critic's schedule": (
        "ppo",
        "critic.optimizer.schedule=step",
        "critic.optimizer.schedule 'step' linear",
    ),
    # what float32 can't compute with
    "cold": ("dapo", "sampler.temperature=1e-30", "sampler.temperature 1e-30 from 0.001 to 100"),
    "critic's eps": ("ppo", "critic.optimizer.eps=1e-40", "optimizer.eps 1e-40 from 1e-30 1e+30"),
    "heavy part": ("grpo", "reward.parts=rule=1e31", "reward.parts 'rule=1e31' at most 1e30"),
    "pretraining": ("ppo", "critic.pretrain_steps=-2", "critic.pretrain_steps -2 least -1"),
    # estimators and what they need
    "gae without critic": ("ppo", "algorithm.critic=false", "algorithm.critic False True 'gae'"),
    "critic without gae": (
        "grpo",
        "algorithm.critic=true",
        "algorithm.critic True False 'group_zscore'",
    ),
    "statistics of one": ("grpo", "rollout.samples_per_prompt=1", "samples_per_prompt 1 least"),
    "pairs of one": ("dpo", "rollout.samples_per_prompt=1", "samples_per_prompt 1 least"),
    "filter of one": (
        "reinforce",
        "rollout.samples_per_prompt=1 algorithm.dynamic_sampling=true",
        "samples_per_prompt 1 least",
    ),
    "off-policy rloo": ("rloo", "rollout.updates_per_rollout=4", "updates_per_rollout 4 'none'"),
    "imitate everything": (
        "rft",
        "algorithm.trained_responses=all",
        "trained_responses 'all' 'correct' 'one'",
    ),
    "preference without pairs": (
        "dpo",
        "algorithm.trained_responses=all",
        "trained_responses 'all' 'pairs' 'preference'",
    ),
    "pairs without preference": (
        "grpo",
        "algorithm.trained_responses=pairs",
        "trained_responses 'pairs' 'preference'",
    ),
    "preference per token": (
        "dpo",
        "algorithm.aggregate=token_mean",
        "aggregate 'token_mean' 'pair_sum' 'preference'",
    ),
    "sum over no pairs": (
        "grpo",
        "algorithm.aggregate=pair_sum",
        "aggregate 'pair_sum' 'preference'",
    ),
    "whitened preference": ("dpo", "algorithm.whiten=true", "whiten True false 'preference'"),
    "whitened right answers": (
        "reinforce_pp",
        "algorithm.whiten=true algorithm.trained_responses=correct",
        "whiten True false 'correct'",
    ),
    "preference by ratio": ("dpo", "algorithm.ratio=token", "ratio 'token' 'none' 'preference'"),
    # ratios and clips
    "clip of no ratio": ("rloo", "algorithm.region=ratio", "algorithm.region 'ratio' 'none'"),
    "dual clip in the clip": ("dapo", "algorithm.dual_clip=1.28", "dual_clip 1.28 above"),
    "dual clip alone": ("rloo", "algorithm.dual_clip=3", "dual_clip 3.0 0 algorithm.region"),
    "a region of one probability": (
        "gspo",
        "algorithm.region=tv",
        "algorithm.region 'tv' 'ratio' 'none' 'sequence'",
    ),
    "bounds the wrong way round": (
        "icepop",
        "algorithm.rejection_low=6",
        "algorithm.rejection_high 5.0 0 6.0",
    ),
    "a sampler that is the old policy": (
        "icepop",
        "algorithm.old_logprobs=sampler algorithm.importance_cap=0",
        "algorithm.rejection_of 'old' 'new' 'sampler'",
    ),
    "importance of what has no expectation": (
        "rft",
        "algorithm.rejection=token",
        "algorithm.rejection 'token' 'none' 'one'",
    ),
    "sets larger than the group": ("pass_at_k", "algorithm.pass_k=17", "algorithm.pass_k 17 16"),
    "a ratio times a biased estimate": (
        "grpo",
        "algorithm.kl_importance=true algorithm.kl_estimator=k2",
        "algorithm.kl_importance True false 'k3'",
    ),
    "nucleus against the sampler": (
        "gspo",
        "algorithm.old_logprobs=sampler sampler.top_p=0.9",
        "old_logprobs 'sampler' 'recompute' top_p",
    ),
    "cap twice": (
        "dapo",
        "algorithm.old_logprobs=sampler algorithm.importance_cap=2",
        "importance_cap 2.0 0 'sampler'",
    ),
    # reference and KL
    "kl without reference": ("grpo", "algorithm.reference=false", "reference False true KL"),
    "preference without reference": (
        "dpo",
        "algorithm.reference=false",
        "reference False true preference",
    ),
    "nobody reads the reference": ("dapo", "algorithm.reference=true", "reference True false"),
    "kl of weight zero": ("grpo", "algorithm.kl_coefficient=0", "kl_coefficient 0.0 above"),
    "weight of no kl": ("dapo", "algorithm.kl_coefficient=0.1", "kl_coefficient 0.1 0 'none'"),
    "k1 in the loss": ("grpo", "algorithm.kl_estimator=k1", "kl_estimator 'k1' k2 k3 'loss'"),
    "kl in an unread reward": (
        "dpo",
        "algorithm.kl=reward algorithm.kl_coefficient=0.1",
        "algorithm.kl 'reward' 'none' 'loss' 'preference'",
    ),
    # rewards and critics
    "weights without names": ("dapo", "reward.parts=1", "reward.parts '1' name=weight"),
    "model without folder": (
        "dapo",
        "reward.parts=rule=1,model=1",
        "reward.model_folder '' folder 'model'",
    ),
    "folder without model": (
        "dapo",
        "reward.model_folder=elsewhere",
        "reward.model_folder 'elsewhere' 'model'",
    ),
    "critic to the end": ("ppo", "critic.pretrain_steps=30", "critic.pretrain_steps 30 below"),
    "critic to the end, by the preset": (
        "vapo",
        "critic.pretrain_steps=-1",
        "critic.pretrain_steps -1 below total_steps 30 algorithm.critic_pretrain_steps 50",
    ),
    "pretrain no critic": ("grpo", "critic.pretrain_steps=1", "critic.pretrain_steps 1 0 critic"),
}


@pytest.mark.parametrize(("preset", "overrides", "words"), REFUSED.values(), ids=REFUSED)
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


ALLOWED = [
    ("reinforce", "rollout.samples_per_prompt=1"),
    ("ppo", "rollout.samples_per_prompt=1"),
    ("ppo", "critic.pretrain_steps=29 critic.folder=elsewhere"),
    ("vapo", "critic.pretrain_steps=-1 total_steps=51"),
    ("grpo", "critic.pretrain_steps=0"),
    ("grpo", "critic.pretrain_steps=-1"),
    ("ppo", "algorithm.lambda_policy=0 algorithm.lambda_value=0 algorithm.value_clip=0"),
    ("dapo", "algorithm.dual_clip=1.29 algorithm.importance_cap=2"),
    ("grpo", "model.reference_folder=elsewhere algorithm.kl_estimator=k2"),
    ("grpo", "algorithm.ratio=sequence algorithm.old_logprobs=sampler"),
    ("rft", "algorithm.reference=true algorithm.kl=loss algorithm.kl_coefficient=0.1"),
    ("gspo", "model.freeze_layers=0.99 reward.parts=rule=1,think_format=-2,format=0.1"),
    ("dapo", "reward.parts=model=1 reward.model_folder=elsewhere reward.correct=threshold"),
]


@pytest.mark.parametrize(("preset", "overrides"), ALLOWED)
def test_the_other_side_of_a_refusal_is_allowed(preset, overrides):
    load(Config, f"{RL}:{preset}", *(f"--config.{text}" for text in overrides.split()))


def test_a_supervised_run_is_refused_what_it_can_not_use(capsys):
    for override, words in (
        ("examples.min_terms=1", ("examples.min_terms = 1", "from 2")),
        ("examples.max_terms=60", ("packing.row_tokens = 88", "192")),
        ("architecture.kv_heads=3", ("architecture.kv_heads = 3", "divisor", "4")),
        ("architecture.head_dim=15", ("architecture.head_dim = 15", "even")),
        ("architecture.rope_theta=1", ("architecture.rope_theta = 1.0", "above 1")),
    ):
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
