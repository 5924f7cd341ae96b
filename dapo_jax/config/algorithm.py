"""Settings of an algorithm: the factors of each token's gradient coefficient.

Every method multiplies the gradient of log p(token) by a coefficient (arXiv 2402.03300, 5.2):

    A * weight(ratio) * [inside the region] * importance weight * [not rejected] - KL's part

`algorithms.py` has the published choices of each factor.
"""

from typing import Annotated, Literal

from dapo_jax.config.settings import Section, setting
from dapo_jax.runtime import registry
from dapo_jax.types.rules import (
    Below1,
    CountOr0,
    OwnChoices,
    Positive,
    PositiveOr0,
    Range,
    Share,
    Unit,
)

# Keys of advantages.ESTIMATORS, and what an estimator needs: the rewards of a 'group', a 'centred'
# scale, an estimate 'per token', the critic's 'values', 'energies' of tokens, 'log_ratios' to the
# sampler, or 'no reward'.
ESTIMATOR_TRAITS = {
    "group_zscore": "group",
    "group_centre": "group centred",
    "leave_one_out": "group centred",
    "length_weighted_centre": "group centred",
    "token_baseline": "group per_token energies",
    "reward_parts": "group",
    "pass_at_k": "group",
    "best_minus_second": "group",
    "real": "group log_ratios",
    "batch_centre": "",
    "reward": "",
    "reward_to_go": "per_token",
    "gae": "per_token values",
    "length_adaptive_gae": "per_token values",
    "one": "no_reward",
    "preference": "group no_reward",
    "zero": "no_reward",
}


def traits(advantage: str) -> list[str]:
    """Return what an estimator needs; a user's own needs nothing."""
    return ESTIMATOR_TRAITS.get(advantage, "").split()


AGGREGATES = OwnChoices(  # keys of losses.LOSS_WEIGHTS
    "token_mean token_mean_per_group sequence_mean sequence_sum token_sum_over_budget "
    "pair_sum".split()
)
Advantage = Annotated[str, OwnChoices(ESTIMATOR_TRAITS)]
Scale = Literal["none", "batch", "mean", "informative"]
Ratio = Annotated[str, OwnChoices("token sequence product geometric none".split())]
Region = Annotated[str, OwnChoices("ratio log_ratio tv kl none".split())]
Cap = Annotated[float, Range(at_least=1, also=0)]
Weight = Annotated[str, OwnChoices("ratio sapo gamma topr".split())]
KlEstimator = Annotated[str, OwnChoices("k1 k2 k3 k3+ abs".split())]
# Arguments of the functions that a user may give in place of a name.
OWN_FUNCTIONS = {
    "advantage": "algorithm, feedback",
    "ratio": "log_ratio, segment_ids, trained",
    "region": "algorithm, ratio, p, old",
    "weight": "algorithm, ratio, positive",
    "kl_estimator": "logprobs, reference_logprobs",
    "aggregate": "tokens, groups, budget",
}


