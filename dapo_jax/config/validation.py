"""Validation of a config, from its settings alone; folders and devices are checked when opened."""

import operator
from typing import Any

from dapo_jax.config.algorithm import Algorithm
from dapo_jax.config.combinations import Checks, check_table
from dapo_jax.config.experiment import SHAPING, Config, Packing
from dapo_jax.config.settings import check_settings, leaves
from dapo_jax.runtime import registry
from dapo_jax.types.errors import require

# Names without a dot are those of the algorithm.
TRAINING = """
advantage=@values -> algorithm.critic=true
advantage!=@values -> algorithm.critic=false
algorithm.critic=true -> trained_responses=all: the critic learns from every response
advantage=preference -> trained_responses=pairs aggregate=pair_sum reference=true ratio=none
advantage=preference -> token_weights=: its margins weight all tokens equally
advantage!=preference -> trained_responses!=pairs aggregate!=pair_sum
advantage=one -> trained_responses=correct: it imitates wrong answers too
advantage=@no_reward -> whiten=false overlong_punishment=false covariance=none: it reads no reward
advantage=@no_reward|pass_at_k|real -> length_penalty=0: it reads no reward
advantage=pass_at_k|real -> overlong_punishment=false: it reads no reward
advantage=real -> whiten=false: it reads no reward
advantage=@no_reward|pass_at_k|real|reward_parts -> kl=none|loss: it reads no such reward
advantage=@no_reward distillation!=reverse -> importance_cap=0 rejection=none: no expectation
trained_responses!=all -> whiten=false: it would push half of them down
kl!=loss -> covariance!=kl: it chooses the tokens of that KL
advantage=@energies -> old_logprobs=recompute: only a forward pass has energies
advantage=@log_ratios -> old_logprobs=recompute ratio=none: its log-ratios are the sampler's
old_logprobs=sampler|interpolate -> top_entropy_fraction=1 entropy_target=0: nothing has entropies
old_logprobs=sampler|interpolate -> second_moment_limit=0: its ratios are of a forward pass
entropy_target>0 -> entropy_coefficient=0: its weight is adaptive
ratio=none -> future_kl_clip=0: this ratio never moves
ratio=none -> region=none: this ratio never moves
ratio=sequence|product -> region!=tv|kl: the ratio is that of a response
region=none|tv|kl -> dual_clip=0: it bounds a ratio
sampler.top_p!=1 -> sampler.engine=own|samplers: the others don't return the kept tokens
sampler.top_k>0 -> sampler.engine=own|samplers: the others don't return the kept tokens
old_logprobs=sampler -> importance_cap=0: the ratio is relative to the sampler already
old_logprobs=sampler|interpolate -> router_replay!=old: there is no forward pass before the update
old_logprobs=interpolate -> covariance=none kl!=reward trained_responses!=pairs: nothing is scored
old_logprobs=interpolate -> distillation!=reverse|evidence: nothing is scored
old_logprobs=sampler rejection!=none -> rejection_of=new: the sampler is the policy before the step
kl=none -> kl_coefficient=0
kl!=none -> kl_coefficient>0
kl!=none kl_to=reference -> reference=true: the KL is to it
kl=none advantage!=preference -> reference=false: nothing reads it
kl!=none kl_to!=reference advantage!=preference -> reference=false: nothing reads it
kl=loss -> kl_estimator!=k1: its expected gradient is 0 there
kl=reward -> kl_estimator=k1|module:function: others push the policy away from the reference
kl_estimator!=k3 -> kl_importance=false: the ratio corrects the expectation of k3
advantage=zero -> distillation=reverse|jsd: it teaches nothing alone
advantage=zero -> dynamic_sampling=false: every group teaches something
advantage=one|preference -> distillation!=reverse|evidence: it is no expectation over samples
advantage=zero distillation=jsd -> ratio=none
advantage=@group -> rollout.samples_per_prompt>1: a group of one has no statistics
dynamic_sampling=true -> rollout.samples_per_prompt>1: a group of one can't differ in correctness
rollout.staleness>0 -> rollout.carry_over=none: a separate policy samples ahead
rollout.carry_over!=none -> checkpoint.keep_groups=false: a step trains the groups scored first
rollout.carry_over!=none -> rollout.reward_bursts!=0: the schedule decides what is trained
environment.name!= -> environment.tools=: it defines its tools
environment.name!= -> rollout.reward_bursts!=0: the schedule decides what is trained
environment.tools!= -> rollout.reward_bursts!=0: the schedule decides what is trained
environment.tools!= -> data.template=chat: it shows the policy how to call
environment.name=second_try -> reward.verifier!=code: it sees no tests
reward.parts~model -> reward.model_folder!=: the folder of a reward model
reward.parts!~model -> reward.model_folder
reward.verifier!=code -> reward.parts!~tests: only 'code' runs them
environment.name= -> reward.parts!~environment: nothing else gives that reward
reward.correct=spread -> trained_responses=all positive_nll_coefficient=0: nothing is right or wrong
algorithm.critic=false -> critic.pretrain_steps=0|-1
data.heldout_source!= -> data.heldout_problems!=0: it is evaluated whole
lora.rank>0 -> model.freeze_layers=0: all but the adapters is frozen

advantage!=@centred -> advantage_scale
advantage!=@per_token -> gamma
advantage!=@values -> lambda_value
advantage!=pass_at_k -> pass_k
advantage!=real -> real_temperature
advantage!=gae -> lambda_policy
advantage!=length_adaptive_gae -> lambda_alpha
advantage!=preference -> preference_beta
algorithm.critic=false -> critic_pretrain_steps value_clip critic.folder critic.optimizer.
region=none -> clip_low clip_high region_sides
covariance=none -> covariance_fraction
future_kl_clip=0 -> future_kl_discount
entropy_target=0 -> entropy_step
covariance!=clip -> covariance_low covariance_high
ratio=none -> weight
ratio=none weight=ratio -> weight_low weight_high
weight!=sapo|gamma -> decay_positive decay_negative
weight!=gamma -> power_positive power_negative
kl=none -> kl_estimator
kl!=loss -> kl_to kl_importance
distillation=none -> distillation_coefficient
distillation!=evidence -> distillation_clip
distillation!=jsd -> distillation_beta distillation_temperature
importance_cap=0 -> importance_floor importance_ratio
rejection=none -> rejection_low rejection_high rejection_of rejection_sign
overlong_punishment=false -> overlong_buffer_share
reference=false -> model.reference_folder
data.template!=chat -> data.user_template
data.template!=few_shot -> data.few_shot
data.template=none|dapo|r1|qwen_math|few_shot -> data.system_prompt
data.difficulty= -> data.difficulty_file
rollout.carry_over=none -> rollout.carry_over_max_age
rollout.curriculum=none -> rollout.resting_rate
environment.name= environment.tools= -> environment. sampler.keep_turns
sampler.cache=slots -> sampler.page_tokens sampler.pages
sampler.speculate>0 -> sampler.engine=own|samplers: the others decode by themselves
reward.correct!=threshold -> reward.threshold
reward.correct!=spread -> reward.min_spread
log.rollouts=false -> log.rollouts_keep log.token_groups log.token_ratios
"""
ADAPTERS = """
lora.folder!= -> lora.rank>0: r of its adapter_config.json
lora.rank>0 -> optimizer.name=adamw: adapters are trained by AdamW alone
lora.rank=0 -> lora.alpha lora.rslora lora.targets
"""


