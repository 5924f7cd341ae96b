"""Checks of a config, from its settings alone; folders and devices are checked when opened.

Most are lines of a table, `CONDITIONS -> NEEDS` or `CONDITIONS -> NEEDS: REASON`. If all conditions
hold (there may be none), every need must hold:

    name=a|b    the value is a or b; patterns as in file names; nothing: the empty text
    name!=a|b   the value is another one; if it must not be empty, the reason says what it is
    name>0      the value is above 0, or above another setting; <, <= and % (divides) accordingly
    name~a      the list of names, such as reward.parts, has a
    name!~a     it does not have a
    name        (a need) the setting has its default: nothing reads it
    name.       (a need) the same of all settings of the section

`@TRAIT` stands for every estimator with that trait, `module:function` for a user's function. A
condition on a setting that names a user's function does not hold: it may read any setting.
"""

import fnmatch
import functools
import itertools
import operator
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from dapo_jax.config.algorithm import ESTIMATOR_TRAITS
from dapo_jax.config.experiment import SHAPING, Config, Packing
from dapo_jax.config.settings import allowed_values, check_settings, defaults, fields, sections
from dapo_jax.runtime import registry
from dapo_jax.types.errors import require
from dapo_jax.types.rules import Choices, OwnChoices, is_own

# (dotted name of a setting, True if its value fits the others, what is allowed)
Checks = Iterator[tuple[str, bool, str]]

