"""Settings of an algorithm: the factors of each token's gradient coefficient.

Every method multiplies the gradient of log p(token) by a coefficient (arXiv 2402.03300, 5.2):

    A * weight(ratio) * [inside the region] * importance weight * [not rejected] - KL's part

`dapo_jax/algorithms.py` has the published choices of each factor.
"""

from typing import Annotated, Literal

from dapo_jax.config.rules import (
    Choices,
    CountOr0,
    OwnChoices,
    Positive,
    PositiveOr0,
    Range,
    Share,
    Unit,
    When,
    is_own,
)
from dapo_jax.config.settings import section, setting

# Keys of advantages.ESTIMATORS, and what an estimator needs: the rewards of a 'group', a 'centred'
# scale, an estimate 'per token', the critic's 'values', 'energies' of tokens, or 'no reward'.
ESTIMATOR_TRAITS = {
    "group_zscore": "group",
    "group_centre": "group centred",
    "leave_one_out": "group centred",
    "length_weighted_centre": "group centred",
    "token_baseline": "group per_token energies",
    "reward_parts": "group",
    "pass_at_k": "group",
    "best_minus_second": "group",
    "batch_centre": "",
    "reward": "",
    "reward_to_go": "per_token",
    "gae": "per_token values",
    "length_adaptive_gae": "per_token values",
    "one": "no_reward",
    "preference": "group no_reward",
    "zero": "no_reward",
}


def _estimators(trait: str) -> Choices:
    return Choices(name for name, traits in ESTIMATOR_TRAITS.items() if trait in traits.split())


def _if(name: str, words: str) -> When:
    """Return a condition that also holds for a user's own function, which may read anything."""
    return When(name, lambda value: value in words.split() or is_own(value))


def _if_advantage(trait: str) -> When:
    return _if("algorithm.advantage", " ".join(_estimators(trait)))


GROUP_ESTIMATORS = _estimators("group")
OF_VALUES = _estimators("values")
OF_ENERGIES = _estimators("energies")
REWARD_FREE_ESTIMATORS = _estimators("no_reward")
AGGREGATES = OwnChoices(  # keys of losses.LOSS_WEIGHTS
    "token_mean token_mean_per_group sequence_mean sequence_sum token_sum_over_budget "
    "pair_sum".split()
)
# Arguments of the functions that a user may give in place of a name.
OWN_FUNCTIONS = {
    "advantage": "algorithm, feedback",
    "ratio": "log_ratio, segment_ids, trained",
    "region": "algorithm, ratio, p, old",
    "weight": "algorithm, ratio, positive",
    "kl_estimator": "logprobs, reference_logprobs",
    "aggregate": "tokens, groups, budget",
}
READS_OLD_LOGPROBS = When(
    "algorithm.ratio algorithm.kl algorithm.kl_to algorithm.kl_importance algorithm.rejection "
    "algorithm.importance_cap algorithm.advantage algorithm.distillation algorithm.covariance",
    lambda ratio, kl, kl_to, kl_importance, rejection, cap, advantage, distillation, covariance: (
        ratio != "none"
        or kl == "reward"
        or (kl == "loss" and (kl_to == "old" or kl_importance))
        or rejection != "none"
        or cap > 0
        or advantage == "preference"
        or distillation == "reverse"
        or covariance != "none"
    ),
)
CENTRED = _if_advantage("centred")
PER_TOKEN = _if_advantage("per_token")
HAS_VALUES = _if_advantage("values")
IF_GAE = _if("algorithm.advantage", "gae")
IF_ADAPTIVE = _if("algorithm.advantage", "length_adaptive_gae")
IF_PASS_AT_K = _if("algorithm.advantage", "pass_at_k")
IF_PREFERENCE = When("algorithm.advantage", "preference")
HAS_RATIO = _if("algorithm.ratio", "token sequence product geometric")
IF_REGION = _if("algorithm.region", "ratio log_ratio tv kl")
IF_CRITIC = When("algorithm.critic")
IF_CAP = When("algorithm.importance_cap")
REJECTS = When("algorithm.rejection", "token product sequence worst")
IF_BOUNDED = When(
    "algorithm.ratio algorithm.weight", lambda ratio, weight: (ratio, weight) != ("none", "ratio")
)
CHOOSES = When("algorithm.covariance", "clip kl")
CLIPS_COVARIANCE = When("algorithm.covariance", "clip")
IF_KL = When("algorithm.kl", "loss reward")
KL_LOSS = When("algorithm.kl", "loss")
IF_DECAY = _if("algorithm.weight", "sapo gamma")
IF_GAMMA = _if("algorithm.weight", "gamma")
IF_TEACHER = When("algorithm.distillation", "reverse jsd")
IF_JSD = When("algorithm.distillation", "jsd")
PUNISHES = When("algorithm.overlong_punishment")


