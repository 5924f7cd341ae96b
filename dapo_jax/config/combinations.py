"""Rules between several settings of a reinforcement-learning run."""

from collections.abc import Callable

from dapo_jax.config.algorithm import GROUP_ESTIMATORS, OF_VALUES, REWARD_FREE_ESTIMATORS, Algorithm
from dapo_jax.config.experiment import Config
from dapo_jax.config.sections import SHAPING, Rollout, Sampler

# Takes the dotted name of a setting, whether its value fits the others, and what would.
Check = Callable[[str, bool, str], None]


def _check_advantage(algorithm: Algorithm, check: Check) -> None:
    of_values = algorithm.advantage in OF_VALUES
    check(
        "algorithm.critic",
        algorithm.critic == of_values,
        f"{of_values} with algorithm.advantage = {algorithm.advantage!r}",
    )
    check(
        "algorithm.trained_responses",
        not algorithm.critic or algorithm.trained_responses == "all",
        "'all' with a critic, which learns from every response",
    )
    check(
        "algorithm.reward_correct",
        algorithm.reward_correct > algorithm.reward_wrong,
        f"above algorithm.reward_wrong = {algorithm.reward_wrong}",
    )


def _check_preference(algorithm: Algorithm, check: Check) -> None:
    preferring = algorithm.advantage == "preference"
    for name, value in (("trained_responses", "pairs"), ("aggregate", "pair_sum")):
        check(
            f"algorithm.{name}",
            (getattr(algorithm, name) == value) == preferring,
            f"{value!r} with algorithm.advantage = 'preference', and only with it",
        )
    check(
        "algorithm.token_weights",
        not algorithm.token_weights or not preferring,
        "empty with algorithm.advantage = 'preference', whose margins weigh every token alike",
    )
    check(
        "algorithm.ratio",
        algorithm.ratio == "none" or not preferring,
        "'none' with algorithm.advantage = 'preference'",
    )


def _check_imitation(algorithm: Algorithm, check: Check) -> None:
    has_reward = algorithm.advantage not in REWARD_FREE_ESTIMATORS
    check(
        "algorithm.trained_responses",
        algorithm.advantage != "one" or algorithm.trained_responses == "correct",
        "'correct' with algorithm.advantage = 'one', which else imitates wrong answers too "
        "(worked examples are for dapo-jax sft)",
    )
    check(
        "algorithm.whiten",
        not algorithm.whiten or has_reward,
        f"false: algorithm.advantage = {algorithm.advantage!r} is no estimate from rewards",
    )
    check(
        "algorithm.whiten",
        not algorithm.whiten or algorithm.trained_responses == "all",
        f"false with algorithm.trained_responses = {algorithm.trained_responses!r}: centred among "
        "themselves, half of the right answers would be pushed down",
    )
    check(
        "algorithm.overlong_punishment",
        not algorithm.overlong_punishment or has_reward,
        f"false: algorithm.advantage = {algorithm.advantage!r} reads no reward",
    )


def _check_ratio(algorithm: Algorithm, sampler: Sampler, check: Check) -> None:
    check(
        "algorithm.region",
        algorithm.region == "none" or algorithm.ratio != "none",
        "'none' with algorithm.ratio = 'none', which never moves",
    )
    whole = algorithm.ratio in ("sequence", "product")
    check(
        "algorithm.region",
        algorithm.region not in ("tv", "kl") or not whole,
        f"'ratio', 'log_ratio' or 'none' with algorithm.ratio = {algorithm.ratio!r}: a response "
        "has no single probability that moves",
    )
    bounded, upper = algorithm.region in ("ratio", "log_ratio"), 1 + algorithm.clip_high
    check(
        "algorithm.dual_clip",
        algorithm.dual_clip == 0 or bounded and algorithm.dual_clip > upper,
        "0 (off) or, with algorithm.region = 'ratio' or 'log_ratio', above 1 + clip_high = "
        f"{upper}",
    )
    for name in ("weight", "rejection"):
        low, high = getattr(algorithm, f"{name}_low"), getattr(algorithm, f"{name}_high")
        check(
            f"algorithm.{name}_high",
            high == 0 or high > low,
            f"0 (no bound) or above algorithm.{name}_low = {low}",
        )
    check(
        "algorithm.old_logprobs",
        algorithm.old_logprobs != "sampler" or (sampler.top_p == 1 and sampler.top_k == 0),
        "'recompute' where sampler.top_p or sampler.top_k truncates the distribution",
    )
    uncapped, of_sampler = algorithm.importance_cap == 0, algorithm.old_logprobs == "sampler"
    sampled = (
        algorithm.advantage not in REWARD_FREE_ESTIMATORS or algorithm.distillation == "reverse"
    )
    for name, off in (("importance_cap", 0), ("rejection", "none")):
        check(
            f"algorithm.{name}",
            getattr(algorithm, name) == off or sampled,
            f"{off!r} with algorithm.advantage = {algorithm.advantage!r}: no expectation over "
            "samples",
        )
    check(
        "algorithm.importance_cap",
        uncapped or not of_sampler,
        "0 with algorithm.old_logprobs = 'sampler': the ratio already is against the sampler",
    )
    check(
        "algorithm.router_replay",
        algorithm.router_replay != "old" or not of_sampler,
        "'none' or 'sampler' with algorithm.old_logprobs = 'sampler': no forward pass is made "
        "before the update",
    )
    check(
        "algorithm.rejection_of",
        algorithm.rejection == "none" or not of_sampler or algorithm.rejection_of == "new",
        "'new' with algorithm.old_logprobs = 'sampler': the sampler is the policy before the step",
    )