# Names without a dot are those of the algorithm.
TRAINING = """
-> reward_correct>reward_wrong covariance_high>covariance_low data.min_terms<=data.max_terms
weight_high!=0 -> weight_high>weight_low: 0 is no bound
rejection_high!=0 -> rejection_high>rejection_low: 0 is no bound
importance_cap!=0 -> importance_floor<importance_cap
advantage=pass_at_k -> pass_k<=rollout.samples_per_prompt
-> rollout.updates_per_rollout%rollout.prompts_per_step
ratio=none kl_to=reference distillation!=jsd -> rollout.updates_per_rollout=1: others are off-policy
ratio=none kl_to=reference advantage!=zero -> rollout.updates_per_rollout=1: others are off-policy
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
kl!=none -> kl_coefficient>0
kl!=none kl_to=reference -> reference=true: the KL is to it
kl=none advantage!=preference -> reference=false: nothing reads it
kl!=none kl_to!=reference advantage!=preference -> reference=false: nothing reads it
kl=loss -> kl_estimator!=k1: its expected gradient is 0 there
kl=reward -> kl_estimator=k1|module:function: others push the policy away from the reference
kl_estimator!=k3 -> kl_importance=false: the ratio corrects the expectation of k3
advantage=zero -> distillation=reverse|jsd: it teaches nothing alone
advantage=zero -> dynamic_sampling=false: every group teaches something
advantage=one|preference -> distillation!=reverse|evidence: it is not an expectation over samples
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
kl=none -> kl_estimator kl_coefficient
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

OWN = "module:function"
COMPARISONS = {
    ">": ("above", operator.gt),
    "<": ("below", operator.lt),
    "<=": ("at most", operator.le),
    "%": ("a divisor of", lambda value, whole: whole % value == 0),
}


class _Term(NamedTuple):
    name: str
    sign: str
    values: list[str]

    def limit(self, config: Any) -> float:
        """Return what a comparison compares with: a number, or the value of a setting."""
        (text,) = self.values
        return operator.attrgetter(text)(config) if text[0].isalpha() else float(text)

    def holds(self, config: Any) -> bool:
        value = operator.attrgetter(self.name)(config)
        if self.sign in COMPARISONS:
            return COMPARISONS[self.sign][1](value, self.limit(config))
        return self.fits(value)

    def fits(self, value: Any) -> bool:
        if "~" in self.sign:
            names = {entry.partition("=")[0].strip() for entry in value.split(",")}
            return names.isdisjoint(self.values) == (self.sign == "!~")
        text = value if isinstance(value, str) else str(value).lower().removesuffix(".0")
        matches = any(fnmatch.fnmatchcase(text, pattern) for pattern in self.values)
        return (matches or OWN in self.values and is_own(value)) == (self.sign == "=")

    def describe(self, config: Any) -> str:
        """Return what is allowed, in words."""
        values, field = self.values, fields(type(config))[self.name]
        if self.sign in COMPARISONS:
            text = f"{COMPARISONS[self.sign][0]} {values[0]}"
            return f"{text} = {self.limit(config)}" if values[0][0].isalpha() else text
        before = {"=": "", "!=": "not ", "~": "with ", "!~": "without "}[self.sign]
        if self.sign == "!=" and isinstance(choices := allowed_values(field), Choices):
            before, values = "", [*filter(self.fits, choices)]
        words = {"": "empty", OWN: f"your {OWN}"}
        shown = repr if isinstance(field.default, str) else str
        return before + " or ".join(words.get(value, shown(value)) for value in values)


def _parse_term(text: str, prefix: str) -> _Term:
    name, sign, values = re.split(r"(!=|!~|<=|=|~|>|<|%|$)", text, maxsplit=1)
    listed = []
    for value in values.split("|"):
        trait = value.removeprefix("@")
        having = [name for name, traits in ESTIMATOR_TRAITS.items() if trait in traits.split()]
        listed += having if trait != value else [value]
    if sign in COMPARISONS and values.isidentifier():
        listed = [prefix + values]
    return _Term((name if "." in name else prefix + name).removesuffix("."), sign, listed)


@functools.cache
def parse_table(table: str, prefix: str) -> list[tuple[list[_Term], list[_Term], str]]:
    """Return (conditions, needs, reason) of each line; names without a dot get the prefix."""
    rows = []
    for line in filter(None, map(str.strip, table.splitlines())):
        terms, _, reason = line.partition(": ")
        sides = [[_parse_term(text, prefix) for text in s.split()] for s in terms.split("->")]
        rows.append((*sides, reason))
    return rows


def check_table(config: Any, table: str, prefix: str = "") -> Checks:
    """Yield a check for each need of the lines that apply to a config."""
    read, usual, known = operator.attrgetter, defaults(type(config)), fields(type(config))
    for conditions, needs, reason in parse_table(table, prefix):
        others = {term.name: read(term.name)(config) for term in conditions}
        takes_own = [n for n in others if isinstance(allowed_values(known[n]), OwnChoices)]
        if any(is_own(others[name]) for name in takes_own):
            continue
        if not all(term.holds(config) for term in conditions):
            continue
        given = " and ".join(f"{name} = {value!r}" for name, value in others.items())
        given = f" with {given}" if given else ""
        for need in needs:
            if need.sign:
                allowed = need.describe(config) + given + f": {reason}" * bool(reason)
                if reason and need[1:] == ("!=", [""]):
                    allowed = reason + given
                yield need.name, need.holds(config), allowed
                continue
            for name, value in usual.items():
                if f"{name}.".startswith(f"{need.name}.") and name not in others:
                    allowed = f"{'empty' if value == '' else repr(value)}{given}: nothing reads it"
                    yield name, read(name)(config) == value, allowed


def check_row_length(packing: Packing, longest: int) -> Checks:
    """Yield the check that rows hold a prompt and its response."""
    allowed = f"at least the longest prompt + the response limit = {longest}"
    yield "packing.row_tokens", packing.row_tokens >= longest, allowed


def _training(config: Config) -> Checks:
    """Yield what no line of a table can say."""
    a, rollout, weights = config.algorithm, config.rollout, config.reward.weights()
    allowed = f"0 (off) or above {1 + a.clip_high} = 1 + algorithm.clip_high"
    yield "algorithm.dual_clip", a.dual_clip == 0 or a.dual_clip > 1 + a.clip_high, allowed
    reads_old = a.reads_all_old_logprobs or a.ratio != "none" or a.rejection != "none"
    reads_old |= a.importance_cap > 0 or a.kl == "loss" and (a.kl_to == "old" or a.kl_importance)
    allowed = "'recompute' with algorithm.ratio = 'none': nothing reads it"
    yield "algorithm.old_logprobs", reads_old or a.old_logprobs == "recompute", allowed
    is_corrected = a.importance_cap > 0 or a.rejection != "none"
    is_corrected |= a.ratio != "none" and a.old_logprobs != "recompute"
    is_corrected |= a.advantage == "zero" and a.distillation == "jsd"  # valid on any tokens
    allowed = "without algorithm.importance_cap, rejection or old_logprobs of the sampler"
    yield "rollout.staleness", rollout.staleness == 0 or is_corrected, f"0 {allowed}"
    yield "rollout.carry_over", rollout.carry_over == "none" or is_corrected, f"'none' {allowed}"
    engines = "own", *registry.names("samplers")
    yield "sampler.engine", config.sampler.engine in engines, f"one of {', '.join(engines)}"
    fits = config.reward.correct == "verifier" or not set(weights) <= set(SHAPING)
    allowed = f"more than shaping parts with reward.correct = {config.reward.correct!r}"
    yield "reward.parts", fits, allowed
    allowed = f"below total_steps = {config.total_steps}"
    if config.critic.pretrain_steps < 0:
        preset = a.critic_pretrain_steps
        allowed += f"; -1 means algorithm.critic_pretrain_steps = {preset}"
    fits = not a.critic or config.critic_pretrain_steps() < config.total_steps
    yield "critic.pretrain_steps", fits, allowed
    if config.packing.row_tokens != -1:
        yield from check_row_length(config.packing, config.longest_tokens())


def tables(config: Any) -> Iterator[tuple[str, str]]:
    """Yield the tables of a config and its sections, each with the prefix of names without dot."""
    if isinstance(config, Config):
        yield TRAINING, "algorithm."
    yield config.combinations, ""
    yield from ((section.combinations, "") for _, section in sections(config))


def validate(config: Any) -> None:
    """Raise `ConfigError` for the first invalid setting or combination of settings."""
    check_settings(config)
    checks = [_training(config)] if isinstance(config, Config) else []
    checks += [check_table(config, table, prefix) for table, prefix in tables(config)]
    checks += [config.checks()] if hasattr(type(config), "checks") else []
    for name, fits, allowed in itertools.chain(*checks):
        require(fits, name, operator.attrgetter(name)(config), allowed)
