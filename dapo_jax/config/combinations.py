"""Which parts of an algorithm don't go together, and which settings nothing would read."""

import dataclasses
from collections.abc import Callable
from typing import Any

from dapo_jax.algorithms import Algorithm
from dapo_jax.config.experiment import (
    Architecture,
    Config,
    DpoConfig,
    Examples,
    Optimizer,
    OwnData,
    Rollout,
    Sampler,
    SftConfig,
)
from dapo_jax.runtime.settings import leaves, require
from dapo_jax.verifier.verifier import BY_VALUE

# Estimators by what they need; one that is in none of these needs nothing.
OF_GROUPS = ("group_zscore", "group_centre", "leave_one_out", "preference")
OF_VALUES = ("gae", "length_adaptive_gae")
PER_TOKEN = ("reward_to_go", *OF_VALUES)
OF_NO_REWARD = ("one", "preference")


def _one_of(*values: str) -> Callable[[str], bool]:
    return lambda value: value in values


def _none_of(*values: str) -> Callable[[str], bool]:
    return lambda value: value not in values


# Who reads a setting: the settings that decide it, and for which values of theirs it is read. What
# nothing reads has to keep its default, or someone waits for its effect. What is not listed is
# always read, or has a check of its own below.
READ_WHERE: dict[str, tuple[str, Callable[..., bool]]] = {
    "algorithm.gamma": ("algorithm.advantage", _one_of(*PER_TOKEN)),
    "algorithm.lambda_policy": ("algorithm.advantage", _one_of("gae")),
    "algorithm.lambda_value": ("algorithm.advantage", _one_of(*OF_VALUES)),
    "algorithm.lambda_alpha": ("algorithm.advantage", _one_of("length_adaptive_gae")),
    "algorithm.preference_beta": ("algorithm.advantage", _one_of("preference")),
    "algorithm.critic_pretrain_steps": ("algorithm.critic", bool),
    "algorithm.value_clip": ("algorithm.critic", bool),
    "algorithm.clip_low": ("algorithm.clip", bool),
    "algorithm.clip_high": ("algorithm.clip", bool),
    "algorithm.overlong_buffer_share": ("algorithm.overlong_punishment", bool),
    "algorithm.kl_estimator": ("algorithm.kl", _one_of("loss", "reward")),
    "algorithm.old_logprobs": (
        "algorithm.ratio algorithm.kl algorithm.advantage",
        lambda ratio, kl, advantage: ratio != "none" or kl == "reward" or advantage == "preference",
    ),
    "critic.folder": ("algorithm.critic", bool),
    **{
        f"critic.optimizer.{field.name}": ("algorithm.critic", bool)
        for field in dataclasses.fields(Optimizer)
    },
    "model.reference_folder": ("algorithm.reference", bool),
    "reward.unfinished": ("reward.verifier", _one_of(*BY_VALUE)),
    "reward.percent": ("reward.verifier", _one_of(*BY_VALUE)),
    "reward.threshold": ("reward.correct", _one_of("threshold")),
    "reward.min_spread": ("reward.correct", _one_of("spread")),
    "rollout.carry_over_max_age": ("rollout.carry_over", _none_of("none")),
    "sampler.pages": ("sampler.cache", _one_of("auto", "paged")),
    "sampler.page_tokens": ("sampler.cache", _one_of("auto", "paged")),
    "log.token_groups": ("log.rollouts", bool),
    "log.token_ratios": (
        "log.rollouts log.token_groups algorithm.ratio rollout.updates_per_rollout "
        "algorithm.old_logprobs",
        # The only update of a step sees ratios of 1.
        lambda rollouts, groups, ratio, updates, old: (
            rollouts and groups > 0 and ratio != "none" and (updates > 1 or old == "sampler")
        ),
    ),
    "lora.alpha": ("lora.rank", bool),
    "lora.targets": ("lora.rank", bool),
    "data.few_shot": ("data.template", _one_of("few_shot")),
    # Of a template of one's own the command line asks whether it does.
    "data.system_prompt": (
        "data.template",
        _none_of("none", "dapo", "r1", "qwen_math", "few_shot"),
    ),
}

GENERATED = "arithmetic"  # the data.source of a supervised run that is no file
_READ_WHERE_DPO = {"data.passes": ("total_steps", lambda steps: steps == 0)}
_READ_WHERE_SFT = {
    **{
        f"data.{field.name}": ("data.source", lambda source: source != GENERATED)
        for field in dataclasses.fields(OwnData)
        if field.name != "source"
    },
    **_READ_WHERE_DPO,
    **{
        f"examples.{field.name}": ("data.source", _one_of(GENERATED))
        for field in dataclasses.fields(Examples)
    },
    "max_response_tokens": ("data.source", _one_of(GENERATED)),
    **{
        f"architecture.{field.name}": ("start", lambda start: not start)
        for field in dataclasses.fields(Architecture)
    },
}
_TABLES = {Config: READ_WHERE, SftConfig: _READ_WHERE_SFT, DpoConfig: _READ_WHERE_DPO}


