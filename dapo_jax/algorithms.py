"""An algorithm is a value: which advantage, ratio, clip, weights and filters one run uses.

Every method of the family multiplies the gradient of log p(token) by a coefficient (DeepSeekMath,
arXiv 2402.03300, section 5.2). The fields below say how that coefficient is formed, and the preset
table at the end gives the published choices. Nothing elsewhere asks for a paper's name.
"""

import dataclasses
from collections.abc import Callable
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
from dapo_jax.runtime.settings import require, section, setting

# Keys of advantages.ESTIMATORS and losses.LOSS_WEIGHTS.
ESTIMATORS = Choices(
    "group_zscore group_centre leave_one_out batch_centre reward reward_to_go gae "
    "length_adaptive_gae one preference".split()
)
AGGREGATES = Choices(
    "token_mean token_mean_per_group sequence_mean sequence_sum token_sum_over_budget "
    "pair_sum".split()
)
# Estimators by what they read; one that is in none of these reads the reward alone.
OF_GROUPS = ("group_zscore", "group_centre", "leave_one_out", "preference")
OF_VALUES = ("gae", "length_adaptive_gae")
PER_TOKEN = ("reward_to_go", *OF_VALUES)
OF_NO_REWARD = ("one", "preference")
READS_OLD_LOGPROBS = When(
    "algorithm.ratio algorithm.kl algorithm.advantage",
    lambda ratio, kl, advantage: ratio != "none" or kl == "reward" or advantage == "preference",
)
IF_CLIPPED, IF_CRITIC = When("algorithm.clip"), When("algorithm.critic")


@section
class Algorithm:
    """Coefficients of the tokens. Defaults are DAPO's (arXiv 2503.14476)."""

    advantage: Annotated[str, ESTIMATORS] = setting(
        "group_zscore", "Estimator: a key of advantages.ESTIMATORS."
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
        0.2,
        "Values move at most this far from the old ones; 0: freely.",
        read=IF_CRITIC,
    )
    ratio: Literal["token", "sequence", "none"] = setting(
        "token", "Importance ratio: a key of losses.RATIOS."
    )
    clip: bool = setting(True, "Whether the ratio is clipped.")
    clip_low: Unit = setting(0.2, "The ratio is clipped below 1 - clip_low.", read=IF_CLIPPED)
    clip_high: PositiveOr0 = setting(
        0.28, "The ratio is clipped above 1 + clip_high.", read=IF_CLIPPED
    )
    dual_clip: PositiveOr0 = setting(
        10.0, "Cap c of the loss, -A * c, where A < 0; 0 switches it off."
    )
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
        "none", "KL to the reference: 'none', in the 'loss' or in the 'reward'."
    )
    kl_estimator: Literal["k1", "k2", "k3"] = setting(
        "k3", "A key of losses.KL_ESTIMATORS.", read=When("algorithm.kl", "loss reward")
    )
    kl_coefficient: PositiveOr0 = setting(0.0, "Weight of that KL.")
    preference_beta: Positive = setting(
        0.1,
        "DPO's beta: how hard a margin pulls, in 1 / nats.",
        read=When("algorithm.advantage", "preference"),
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
    importance_cap: Annotated[float, Range(at_least=1, also=0)] = setting(
        0.0, "Tokens weigh min(p_trainer / p_sampler, cap); 0 switches the correction off."
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


def _changed(start: Callable[[], Algorithm], **changes) -> Callable[[], Algorithm]:
    return lambda: dataclasses.replace(start(), **changes)


# Published choices. Learning rates, G and updates per batch belong to the run's config.
dapo = Algorithm  # 2503.14476
reinforce = _changed(  # Williams 1992, with the batch mean as its baseline
    dapo,
    advantage="batch_centre",
    ratio="none",
    clip=False,
    dual_clip=0.0,
    aggregate="sequence_sum",
    dynamic_sampling=False,
    overlong_punishment=False,
)
_grpo_without_kl = _changed(
    dapo,
    clip_high=0.2,
    dual_clip=0.0,
    aggregate="sequence_mean",
    dynamic_sampling=False,
    overlong_punishment=False,
)
_KL_IN_LOSS = {"reference": True, "kl": "loss"}
_KL_IN_REWARD = {"reference": True, "kl": "reward", "kl_estimator": "k1"}
grpo = _changed(_grpo_without_kl, **_KL_IN_LOSS, kl_coefficient=0.04)  # 2402.03300
_token_ppo = _changed(_grpo_without_kl, aggregate="token_mean", whiten=True)
ppo = _changed(  # 1707.06347; KL as in 2203.02155
    _token_ppo,
    **_KL_IN_REWARD,
    kl_coefficient=0.02,
    advantage="gae",
    lambda_policy=0.95,
    lambda_value=0.95,
    critic=True,
)
dr_grpo = _changed(  # 2503.20783; dividing by no std, +-1 would double the gradient of 0/1
    _grpo_without_kl,
    advantage="group_centre",
    aggregate="token_sum_over_budget",
    reward_wrong=0.0,
)
rloo = _changed(  # 2402.14740
    reinforce, **_KL_IN_REWARD, kl_coefficient=0.03, advantage="leave_one_out"
)
reinforce_pp = _changed(  # 2501.03262
    _token_ppo, **_KL_IN_REWARD, kl_coefficient=0.01, advantage="reward_to_go"
)
reinforce_pp_baseline = _changed(  # 2501.03262
    _token_ppo,
    **_KL_IN_LOSS,
    kl_estimator="k2",
    kl_coefficient=0.01,
    advantage="group_centre",
)
gspo = _changed(  # 2507.18071
    _grpo_without_kl, ratio="sequence", clip_low=3e-4, clip_high=4e-4
)
vapo = _changed(  # 2504.05118
    _token_ppo,
    clip_high=0.28,
    advantage="length_adaptive_gae",
    critic=True,
    critic_pretrain_steps=50,
    positive_nll_coefficient=0.1,
)
sft = _changed(  # every token of a worked example has coefficient 1
    reinforce, advantage="one", aggregate="token_mean"
)
rft = _changed(sft, trained_responses="correct")  # 2308.01825
dpo = _changed(  # 2305.18290, online, on pairs of one group
    reinforce,
    advantage="preference",
    trained_responses="pairs",
    aggregate="pair_sum",
    reference=True,
    dynamic_sampling=True,
)

PRESETS: dict[str, Callable[[], Algorithm]] = {
    "reinforce": reinforce,
    "ppo": ppo,
    "grpo": grpo,
    "dapo": dapo,
    "dr_grpo": dr_grpo,
    "rloo": rloo,
    "reinforce_pp": reinforce_pp,
    "reinforce_pp_baseline": reinforce_pp_baseline,
    "gspo": gspo,
    "vapo": vapo,
    "sft": sft,
    "rft": rft,
    "dpo": dpo,
}


def preset(name: str) -> Algorithm:
    """The algorithm of that name. Raises `ConfigError` that lists the names.

    >>> dapo_jax.preset("dapo").clip_high, dapo_jax.preset("grpo").clip_high
    (0.28, 0.2)
    """
    require(name in PRESETS, "algorithm preset", name, f"one of {', '.join(PRESETS)}")
    return PRESETS[name]()