def _algorithm(a: Algorithm) -> Checks:
    allowed = f"above algorithm.reward_wrong = {a.reward_wrong}"
    yield "algorithm.reward_correct", a.reward_correct > a.reward_wrong, allowed
    allowed = f"0 (off) or above {1 + a.clip_high} = 1 + algorithm.clip_high"
    yield "algorithm.dual_clip", a.dual_clip == 0 or a.dual_clip > 1 + a.clip_high, allowed
    allowed = f"below algorithm.importance_cap = {a.importance_cap}"
    fits = a.importance_cap == 0 or a.importance_floor < a.importance_cap
    yield "algorithm.importance_floor", fits, allowed
    allowed = f"above algorithm.covariance_low = {a.covariance_low}"
    yield "algorithm.covariance_high", a.covariance_high > a.covariance_low, allowed
    for name in ("weight", "rejection"):
        low, high = getattr(a, f"{name}_low"), getattr(a, f"{name}_high")
        allowed = f"0 (no bound) or above algorithm.{name}_low = {low}"
        yield f"algorithm.{name}_high", high == 0 or high > low, allowed
    reads_old = a.ratio != "none" or a.kl == "reward" or a.covariance != "none"
    reads_old |= a.kl == "loss" and (a.kl_to == "old" or a.kl_importance)
    reads_old |= a.importance_cap > 0 or a.rejection != "none"
    reads_old |= a.advantage == "preference" or a.reads_teacher
    reads_old |= a.second_moment_limit > 0 or a.advantage == "real" or a.reads_entropies
    allowed = "'recompute' with algorithm.ratio = 'none': nothing reads it"
    yield "algorithm.old_logprobs", reads_old or a.old_logprobs == "recompute", allowed