def is_read(name: str, values: dict[str, Any], table: dict = READ_WHERE) -> bool:
    """Whether anything reads that setting of a run.

    Args:
        values: of all settings, by dotted name.
    """
    deciding, reads = table[name]
    return reads(*(values[decider] for decider in deciding.split()))


def check_unread(config: Config | SftConfig | DpoConfig) -> None:
    """Raises `ConfigError` for the first setting that was changed and that nothing reads."""
    values = {name: value for name, _, value in leaves(config)}
    defaults = {name: value for name, _, value in leaves(type(config)())}
    table = _TABLES[type(config)]
    for name, (deciding, _) in table.items():
        reason = " and ".join(f"{decider} = {values[decider]!r}" for decider in deciding.split())
        default = "empty" if defaults[name] == "" else repr(defaults[name])
        require(
            values[name] == defaults[name] or is_read(name, values, table),
            name,
            values[name],
            f"{default} with {reason}: nothing reads it",
        )


def _check_updates(algorithm: Algorithm, rollout: Rollout) -> None:
    grouped = algorithm.advantage in OF_GROUPS or algorithm.dynamic_sampling
    require(
        not grouped or rollout.samples_per_prompt > 1,
        "rollout.samples_per_prompt",
        rollout.samples_per_prompt,
        "at least 2: a group of one has no statistics and can't differ in correctness",
    )
    require(
        rollout.prompts_per_step % rollout.updates_per_rollout == 0,
        "rollout.updates_per_rollout",
        rollout.updates_per_rollout,
        f"a divisor of rollout.prompts_per_step = {rollout.prompts_per_step}",
    )
    lag = rollout.lag
    require(lag in (0, 1), "rollout.lag", lag, "0 or 1")
    carry = rollout.carry_over
    for name, found, off in (("lag", lag, 0), ("carry_over", carry, "none")):
        require(
            found == off or algorithm.importance_cap > 0,
            f"rollout.{name}",
            found,
            f"{off!r} without algorithm.importance_cap: those of an older policy go uncorrected",
        )
    allowed = "'none' with rollout.lag = 1, which draws ahead with a policy of its own"
    require(carry == "none" or lag == 0, "rollout.carry_over", carry, allowed)
    require(
        algorithm.ratio != "none" or rollout.updates_per_rollout == 1,
        "rollout.updates_per_rollout",
        rollout.updates_per_rollout,
        "1 with algorithm.ratio = 'none': later updates would be off-policy, uncorrected",
    )


def _check_ratio(algorithm: Algorithm, sampler: Sampler) -> None:
    require(algorithm.clip_low <= 1, "algorithm.clip_low", algorithm.clip_low, "at most 1")
    require(
        not (algorithm.clip and algorithm.ratio == "none"),
        "algorithm.clip",
        algorithm.clip,
        "false with algorithm.ratio = 'none', which has nothing to clip",
    )
    require(
        algorithm.dual_clip == 0
        or algorithm.clip
        and algorithm.dual_clip > 1 + algorithm.clip_high,
        "algorithm.dual_clip",
        algorithm.dual_clip,
        f"0 (off) or, with algorithm.clip, above 1 + clip_high = {1 + algorithm.clip_high}",
    )
    require(
        algorithm.ratio != "sequence" or algorithm.advantage not in PER_TOKEN,
        "algorithm.ratio",
        algorithm.ratio,
        f"'token' with algorithm.advantage = {algorithm.advantage!r}: a response has one ratio "
        "but here an advantage for every token",
    )
    require(
        algorithm.old_logprobs != "sampler" or (sampler.top_p == 1 and sampler.top_k == 0),
        "algorithm.old_logprobs",
        algorithm.old_logprobs,
        "'recompute' where sampler.top_p or sampler.top_k truncates the distribution",
    )
    for name, off in (("token_weights", ""), ("importance_cap", 0.0)):
        found = getattr(algorithm, name)
        require(
            algorithm.ratio != "sequence" or found == off,
            f"algorithm.{name}",
            found,
            f"{off!r} with algorithm.ratio = 'sequence', which weighs whole responses",
        )
    cap = algorithm.importance_cap
    require(cap == 0 or cap >= 1, "algorithm.importance_cap", cap, "0 (off) or at least 1")
    require(
        cap == 0 or algorithm.advantage not in OF_NO_REWARD,
        "algorithm.importance_cap",
        cap,
        f"0 with algorithm.advantage = {algorithm.advantage!r}: no expectation over samples",
    )
    require(
        algorithm.importance_cap == 0 or algorithm.old_logprobs == "recompute",
        "algorithm.importance_cap",
        algorithm.importance_cap,
        "0 with algorithm.old_logprobs = 'sampler': the ratio already is against the sampler",
    )