@section
class Algorithm:
    """Coefficients of the tokens. Defaults are DAPO's (arXiv 2503.14476)."""

    advantage: Annotated[str, OwnChoices(ESTIMATOR_TRAITS)] = setting(
        "group_zscore", "Estimator of the advantage."
    )
    advantage_scale: Literal["none", "batch", "mean", "informative"] = setting(
        "none", "Scale of an advantage that is centred in its group.", read=CENTRED
    )
    pass_k: Annotated[int, Range(at_least=2)] = setting(4, "Set size in pass@k.", read=IF_PASS_AT_K)
    whiten: bool = setting(False, "Advantages get mean 0 and variance 1 over trained tokens.")
    gamma: Share = setting(1.0, "Discount per token.", read=PER_TOKEN)
    lambda_policy: Unit = setting(1.0, "GAE's lambda of the advantages.", read=IF_GAE)
    lambda_value: Unit = setting(1.0, "GAE's lambda of the critic's returns.", read=HAS_VALUES)
    lambda_alpha: Positive = setting(0.05, "Lambda is 1 - 1 / (alpha * tokens).", read=IF_ADAPTIVE)
    critic: bool = setting(False, "Train a value model too; the gae estimators need it.")
    critic_pretrain_steps: CountOr0 = setting(0, "First steps of the critic alone.", read=IF_CRITIC)
    value_clip: PositiveOr0 = setting(0.2, "Largest change of a value; 0: any.", read=IF_CRITIC)
    ratio: Annotated[str, OwnChoices("token sequence product geometric none".split())] = setting(
        "token", "Importance ratio p / p_old: of a token or of the response."
    )
    region: Annotated[str, OwnChoices("ratio log_ratio tv kl none".split())] = setting(
        "ratio", "Trust region of the ratio or the probability ('tv', 'kl'); no gradient outside."
    )
    clip_low: Unit = setting(0.2, "Lower end of the region: 1 - clip_low.", read=IF_REGION)
    clip_high: PositiveOr0 = setting(0.28, "Upper end of it: 1 + clip_high.", read=IF_REGION)
    region_sides: Literal["sign", "both"] = setting(
        "sign", "'sign': the end towards which the advantage pushes; 'both' ends.", read=IF_REGION
    )
    dual_clip: PositiveOr0 = setting(10.0, "Largest ratio with a gradient if A < 0; 0: any.")
    covariance: Literal["none", "clip", "kl"] = setting(
        "none", "Tokens chosen by the covariance of log-prob and A: no gradient, or the only KL."
    )
    covariance_fraction: Share = setting(2e-4, "Fraction of tokens to choose.", read=CHOOSES)
    covariance_low: PositiveOr0 = setting(1.0, "Choose above this one.", read=CLIPS_COVARIANCE)
    covariance_high: PositiveOr0 = setting(5.0, "Choose below this one.", read=CLIPS_COVARIANCE)
    weight: Annotated[str, OwnChoices("ratio sapo gamma topr".split())] = setting(
        "ratio", "How the ratio weights the gradient of log p.", read=HAS_RATIO
    )
    weight_low: PositiveOr0 = setting(0.0, "Lower bound of that ratio.", read=IF_BOUNDED)
    weight_high: PositiveOr0 = setting(0.0, "Its upper bound; 0: none.", read=IF_BOUNDED)
    decay_positive: Positive = setting(1.0, "Decay of the weight if A > 0.", read=IF_DECAY)
    decay_negative: Positive = setting(1.0, "The same if A < 0.", read=IF_DECAY)
    power_positive: PositiveOr0 = setting(1.0, "Power of the ratio if A > 0.", read=IF_GAMMA)
    power_negative: PositiveOr0 = setting(1.0, "Power of the ratio if A < 0.", read=IF_GAMMA)
    aggregate: Annotated[str, AGGREGATES] = setting("token_mean", "How tokens are averaged.")
    trained_responses: Literal["all", "correct", "pairs"] = setting("all", "Which are trained on.")
    token_weights: str = setting("", "module:function(group, sample) -> token weights; empty: 1.")
    reference: bool = setting(False, "Hold a frozen reference policy (model.reference_folder).")
    kl: Literal["none", "loss", "reward"] = setting(
        "none", "KL to another policy: 'none', in the 'loss' or in the 'reward'."
    )
    kl_to: Literal["reference", "old", "sampler"] = setting(
        "reference", "KL to the 'reference', the 'old' policy or the 'sampler'.", read=KL_LOSS
    )
    kl_estimator: Annotated[str, OwnChoices("k1 k2 k3 k3+ abs".split())] = setting(
        "k3", "KL estimator.", read=IF_KL
    )
    kl_importance: bool = setting(False, "KL times the ratio, unbiased off policy.", read=KL_LOSS)
    kl_coefficient: PositiveOr0 = setting(0.0, "Weight of the KL.")
    preference_beta: Positive = setting(0.1, "DPO's beta, in 1 / nats.", read=IF_PREFERENCE)
    distillation: Literal["none", "reverse", "jsd"] = setting(
        "none", "'reverse' adds log p_teacher - log p_old to advantages; 'jsd' is in the loss."
    )
    distillation_coefficient: Positive = setting(1.0, "Weight of distillation.", read=IF_TEACHER)
    distillation_beta: Unit = setting(0.5, "0: KL(teacher || policy); 1: the reverse.", read=IF_JSD)
    distillation_top_k: CountOr0 = setting(
        0, "Compare the teacher's k likeliest tokens, and the rest as one; 0: all.", read=IF_JSD
    )
    distillation_temperature: Positive = setting(1.0, "Temperature of both models.", read=IF_JSD)
    entropy_coefficient: PositiveOr0 = setting(0.0, "Weight of the entropy bonus.")
    positive_nll_coefficient: PositiveOr0 = setting(0.0, "Weight of the NLL of correct responses.")
    old_logprobs: Literal["recompute", "sampler"] = setting(
        "recompute", "Source of log p_old: a forward pass or the sampler.", read=READS_OLD_LOGPROBS
    )
    router_replay: Literal["none", "old", "sampler"] = setting(
        "none", "Experts in training: of the current router, of old_logprobs, or of the sampler."
    )
    router_balance_coefficient: PositiveOr0 = setting(0.0, "Weight of the load-balance loss.")
    importance_cap: Annotated[float, Range(at_least=1, also=0)] = setting(
        0.0, "Weight of a token: min(p_trainer / p_sampler, cap); 0: no correction."
    )
    importance_floor: PositiveOr0 = setting(0.0, "Lower bound of that weight.", read=IF_CAP)
    importance_ratio: Literal["token", "product", "sequence"] = setting(
        "token", "That ratio: per token, or product or geometric mean of the response.", read=IF_CAP
    )
    rejection: Literal["none", "token", "product", "sequence", "worst"] = setting(
        "none", "Drop tokens or responses by their ratio to the sampler; 'worst': by any token."
    )
    rejection_low: PositiveOr0 = setting(0.5, "Lower bound of that ratio.", read=REJECTS)
    rejection_high: PositiveOr0 = setting(5.0, "Its upper bound; 0: none.", read=REJECTS)
    rejection_of: Literal["old", "new"] = setting(
        "old", "Policy of that ratio: before the step ('old'), or now ('new').", read=REJECTS
    )
    rejection_sign: Literal["all", "negative"] = setting(
        "all", "Drop 'all' of those, or only if A < 0 ('negative').", read=REJECTS
    )
    dynamic_sampling: bool = setting(True, "Keep only groups with 0 < correct < G, and refill.")
    reward_correct: float = setting(1.0, "Reward of a correct answer.")
    reward_wrong: float = setting(-1.0, "Reward of a wrong or missing answer.")
    overlong_punishment: bool = setting(True, "Soft punishment in the last tokens of the limit.")
    overlong_buffer_share: Share = setting(0.2, "Punished fraction of the limit.", read=PUNISHES)
    overlong_filtering: bool = setting(False, "Truncated responses get loss weight 0.")

    @property
    def distils(self) -> bool:
        """Return True if the policy learns from a teacher."""
        return self.distillation != "none"

    def scored_minibatches(self, updates: int) -> range:
        """Return the minibatches that a forward pass scores with the policy before the `updates`.

        The first update needs no such pass, because it differentiates the old policy itself: its
        ratio is 1. A KL penalty in the reward, pairs, reverse distillation, covariances and
        energies read all log-probs before the first update.
        """
        if self.old_logprobs != "recompute":
            return range(0)
        is_read_before = (
            self.kl == "reward"
            or self.trained_responses == "pairs"
            or self.distillation == "reverse"
            or self.covariance != "none"
            or self.advantage in OF_ENERGIES
        )
        return range(0 if is_read_before else 1, updates)
