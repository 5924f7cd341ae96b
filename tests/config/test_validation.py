"""Combinations of settings that make no sense, preset by preset, as a command line gives them."""

import dataclasses

import pytest
from command_lines import BASE, RL, load

from dapo_jax import algorithms
from dapo_jax.config.experiment import Config, ExportConfig, SftConfig
from dapo_jax.data.prompts.templates import TEMPLATES, open_template
from dapo_jax.learner.advantages import ESTIMATORS
from dapo_jax.learner.losses import KL_ESTIMATORS, LOSS_WEIGHTS, RATIOS, TRAINED_RESPONSES
from dapo_jax.learner.optimizer import SCHEDULES
from dapo_jax.model.load_huggingface import DTYPES
from dapo_jax.runtime.settings import rules
from dapo_jax.verifier.verifier import BY_VALUE, VERIFIERS

# preset | overrides below `config.` | what the message has to name: field, value, what is allowed
REFUSED = r"""
grpo | algorithm.kl=loss+reward | algorithm.kl 'loss+reward' none
grpo | reward.correct=model | reward.correct 'model' threshold
ppo | critic.optimizer.schedule=step | critic.optimizer.schedule 'step' linear
dapo | sampler.temperature=1e-30 | sampler.temperature 1e-30 from 0.001 to 100
ppo | critic.optimizer.eps=1e-40 | optimizer.eps 1e-40 from 1e-30 1e+30
grpo | reward.parts=rule=1e31 | reward.parts 'rule=1e31' at most 1e30
ppo | critic.pretrain_steps=-2 | critic.pretrain_steps -2 least -1
ppo | algorithm.critic=false | algorithm.critic False True 'gae'
grpo | algorithm.critic=true | algorithm.critic True False 'group_zscore'
grpo | rollout.samples_per_prompt=1 | samples_per_prompt 1 least
dpo | rollout.samples_per_prompt=1 | samples_per_prompt 1 least
reinforce | rollout.samples_per_prompt=1 algorithm.dynamic_sampling=true | _prompt 1 least
rloo | rollout.updates_per_rollout=4 | updates_per_rollout 4 'none'
rft | algorithm.trained_responses=all | trained_responses 'all' 'correct' 'one'
dpo | algorithm.trained_responses=all | trained_responses 'all' 'pairs' 'preference'
grpo | algorithm.trained_responses=pairs | trained_responses 'pairs' 'preference'
dpo | algorithm.aggregate=token_mean | aggregate 'token_mean' 'pair_sum' 'preference'
grpo | algorithm.aggregate=pair_sum | aggregate 'pair_sum' 'preference'
dpo | algorithm.whiten=true | whiten True false 'preference'
reinforce_pp | algorithm.whiten=true algorithm.trained_responses=correct | whiten True false
dpo | algorithm.ratio=token | ratio 'token' 'none' 'preference'
rloo | algorithm.region=ratio | algorithm.region 'ratio' 'none'
dapo | algorithm.dual_clip=1.28 | dual_clip 1.28 above
rloo | algorithm.dual_clip=3 | dual_clip 3.0 0 algorithm.region
gspo | algorithm.region=tv | algorithm.region 'tv' 'ratio' 'none' 'sequence'
icepop | algorithm.rejection_low=6 | algorithm.rejection_high 5.0 0 6.0
icepop | algorithm.old_logprobs=sampler algorithm.importance_cap=0 | rejection_of 'old' 'new'
rft | algorithm.rejection=token | algorithm.rejection 'token' 'none' 'one'
pass_at_k | algorithm.pass_k=17 | algorithm.pass_k 17 16
grpo | algorithm.kl_importance=true algorithm.kl_estimator=k2 | kl_importance True false 'k3'
gspo | algorithm.old_logprobs=sampler sampler.top_p=0.9 | old_logprobs 'sampler' 'recompute' top_p
dapo | algorithm.old_logprobs=sampler algorithm.importance_cap=2 | importance_cap 2.0 0 'sampler'
grpo | algorithm.reference=false | reference False true KL
dpo | algorithm.reference=false | reference False true preference
dapo | algorithm.reference=true | reference True false
grpo | algorithm.kl_coefficient=0 | kl_coefficient 0.0 above
dapo | algorithm.kl_coefficient=0.1 | kl_coefficient 0.1 0 'none'
grpo | algorithm.kl_estimator=k1 | kl_estimator 'k1' k2 k3 'loss'
dpo | algorithm.kl=reward algorithm.kl_coefficient=0.1 | kl 'reward' 'none' 'loss' 'preference'
dapo | reward.parts=1 | reward.parts '1' name=weight
dapo | reward.parts=rule=1,model=1 | reward.model_folder '' folder 'model'
dapo | reward.model_folder=elsewhere | reward.model_folder 'elsewhere' 'model'
ppo | critic.pretrain_steps=30 | critic.pretrain_steps 30 below
vapo | critic.pretrain_steps=-1 | pretrain_steps -1 below total_steps 30 critic_pretrain_steps 50
grpo | critic.pretrain_steps=1 | critic.pretrain_steps 1 0 critic
""".strip().splitlines()


@pytest.mark.parametrize("row", REFUSED)
def test_a_senseless_combination_names_field_value_and_allowed(row, capsys):
    preset, overrides, words = (cell.strip() for cell in row.split("|"))
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