def _check_reference(algorithm: Algorithm) -> None:
    kl, preferring = algorithm.kl != "none", algorithm.advantage == "preference"
    require(
        algorithm.reference == (kl or preferring),
        "algorithm.reference",
        algorithm.reference,
        "true, for the KL or the preference" if kl or preferring else "false: nothing reads it",
    )
    require(
        kl == (algorithm.kl_coefficient > 0),
        "algorithm.kl_coefficient",
        algorithm.kl_coefficient,
        "above 0" if kl else "0 with algorithm.kl = 'none'",
    )
    require(
        algorithm.kl != "loss" or algorithm.kl_estimator != "k1",
        "algorithm.kl_estimator",
        algorithm.kl_estimator,
        "k2 or k3 with algorithm.kl = 'loss': the expected gradient of k1 is 0 there",
    )
    require(
        algorithm.kl != "reward" or algorithm.advantage not in OF_NO_REWARD,
        "algorithm.kl",
        algorithm.kl,
        f"'none' or 'loss': algorithm.advantage = {algorithm.advantage!r} reads no reward",
    )
    # E[penalty * grad log p] is the KL's gradient for k1. The others are positive also where the
    # policy has too little probability, and take more of it away there.
    require(
        algorithm.kl != "reward" or algorithm.kl_estimator == "k1",
        "algorithm.kl_estimator",
        algorithm.kl_estimator,
        "'k1' with algorithm.kl = 'reward': as a penalty there, k2 and k3 push the policy away "
        "from the reference",
    )


def _check_advantage(algorithm: Algorithm) -> None:
    require(
        algorithm.critic == (algorithm.advantage in OF_VALUES),
        "algorithm.critic",
        algorithm.critic,
        f"{algorithm.advantage in OF_VALUES} with algorithm.advantage = {algorithm.advantage!r}",
    )
    require(
        not algorithm.critic or algorithm.trained_responses == "all",
        "algorithm.trained_responses",
        algorithm.trained_responses,
        "'all' with a critic, which learns from every response",
    )


def _check_imitation(algorithm: Algorithm) -> None:
    preferring = algorithm.advantage == "preference"
    for name, value in (("trained_responses", "pairs"), ("aggregate", "pair_sum")):
        found = getattr(algorithm, name)
        require(
            (found == value) == preferring,
            f"algorithm.{name}",
            found,
            f"{value!r} with algorithm.advantage = 'preference', and only with it",
        )
    require(
        algorithm.advantage != "one" or algorithm.trained_responses == "correct",
        "algorithm.trained_responses",
        algorithm.trained_responses,
        "'correct' with algorithm.advantage = 'one', which else imitates wrong answers too "
        "(worked examples are for dapo-jax sft)",
    )
    require(
        not algorithm.whiten or algorithm.advantage not in OF_NO_REWARD,
        "algorithm.whiten",
        algorithm.whiten,
        f"false: algorithm.advantage = {algorithm.advantage!r} is no estimate from rewards",
    )
    require(
        not algorithm.whiten or algorithm.trained_responses == "all",
        "algorithm.whiten",
        algorithm.whiten,
        f"false with algorithm.trained_responses = {algorithm.trained_responses!r}: centred among "
        "themselves, half of the right answers would be pushed down",
    )
    require(
        not algorithm.token_weights or not preferring,
        "algorithm.token_weights",
        algorithm.token_weights,
        "empty with algorithm.advantage = 'preference', whose margins weigh every token alike",
    )
    require(
        algorithm.ratio == "none" or not preferring,
        "algorithm.ratio",
        algorithm.ratio,
        "'none' with algorithm.advantage = 'preference'",
    )
    require(
        not algorithm.overlong_punishment or algorithm.advantage not in OF_NO_REWARD,
        "algorithm.overlong_punishment",
        algorithm.overlong_punishment,
        f"false: algorithm.advantage = {algorithm.advantage!r} reads no reward",
    )
    require(
        algorithm.reward_correct > algorithm.reward_wrong,
        "algorithm.reward_correct",
        algorithm.reward_correct,
        f"above algorithm.reward_wrong = {algorithm.reward_wrong}",
    )


def check_algorithm(config: Config) -> None:
    """Raises `ConfigError` for the first combination that makes no sense."""
    algorithm = config.algorithm
    _check_advantage(algorithm)
    _check_imitation(algorithm)
    _check_ratio(algorithm, config.sampler)
    _check_reference(algorithm)
    _check_updates(algorithm, config.rollout)
