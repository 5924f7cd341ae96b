"""Settings of an algorithm: how the coefficient of each token's gradient is formed.

Every method of the family multiplies the gradient of log p(token) by a coefficient (DeepSeekMath,
arXiv 2402.03300, section 5.2):

    A * weight(ratio) * [inside the region] * importance weight * [not rejected] - KL's part

The fields say how each factor is formed; `dapo_jax/algorithms.py` has the published choices.
"""

from typing import Annotated, Literal

from dapo_jax.runtime.rules import (
    Choices,
    CountOr0,
    Positive,
    PositiveOr0,
    Range,
    Share,
    Unit,
    When,
)
from dapo_jax.runtime.settings import section, setting

# Keys of advantages.ESTIMATORS and losses.LOSS_WEIGHTS.
ESTIMATORS = Choices(
    "group_zscore group_centre leave_one_out length_weighted_centre reward_parts pass_at_k "
    "best_minus_second batch_centre reward reward_to_go gae length_adaptive_gae one "
    "preference zero".split()
)
AGGREGATES = Choices(
    "token_mean token_mean_per_group sequence_mean sequence_sum token_sum_over_budget "
    "pair_sum".split()
)
# Estimators by what they read; one that is in none of these reads the reward alone.
GROUP_ESTIMATORS = (
    "group_zscore group_centre leave_one_out length_weighted_centre reward_parts pass_at_k "
    "best_minus_second preference"
).split()
OF_VALUES = ("gae", "length_adaptive_gae")
PER_TOKEN = ("reward_to_go", *OF_VALUES)
REWARD_FREE_ESTIMATORS = ("one", "preference", "zero")
CENTRED = ("group_centre", "leave_one_out", "length_weighted_centre")
READS_OLD_LOGPROBS = When(
    "algorithm.ratio algorithm.kl algorithm.kl_to algorithm.kl_importance algorithm.rejection "
    "algorithm.importance_cap algorithm.advantage algorithm.distillation",
    lambda ratio, kl, kl_to, kl_importance, rejection, cap, advantage, distillation: (
        ratio != "none"
        or kl == "reward"
        or (kl == "loss" and (kl_to == "old" or kl_importance))
        or rejection != "none"
        or cap > 0
        or advantage == "preference"
        or distillation == "reverse"
    ),
)
HAS_RATIO = When("algorithm.ratio", "token sequence product geometric")
IF_REGION = When("algorithm.region", "ratio log_ratio tv kl")
IF_CRITIC, IF_CAP = When("algorithm.critic"), When("algorithm.importance_cap")
IF_REJECTION = When("algorithm.rejection", "token product sequence worst")
IF_BOUNDED = When(
    "algorithm.ratio algorithm.weight", lambda ratio, weight: (ratio, weight) != ("none", "ratio")
)
IF_KL = When("algorithm.kl", "loss reward")
IF_DECAY = When("algorithm.weight", "sapo gamma")
IF_GAMMA = When("algorithm.weight", "gamma")
IF_TEACHER = When("algorithm.distillation", "reverse jsd")
IF_JSD = When("algorithm.distillation", "jsd")