def _check_reference(algorithm: Algorithm, check: Check) -> None:
    has_kl = algorithm.kl != "none"
    needed = has_kl and algorithm.kl_to == "reference" or algorithm.advantage == "preference"
    check(
        "algorithm.reference",
        algorithm.reference == needed,
        "true, for the KL or the preference" if needed else "false: nothing reads it",
    )
    check(
        "algorithm.kl_coefficient",
        has_kl == (algorithm.kl_coefficient > 0),
        "above 0" if has_kl else "0 with algorithm.kl = 'none'",
    )
    check(
        "algorithm.kl_estimator",
        algorithm.kl != "loss" or algorithm.kl_estimator != "k1",
        "k2 or k3 with algorithm.kl = 'loss': the expected gradient of k1 is 0 there",
    )
    check(
        "algorithm.kl_importance",
        not algorithm.kl_importance or algorithm.kl_estimator == "k3",
        "false, or with algorithm.kl_estimator = 'k3', whose expectation the ratio corrects",
    )
    check(
        "algorithm.kl",
        algorithm.kl != "reward" or algorithm.advantage not in REWARD_FREE_ESTIMATORS,
        f"'none' or 'loss': algorithm.advantage = {algorithm.advantage!r} reads no reward",
    )
    # E[penalty * grad log p] is the KL's gradient for k1. The others are positive also where the
    # policy has too little probability, and take more of it away there.
    check(
        "algorithm.kl_estimator",
        algorithm.kl != "reward" or algorithm.kl_estimator == "k1",
        "'k1' with algorithm.kl = 'reward': as a penalty there, k2 and k3 push the policy away "
        "from the reference",
    )


def _diverges_alone(algorithm: Algorithm) -> bool:
    """True where the loss is the divergence from a teacher, right on whoever's tokens."""
    return algorithm.advantage == "zero" and algorithm.distillation == "jsd"


def _check_distillation(config: Config, check: Check) -> None:
    algorithm, distils = config.algorithm, config.algorithm.distillation != "none"
    check(
        "algorithm.distillation",
        distils or algorithm.advantage != "zero",
        "'reverse' or 'jsd' with algorithm.advantage = 'zero', which alone teaches nothing",
    )
    check(
        "teacher.folder",
        not distils or config.teacher.folder != "",
        f"a model folder with algorithm.distillation = {algorithm.distillation!r}",
    )
    check(
        "algorithm.distillation",
        algorithm.distillation != "reverse" or algorithm.advantage not in ("one", "preference"),
        f"'none' or 'jsd' with algorithm.advantage = {algorithm.advantage!r}, which is no "
        "estimate over samples",
    )
    check(
        "algorithm.dynamic_sampling",
        not algorithm.dynamic_sampling or algorithm.advantage != "zero",
        "false with algorithm.advantage = 'zero': a teacher says something to every group",
    )
    check(
        "algorithm.ratio",
        algorithm.ratio == "none" or not _diverges_alone(algorithm),
        "'none' with algorithm.advantage = 'zero' and algorithm.distillation = 'jsd': there is no "
        "advantage to weigh",
    )


