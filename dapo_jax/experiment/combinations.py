"""Which parts of an algorithm don't go together, and with which run they make no sense."""

from dapo_jax.algorithms import Algorithm
from dapo_jax.experiment.config import Config, Rollout, Sampler
from dapo_jax.experiment.settings import require

# Estimators by what they need; one that is in none of these needs nothing.
OF_GROUPS = ("group_zscore", "group_centre", "leave_one_out", "preference")
OF_VALUES = ("gae", "length_adaptive_gae")
PER_TOKEN = ("reward_to_go", *OF_VALUES)
OF_NO_REWARD = ("one", "preference")


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


def _check_reference(algorithm: Algorithm, reference_folder: str) -> None:
    kl, preferring = algorithm.kl != "none", algorithm.advantage == "preference"
    require(
        algorithm.reference == (kl or preferring),
        "algorithm.reference",
        algorithm.reference,
        "true, for the KL or the preference" if kl or preferring else "false: nothing reads it",
    )
    require(
        algorithm.reference or not reference_folder,
        "model.reference_folder",
        reference_folder,
        "empty without algorithm.reference",
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
    require(
        algorithm.lambda_policy == 1 or algorithm.advantage == "gae",
        "algorithm.lambda_policy",
        algorithm.lambda_policy,
        f"1 with algorithm.advantage = {algorithm.advantage!r}, which does not read it",
    )
    require(
        algorithm.gamma == 1 or algorithm.advantage in PER_TOKEN,
        "algorithm.gamma",
        algorithm.gamma,
        f"1 with algorithm.advantage = {algorithm.advantage!r}, which does not read it",
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
        "(worked examples are for python -m dapo_jax.sft)",
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
    _check_reference(algorithm, config.model.reference_folder)
    _check_updates(algorithm, config.rollout)