@section
class Algorithm:
    """Coefficients of the tokens. Defaults are DAPO's (arXiv 2503.14476)."""

    advantage: Annotated[str, ESTIMATORS] = setting(
        "group_zscore", "Estimator: a key of advantages.ESTIMATORS."
    )
    advantage_scale: Literal["none", "batch", "mean", "informative"] = setting(
        "none",
        "Scale of a centred advantage: a key of advantages.SCALES.",
        read=When("algorithm.advantage", Choices(CENTRED)),
    )
    pass_k: Annotated[int, Range(at_least=2)] = setting(
        4, "The k of pass_at_k.", read=When("algorithm.advantage", "pass_at_k")
    )
    whiten: bool = setting(False, "Advantages get mean 0 and variance 1 over trained tokens.")
    gamma: Share = setting(
        1.0,
        "Discount per token of reward_to_go and the gae estimators.",
        read=When("algorithm.advantage", Choices(PER_TOKEN)),
    )
    lambda_policy: Unit = setting(
        1.0, "The lambda of gae's advantages.", read=When("algorithm.advantage", "gae")
    )
    lambda_value: Unit = setting(
        1.0,
        "GAE's lambda of the returns that the critic learns.",
        read=When("algorithm.advantage", Choices(OF_VALUES)),
    )
    lambda_alpha: Positive = setting(
        0.05,
        "length_adaptive_gae: lambda of a response of n tokens is 1 - 1 / (alpha * n).",
        read=When("algorithm.advantage", "length_adaptive_gae"),
    )
    critic: bool = setting(False, "Train a value model beside the policy; the gae estimators ask.")
    critic_pretrain_steps: CountOr0 = setting(
        0,
        "First rollout steps that train the critic alone, unless critic.pretrain_steps says.",
        read=IF_CRITIC,
    )
    value_clip: PositiveOr0 = setting(
        0.2, "Values move at most this far from the old ones; 0: freely.", read=IF_CRITIC
    )
    ratio: Literal["token", "sequence", "product", "geometric", "none"] = setting(
        "token", "Importance ratio p / p_old: a key of losses.RATIOS."
    )
    region: Literal["ratio", "log_ratio", "tv", "kl", "none"] = setting(
        "ratio",
        "Trust region in which a token has a gradient, by its 'ratio', 'log_ratio', or how far its "
        "probability moved ('tv', 'kl'): a key of losses.REGIONS.",
    )
    clip_low: Unit = setting(
        0.2, "The region ends at 1 - clip_low (-clip_low, or that far down).", read=IF_REGION
    )
    clip_high: PositiveOr0 = setting(
        0.28, "The region ends at 1 + clip_high (clip_high, or that far up).", read=IF_REGION
    )
    region_sides: Literal["sign", "both"] = setting(
        "sign",
        "'sign': the end at which the advantage pushes outwards; 'both' ends for every token.",
        read=IF_REGION,
    )
    dual_clip: PositiveOr0 = setting(
        10.0, "Cap c of the loss, -A * c, where A < 0; 0 switches it off."
    )
    weight: Literal["ratio", "sapo", "gamma", "topr"] = setting(
        "ratio", "Weight of log p's gradient by the ratio: a key of losses.WEIGHTS.", read=HAS_RATIO
    )
    weight_low: PositiveOr0 = setting(
        0.0, "The weight reads ratios below this as this.", read=IF_BOUNDED
    )
    weight_high: PositiveOr0 = setting(
        0.0, "The weight reads ratios above this as this; 0: no bound.", read=IF_BOUNDED
    )
    decay_positive: Positive = setting(
        1.0, "sapo's temperature, gamma's decay, where A > 0.", read=IF_DECAY
    )
    decay_negative: Positive = setting(1.0, "The same where A < 0.", read=IF_DECAY)
    power_positive: PositiveOr0 = setting(1.0, "gamma's power where A > 0.", read=IF_GAMMA)
    power_negative: PositiveOr0 = setting(1.0, "gamma's power where A < 0.", read=IF_GAMMA)
    aggregate: Annotated[str, AGGREGATES] = setting(
        "token_mean", "Loss weights: a key of losses.LOSS_WEIGHTS."
    )
    trained_responses: Literal["all", "correct", "pairs"] = setting(
        "all", "Which responses carry loss: a key of losses.TRAINED_RESPONSES."
    )
    token_weights: str = setting(
        "", "module:function(group, sample) -> a weight per response token; empty: 1."
    )
    reference: bool = setting(False, "Hold a frozen reference policy (model.reference_folder).")
    kl: Literal["none", "loss", "reward"] = setting(
        "none", "KL to another policy: 'none', in the 'loss' or in the 'reward'."
    )
    kl_to: Literal["reference", "old", "sampler"] = setting(
        "reference",
        "That policy: the reference, the policy before the step, or the one that sampled.",
        read=When("algorithm.kl", "loss"),
    )
    kl_estimator: Literal["k1", "k2", "k3", "k3+"] = setting(
        "k3", "A key of losses.KL_ESTIMATORS.", read=IF_KL
    )
    kl_importance: bool = setting(
        False,
        "The estimate times the token's ratio, which makes k3's gradient unbiased off policy.",
        read=When("algorithm.kl", "loss"),
    )
    kl_coefficient: PositiveOr0 = setting(0.0, "Weight of that KL.")
    preference_beta: Positive = setting(
        0.1,
        "DPO's beta: how hard a margin pulls, in 1 / nats.",
        read=When("algorithm.advantage", "preference"),
    )
    distillation: Literal["none", "reverse", "jsd"] = setting(
        "none",
        "From the teacher: 'reverse' adds log p_teacher - log p_old of each drawn token to its "
        "advantage; 'jsd' adds a divergence of whole distributions to the loss.",
    )
    distillation_coefficient: Positive = setting(1.0, "Weight of either.", read=IF_TEACHER)
    distillation_beta: Unit = setting(
        0.5,
        "Of the generalised Jensen-Shannon divergence: 0 is KL(teacher || policy), 1 the reverse.",
        read=IF_JSD,
    )
    distillation_top_k: CountOr0 = setting(
        0,
        "Tells the teacher's k likeliest tokens apart, and all others together; 0: every token.",
        read=IF_JSD,
    )
    distillation_temperature: Positive = setting(
        1.0, "Softmax temperature of teacher and policy in that divergence.", read=IF_JSD
    )
    entropy_coefficient: PositiveOr0 = setting(0.0, "Weight of the entropy bonus.")
    positive_nll_coefficient: PositiveOr0 = setting(
        0.0, "Weight of the mean negative log-prob over the tokens of right responses (VAPO)."
    )
    old_logprobs: Literal["recompute", "sampler"] = setting(
        "recompute",
        "Of the policy before the step: 'recompute' by a forward pass, or those of the 'sampler'.",
        read=READS_OLD_LOGPROBS,
    )
    router_replay: Literal["none", "old", "sampler"] = setting(
        "none",
        "Experts that tokens take while the policy learns: those that its router chooses then, or "
        "had chosen in the forward pass of 'old_logprobs' or in the 'sampler'.",
    )
    router_balance_coefficient: PositiveOr0 = setting(
        0.0, "Weight of the routers' load-balance loss."
    )
    importance_cap: Annotated[float, Range(at_least=1, also=0)] = setting(
        0.0, "Tokens weigh min(p_trainer / p_sampler, cap); 0 switches the correction off."
    )
    importance_ratio: Literal["token", "product", "sequence"] = setting(
        "token",
        "That ratio: of the token, or the product or geometric mean of its response's.",
        read=IF_CAP,
    )
    rejection: Literal["none", "token", "product", "sequence", "worst"] = setting(
        "none",
        "Ratio to the sampler's probability whose bounds take tokens, or whole responses, out of "
        "the loss: a key of corrections.POOLS.",
    )
    rejection_low: PositiveOr0 = setting(0.5, "Lower bound of that ratio.", read=IF_REJECTION)
    rejection_high: PositiveOr0 = setting(
        5.0, "Upper bound of that ratio; 0: none.", read=IF_REJECTION
    )
    rejection_of: Literal["old", "new"] = setting(
        "old", "Whose ratio: the policy before the step, or as it is trained.", read=IF_REJECTION
    )
    rejection_sign: Literal["all", "negative"] = setting(
        "all", "Reject all of those, or only where A < 0.", read=IF_REJECTION
    )
    dynamic_sampling: bool = setting(True, "Keep only groups with 0 < correct < G, and refill.")
    reward_correct: float = setting(1.0, "Reward of a right answer.")
    reward_wrong: float = setting(-1.0, "Reward of a wrong or missing answer.")
    overlong_punishment: bool = setting(True, "Soft punishment in the last tokens of the budget.")
    overlong_buffer_share: Share = setting(
        0.2,
        "Share of max_response_tokens over which the punishment grows from 0 to -1.",
        read=When("algorithm.overlong_punishment"),
    )
    overlong_filtering: bool = setting(False, "Truncated responses get loss weight 0.")

    def scores_old_policy(self, updates: int) -> bool:
        """Return True if a forward pass scores the policy before the `updates` of a step.

        A single update needs none: its own forward pass is the old policy, so the ratio is 1.
        """
        return self.old_logprobs == "recompute" and (
            updates > 1
            or self.kl == "reward"
            or self.trained_responses == "pairs"
            or self.distillation == "reverse"
        )