def _check_updates(algorithm: Algorithm, rollout: Rollout, check: Check) -> None:
    grouped = algorithm.advantage in GROUP_ESTIMATORS or algorithm.dynamic_sampling
    check(
        "rollout.samples_per_prompt",
        not grouped or rollout.samples_per_prompt > 1,
        "at least 2: a group of one has no statistics and can't differ in correctness",
    )
    check(
        "algorithm.pass_k",
        algorithm.advantage != "pass_at_k" or algorithm.pass_k <= rollout.samples_per_prompt,
        f"at most rollout.samples_per_prompt = {rollout.samples_per_prompt}",
    )
    check(
        "rollout.updates_per_rollout",
        rollout.prompts_per_step % rollout.updates_per_rollout == 0,
        f"a divisor of rollout.prompts_per_step = {rollout.prompts_per_step}",
    )
    held = algorithm.kl == "loss" and algorithm.kl_to != "reference"
    check(
        "rollout.updates_per_rollout",
        algorithm.ratio != "none"
        or held
        or _diverges_alone(algorithm)
        or rollout.updates_per_rollout == 1,
        "1 with algorithm.ratio = 'none': later updates would be off-policy, uncorrected (or "
        "algorithm.kl_to = 'old' to hold them back)",
    )
    corrected = algorithm.importance_cap > 0 or algorithm.rejection != "none"
    against_sampler = algorithm.ratio != "none" and algorithm.old_logprobs == "sampler"
    for name, off in (("lag", 0), ("carry_over", "none")):
        check(
            f"rollout.{name}",
            getattr(rollout, name) == off
            or corrected
            or against_sampler
            or _diverges_alone(algorithm),
            f"{off!r} without algorithm.importance_cap, algorithm.rejection or old_logprobs = "
            "'sampler': those of an older policy go uncorrected",
        )
    check(
        "rollout.carry_over",
        rollout.carry_over == "none" or rollout.lag == 0,
        "'none' with rollout.lag = 1, which draws ahead with a policy of its own",
    )


def _check_reward(config: Config, check: Check) -> None:
    algorithm, reward, weights = config.algorithm, config.reward, config.reward.weights()
    check(
        "reward.model_folder",
        ("model" in weights) == bool(reward.model_folder),
        "a folder where reward.parts names 'model', and only there",
    )
    check(
        "reward.parts",
        reward.correct == "verifier" or not set(weights) <= set(SHAPING),
        f"with a part that judges where reward.correct = {reward.correct!r}; these only shape",
    )
    needs_right = algorithm.trained_responses != "all" or algorithm.positive_nll_coefficient > 0
    check(
        "reward.correct",
        reward.correct != "spread" or not needs_right,
        "'verifier' or 'threshold': the algorithm asks which responses are right",
    )


def _check_environment(config: Config, check: Check) -> None:
    environment, weights = config.environment, config.reward.weights()
    check(
        "environment.tools",
        not (environment.name and environment.tools),
        "empty with environment.name: an environment says itself what it offers",
    )
    check(
        "environment.tools",
        not environment.tools or config.data.template == "chat",
        "empty, or with data.template = 'chat', which teaches the policy how to call",
    )
    check(
        "reward.parts",
        "environment" not in weights or bool(environment.name),
        "without 'environment' where environment.name is empty: nothing gives that reward",
    )


def _check_critic(config: Config, check: Check) -> None:
    own, preset = config.critic.pretrain_steps, config.algorithm.critic_pretrain_steps
    if not config.algorithm.critic:
        check("critic.pretrain_steps", own <= 0, "0 without a critic")
        return
    meant = f"; -1 means algorithm.critic_pretrain_steps = {preset}" if own < 0 else ""
    check(
        "critic.pretrain_steps",
        config.critic_pretrain_steps() < config.total_steps,
        f"below total_steps = {config.total_steps}{meant}",
    )


def _check_kept_groups(config: Config, check: Check) -> None:
    keeps, carry = config.checkpoint.keep_groups, config.rollout.carry_over
    check(
        "checkpoint.keep_groups",
        carry == "none" or not keeps,
        f"false with rollout.carry_over = {carry!r}: a step takes what is judged first",
    )


def check_combinations(config: Config, check: Check) -> None:
    """Reports every combination that makes no sense to `check`, algorithm first."""
    algorithm = config.algorithm
    _check_advantage(algorithm, check)
    _check_preference(algorithm, check)
    _check_imitation(algorithm, check)
    _check_ratio(algorithm, config.sampler, check)
    _check_reference(algorithm, check)
    _check_distillation(config, check)
    _check_updates(algorithm, config.rollout, check)
    _check_reward(config, check)
    _check_environment(config, check)
    _check_critic(config, check)
    _check_kept_groups(config, check)
    rank = config.lora.rank
    check(
        "model.freeze_layers",
        not rank or config.model.freeze_layers == 0,
        f"0 with lora.rank = {rank}, which freezes all but its adapters",
    )