class Algorithm(Section):
    """Coefficients of the tokens. Defaults are DAPO's (arXiv 2503.14476)."""

    advantage: Advantage = setting("group_zscore", "Estimator of the advantage.")
    advantage_scale: Scale = setting("none", "Scale of an advantage that is centred in its group.")
    real_temperature: Positive = setting(0.5, "Temperature of REAL's log-ratios.")
    pass_k: Annotated[int, Range(at_least=2)] = setting(4, "Set size in pass@k.")
    whiten: bool = setting(False, "Advantages get mean 0 and variance 1 over trained tokens.")
    gamma: Share = setting(1.0, "Discount per token.")
    lambda_policy: Unit = setting(1.0, "GAE's lambda of the advantages.")
    lambda_value: Unit = setting(1.0, "GAE's lambda of the critic's returns.")
    lambda_alpha: Positive = setting(0.05, "Lambda is 1 - 1 / (alpha * tokens).")
    critic: bool = setting(False, "Train a value model too; the gae estimators need it.")
    critic_pretrain_steps: CountOr0 = setting(0, "First steps of the critic alone.")
    value_clip: PositiveOr0 = setting(0.2, "Largest change of a value; 0: any.")
    ratio: Ratio = setting("token", "Importance ratio p / p_old: of a token or of the response.")
    region: Region = setting(
        "ratio", "Trust region of the ratio or the probability ('tv', 'kl'); no gradient outside."
    )
    clip_low: Unit = setting(0.2, "Lower end of the region: 1 - clip_low.")
    clip_high: PositiveOr0 = setting(0.28, "Upper end of it: 1 + clip_high.")
    region_sides: Literal["sign", "both"] = setting(
        "sign", "'sign': the end towards which the advantage pushes; 'both' ends."
    )
    dual_clip: PositiveOr0 = setting(10.0, "Largest ratio with a gradient if A < 0; 0: any.")
    future_kl_clip: Below1 = setting(
        0.0, "Advantages are multiplied by 1 +- this, by the log-ratios of later tokens; 0: 1."
    )
    future_kl_discount: Share = setting(0.98, "Discount of these log-ratios per token.")
    top_entropy_fraction: Share = setting(
        1.0, "Fraction of the trained tokens, those of highest entropy, with a gradient."
    )
    second_moment_limit: PositiveOr0 = setting(
        0.0,
        "Of the tokens that A pushes away from the sampler, drop those with the largest squared "
        "log-ratios to it until the mean of the others is at most this; 0: none.",
    )
    covariance: Literal["none", "clip", "kl"] = setting(
        "none", "Tokens chosen by the covariance of log-prob and A: no gradient, or the only KL."
    )
    covariance_fraction: Share = setting(2e-4, "Fraction of tokens to choose.")
    covariance_low: PositiveOr0 = setting(1.0, "Choose above this one.")
    covariance_high: PositiveOr0 = setting(5.0, "Choose below this one.")
    weight: Weight = setting("ratio", "How the ratio weights the gradient of log p.")
    weight_low: PositiveOr0 = setting(0.0, "Lower bound of that ratio.")
    weight_high: PositiveOr0 = setting(0.0, "Its upper bound; 0: none.")
    probability_power: PositiveOr0 = setting(0.0, "Token weight: this power of p.")
    decay_positive: Positive = setting(1.0, "Decay of the weight if A > 0.")
    decay_negative: Positive = setting(1.0, "The same if A < 0.")
    power_positive: PositiveOr0 = setting(1.0, "Power of the ratio if A > 0.")
    power_negative: PositiveOr0 = setting(1.0, "Power of the ratio if A < 0.")
    aggregate: Annotated[str, AGGREGATES] = setting("token_mean", "How tokens are averaged.")
    trained_responses: Literal["all", "correct", "pairs"] = setting("all", "Which are trained on.")
    token_weights: str = setting("", "module:function(group, sample) -> token weights; empty: 1.")
    reference: bool = setting(False, "Hold a frozen reference policy (model.reference_folder).")
    kl: Literal["none", "loss", "reward"] = setting(
        "none", "KL to another policy: 'none', in the 'loss' or in the 'reward'."
    )
    kl_to: Literal["reference", "old", "sampler"] = setting(
        "reference", "KL to the 'reference', the 'old' policy or the 'sampler'."
    )
    kl_estimator: KlEstimator = setting("k3", "KL estimator.")
    kl_importance: bool = setting(False, "KL times the ratio, unbiased off policy.")
    kl_coefficient: PositiveOr0 = setting(0.0, "Weight of the KL.")
    preference_beta: Positive = setting(0.1, "DPO's beta, in 1 / nats.")
    distillation: Literal["none", "reverse", "evidence", "jsd"] = setting(
        "none",
        "'reverse' adds log p_teacher - log p_old to advantages, 'evidence' multiplies them by "
        "that ratio; 'jsd' is in the loss.",
    )
    distillation_clip: Below1 = setting(0.2, "The evidence is in 1 +- this.")
    distillation_coefficient: Positive = setting(1.0, "Weight of distillation.")
    distillation_beta: Unit = setting(0.5, "0: KL(teacher || policy); 1: the reverse.")
    distillation_temperature: Positive = setting(1.0, "Temperature of both models.")
    entropy_coefficient: PositiveOr0 = setting(0.0, "Weight of the entropy bonus.")
    entropy_target: PositiveOr0 = setting(
        0.0, "Entropy in nats up to which a bonus of an adaptive weight acts; 0: none does."
    )
    entropy_step: Positive = setting(0.005, "Change of that weight per step, towards the target.")
    observation_nll_coefficient: PositiveOr0 = setting(
        0.0, "Weight of the NLL of what environments and tools said."
    )
    positive_nll_coefficient: PositiveOr0 = setting(0.0, "Weight of the NLL of correct responses.")
    old_logprobs: Literal["recompute", "sampler", "interpolate"] = setting(
        "recompute",
        "Source of log p_old: a forward pass, the sampler, or between sampler and policy by age.",
    )
    router_replay: Literal["none", "old", "sampler"] = setting(
        "none", "Experts in training: of the current router, of old_logprobs, or of the sampler."
    )
    router_balance_coefficient: PositiveOr0 = setting(0.0, "Weight of the load-balance loss.")
    importance_cap: Cap = setting(0.0, "Token weight: min(p_trainer / p_sampler, cap); 0: none.")
    importance_floor: PositiveOr0 = setting(0.0, "Lower bound of that weight.")
    importance_ratio: Literal["token", "product", "sequence"] = setting(
        "token", "That ratio: per token, or product or geometric mean of the response."
    )
    rejection: Literal["none", "token", "product", "sequence", "worst"] = setting(
        "none", "Drop tokens or responses by their ratio to the sampler; 'worst': by any token."
    )
    rejection_low: PositiveOr0 = setting(0.5, "Lower bound of that ratio.")
    rejection_high: PositiveOr0 = setting(5.0, "Its upper bound; 0: none.")
    rejection_of: Literal["old", "new"] = setting(
        "old", "Policy of that ratio: before the step ('old'), or now ('new')."
    )
    rejection_sign: Literal["all", "negative"] = setting(
        "all", "Drop 'all' of those, or only if A < 0 ('negative')."
    )
    dynamic_sampling: bool = setting(True, "Keep only groups with 0 < correct < G, and refill.")
    reward_correct: float = setting(1.0, "Reward of a correct answer.")
    reward_wrong: float = setting(-1.0, "Reward of a wrong or missing answer.")
    overlong_punishment: bool = setting(True, "Soft punishment in the last tokens of the limit.")
    overlong_buffer_share: Share = setting(0.2, "Punished fraction of the limit.")
    length_penalty: PositiveOr0 = setting(
        0.0, "Punishment of the longest response of a group, times the pass rate; linear in length."
    )
    overlong_filtering: bool = setting(False, "Truncated responses get loss weight 0.")

    @staticmethod
    def preset(name: str) -> "Algorithm":
        """Return the published algorithm of this name. Raises `ConfigError`."""
        return registry.feature("presets").preset(name)

    @property
    def distils(self) -> bool:
        """Return True if the policy learns from a teacher."""
        return self.distillation != "none"

    @property
    def reads_teacher(self) -> bool:
        """Return True if a teacher's log-probs of the sampled tokens decide their advantages."""
        return self.distillation in ("reverse", "evidence")

    @property
    def reads_entropies(self) -> bool:
        """Return True if the entropies of the policy before the step decide its updates."""
        return self.top_entropy_fraction < 1 or self.entropy_target > 0

    @property
    def reads_all_old_logprobs(self) -> bool:
        """Return True if all scores by the policy before the step are read before its updates."""
        return (
            self.kl == "reward"
            or self.trained_responses == "pairs"
            or self.reads_teacher
            or self.covariance != "none"
            or self.second_moment_limit > 0
            or self.reads_entropies
            or bool({"energies", "log_ratios"} & {*traits(self.advantage)})
        )

    def scored_minibatches(self, updates: int) -> range:
        """Return the minibatches that a forward pass scores with the policy before the `updates`.

        The first update needs no such pass, because it differentiates the old policy itself: its
        ratio is 1. A KL penalty in the reward, pairs, log-probs of a teacher, and whatever chooses
        tokens of a minibatch read all scores before the first update.
        """
        if self.old_logprobs != "recompute":
            return range(0)
        return range(0 if self.reads_all_old_logprobs else 1, updates)