def _rollout(config: Config) -> Checks:
    a, rollout, updates = config.algorithm, config.rollout, config.rollout.updates_per_rollout
    allowed = f"at most rollout.samples_per_prompt = {rollout.samples_per_prompt}"
    fits = a.advantage != "pass_at_k" or a.pass_k <= rollout.samples_per_prompt
    yield "algorithm.pass_k", fits, allowed
    allowed = f"a divisor of rollout.prompts_per_step = {rollout.prompts_per_step}"
    yield "rollout.updates_per_rollout", rollout.prompts_per_step % updates == 0, allowed
    is_divergence = a.advantage == "zero" and a.distillation == "jsd"  # valid on any tokens
    has_trust_kl = a.kl == "loss" and a.kl_to != "reference"
    fits = a.ratio != "none" or has_trust_kl or is_divergence or updates == 1
    allowed = "1 with algorithm.ratio = 'none': later updates would be off-policy, uncorrected"
    yield "rollout.updates_per_rollout", fits, allowed
    is_corrected = a.importance_cap > 0 or a.rejection != "none" or is_divergence
    is_corrected |= a.ratio != "none" and a.old_logprobs != "recompute"
    allowed = "without algorithm.importance_cap, rejection or old_logprobs of the sampler"
    yield "rollout.staleness", rollout.staleness == 0 or is_corrected, f"0 {allowed}"
    yield "rollout.carry_over", rollout.carry_over == "none" or is_corrected, f"'none' {allowed}"
    engines = "own", *registry.names("samplers")
    yield "sampler.engine", config.sampler.engine in engines, f"one of {', '.join(engines)}"


def _run(config: Config) -> Checks:
    weights, correct = config.reward.weights(), config.reward.correct
    fits = correct == "verifier" or not set(weights) <= set(SHAPING)
    yield "reward.parts", fits, f"more than shaping parts with reward.correct = {correct!r}"
    steps, preset = config.critic.pretrain_steps, config.algorithm.critic_pretrain_steps
    allowed = f"below total_steps = {config.total_steps}"
    allowed += f"; -1 means algorithm.critic_pretrain_steps = {preset}" * (steps < 0)
    fits = not config.algorithm.critic or config.critic_pretrain_steps() < config.total_steps
    yield "critic.pretrain_steps", fits, allowed
    yield from check_terms("data", config.data)
    if config.packing.row_tokens != -1:
        yield from check_row_length(config.packing, config.longest_tokens(), ", or 'auto' (-1)")


def check_terms(section: str, terms: Any) -> Checks:
    """Yield the check of the number of operands in a section."""
    allowed = f"from 2 to {section}.max_terms = {terms.max_terms}"
    yield f"{section}.min_terms", 2 <= terms.min_terms <= terms.max_terms, allowed


def check_row_length(packing: Packing, longest: int, more: str = "") -> Checks:
    """Yield the check that rows hold a prompt and its response; `more` is also allowed."""
    allowed = f"at least the longest prompt + the response limit = {longest}{more}"
    yield "packing.row_tokens", packing.row_tokens >= longest, allowed


def _checks(config: Any) -> Checks:
    if isinstance(config, Config):
        yield from _algorithm(config.algorithm)
        yield from _rollout(config)
        yield from _run(config)
        yield from check_table(config, TRAINING, "algorithm.")
        for section in vars(config.extras).values():
            yield from check_table(config, getattr(section, "combinations", ""))
    yield from check_table(config, getattr(config, "combinations", ""))
    if checks := getattr(config, "checks", None):
        yield from checks()
    if hasattr(config, "lora"):
        yield from check_table(config, ADAPTERS)
    if hasattr(config, "mesh"):
        yield from check_table(config, "mesh.data=-1 -> mesh.fsdp>0: only one is the rest")


def check_warmup(config: Any) -> None:
    """Raise `ConfigError` for a warm-up that is longer than a run of fixed length."""
    values = {name: value for name, _, value in leaves(config)}
    allowed = f"at most total_steps = {config.total_steps}, or the peak rate is never reached"
    for name, value in values.items() if config.total_steps else ():
        section, _, last = name.rpartition(".")
        if last == "warmup_steps" and values[f"{section}.schedule"] != "constant":
            require(value <= config.total_steps, name, value, allowed)


def validate(config: Any) -> None:
    """Raise `ConfigError` for the first invalid setting or combination of settings."""
    check_settings(config)
    for name, fits, allowed in _checks(config):
        require(fits, name, operator.attrgetter(name)(config), allowed)
