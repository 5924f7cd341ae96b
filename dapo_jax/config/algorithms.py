"""The table of published algorithms; each is a value of the fields in `algorithm.py`.

No other module depends on the name of an algorithm.
"""

import dataclasses
from collections.abc import Callable

from dapo_jax.config.algorithm import Algorithm
from dapo_jax.types.errors import require


def _changed(start: Callable[[], Algorithm], **changes) -> Callable[[], Algorithm]:
    """Return a factory of an algorithm with some fields of another changed."""
    return lambda: dataclasses.replace(start(), **changes)


# Learning rate, group size and updates per rollout batch are settings of a run.
dapo = Algorithm  # 2503.14476
reinforce = _changed(  # Williams 1992, with the batch mean as its baseline
    dapo,
    advantage="batch_centre",
    ratio="none",
    region="none",
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
dr_grpo = _changed(  # 2503.20783; without a std, rewards of +-1 would double the gradient of 0/1
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
gspo = _changed(  # 2507.18071; sequence ratios need no router replay
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
sft = _changed(  # imitation of worked examples
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

# Policy losses.
_unbounded_grpo = _changed(_grpo_without_kl, region="none", clip_high=dapo().clip_high)
cispo = _changed(  # 2506.13585, without a lower bound; the cap of ScaleRL, 2510.13786
    _unbounded_grpo, weight_high=5.0, aggregate="token_mean"
)
dppo_tv = _changed(  # 2602.04879: against the sampler's probabilities, truncated at 20
    _grpo_without_kl,
    region="tv",
    clip_low=0.15,
    clip_high=0.15,
    weight_high=20.0,
    old_logprobs="sampler",
    aggregate="token_mean",
)
dppo_kl = _changed(dppo_tv, region="kl", clip_low=0.05, clip_high=0.05)  # 2602.04879
prime_rl = _changed(  # prime-rl's default: dppo_tv with a KL to the sampler
    dppo_tv,
    clip_low=0.2,
    clip_high=0.2,
    advantage="group_centre",
    kl="loss",
    kl_to="sampler",
    kl_estimator="k2",
    kl_coefficient=2e-3,
)
ipo = _changed(  # prime-rl's: the region bounds both signs of the advantage
    prime_rl, region_sides="both", clip_low=0.1, clip_high=0.1
)
sapo = _changed(_unbounded_grpo, weight="sapo", decay_negative=1.05)  # 2511.20347
gmpo = _changed(  # 2507.20673
    _grpo_without_kl, ratio="geometric", region="log_ratio", clip_low=0.4, clip_high=0.4
)
luspo = _changed(  # 2602.05261
    gspo, aggregate="sequence_sum", clip_low=2e-3, clip_high=2.5e-3
)
gspo_token = _changed(gspo, advantage="reward_to_go", whiten=True)  # 2507.18071, equation 13
vespo = _changed(  # 2602.10693
    _unbounded_grpo,
    ratio="product",
    weight="gamma",
    power_positive=2.0,
    decay_positive=3.0,
    power_negative=3.0,
    decay_negative=2.0,
    aggregate="sequence_sum",
)
topr = _changed(  # 2503.14286
    _unbounded_grpo,
    advantage="reward",
    ratio="product",
    weight="topr",
    aggregate="sequence_sum",
)
dro = _changed(  # 2405.19107, with the group mean in place of its value model
    reinforce,
    advantage="group_centre",
    kl="loss",
    kl_to="old",
    kl_estimator="k2",
    kl_coefficient=0.1,
)
gpg = _changed(  # 2504.02546
    reinforce, advantage="group_centre", advantage_scale="informative", aggregate="token_mean"
)
# Corrections for a sampler with other numerics or an older policy.
_TOKEN_GRPO = {"aggregate": "token_mean"}
tis = _changed(_grpo_without_kl, **_TOKEN_GRPO, importance_cap=2.0)  # truncated importance weights
sequence_tis = _changed(tis, importance_ratio="product")
icepop = _changed(  # 2510.18855
    _grpo_without_kl, **_TOKEN_GRPO, importance_cap=5.0, rejection="token"
)
sequence_mis = _changed(  # the geometric mean ratio of a response is within 0.1 %
    _grpo_without_kl,
    **_TOKEN_GRPO,
    rejection="sequence",
    rejection_low=0.999,
    rejection_high=1.001,
)
worst_token_mis = _changed(  # rejects a response with a token ratio below 1e-4
    sequence_mis, rejection="worst", rejection_low=1e-4, rejection_high=0.0
)
deepseek_v3p2 = _changed(  # 2512.02556: off-policy sequence masking, unbiased KL
    grpo,
    kl_importance=True,
    rejection="sequence",
    rejection_low=0.9,
    rejection_high=0.0,
    rejection_of="new",
    rejection_sign="negative",
)
# Advantages.
lite_ppo = _changed(  # 2508.08221
    _grpo_without_kl, **_TOKEN_GRPO, advantage="group_centre", advantage_scale="batch"
)
maxrl = _changed(  # 2602.02710
    reinforce, advantage="group_centre", advantage_scale="mean", reward_wrong=0.0
)
opo = _changed(reinforce, advantage="length_weighted_centre", aggregate="token_mean")  # 2505.23585
gdpo = _changed(_grpo_without_kl, advantage="reward_parts")  # 2601.05242
pass_at_k = _changed(  # 2508.10751
    _grpo_without_kl, **_TOKEN_GRPO, advantage="pass_at_k", clip_high=0.28
)
best_minus_second = _changed(reinforce, advantage="best_minus_second")  # 2503.19595
otb = _changed(reinforce, advantage="token_baseline")  # 2602.07078
# Tokens of high covariance, 2505.22617; the paper's fraction for KL-Cov on 7B is 2e-3.
clip_cov = _changed(_grpo_without_kl, **_TOKEN_GRPO, covariance="clip")
kl_cov = _changed(
    _unbounded_grpo,
    **_TOKEN_GRPO,
    covariance="kl",
    kl="loss",
    kl_to="old",
    kl_estimator="abs",
    kl_coefficient=1.0,
)

# Tokens, lengths, entropies and old policies.
high_entropy = _changed(dapo, top_entropy_fraction=0.2)  # 2506.01939
adaptive_entropy = _changed(dapo, entropy_target=0.2)  # 2505.22312
length_penalty = _changed(dapo, overlong_punishment=False, length_penalty=0.25)  # prime-rl's
echo = _changed(grpo, observation_nll_coefficient=0.1)  # prime-rl's
fipo = _changed(dapo, future_kl_clip=0.2)  # 2603.19835
real = _changed(  # 2602.05630
    reinforce, advantage="real", aggregate="sequence_mean", dynamic_sampling=True
)
m2po = _changed(  # 2510.01161, whose ratio is to the sampler: a cap that no ratio reaches
    _unbounded_grpo, **_TOKEN_GRPO, second_moment_limit=0.04, importance_cap=1e9
)
dft = _changed(rft, probability_power=1.0)  # 2508.05629, on the policy's own correct responses
log_linear = _changed(  # AReaL's proximal policy between sampler and policy, by age
    _grpo_without_kl, **_TOKEN_GRPO, old_logprobs="interpolate"
)

# Distillation from a teacher on samples of the policy.
on_policy_distillation = _changed(  # Thinking Machines Lab, 2025; clipped as slime does
    _grpo_without_kl, **_TOKEN_GRPO, advantage="zero", distillation="reverse"
)
gkd = _changed(  # 2306.13649
    reinforce, **_TOKEN_GRPO, advantage="zero", distillation="jsd"
)
# Self-distillation: the teacher is the policy with a prompt of its own, `extras.teacher.prompt`.
sdft = _changed(  # 2601.19897, by sampled tokens in place of whole distributions
    reinforce, **_TOKEN_GRPO, advantage="zero", distillation="reverse"
)
opsd = _changed(sdft, aggregate="sequence_mean")  # 2601.18734, by sampled tokens
sdpo = _changed(  # 2601.20802, by sampled tokens; caps of the authors' code (lasgroup/SDPO)
    _unbounded_grpo,
    **_TOKEN_GRPO,
    advantage="zero",
    distillation="reverse",
    weight_high=2.0,
    importance_cap=2.0,
)
rlsd = _changed(  # 2604.03128, with the paper's first share of the evidence
    _grpo_without_kl, distillation="evidence", distillation_coefficient=0.5
)

_NAMES = (
    "reinforce ppo grpo dapo dr_grpo rloo reinforce_pp reinforce_pp_baseline gspo vapo sft "
    "rft dpo cispo dppo_tv dppo_kl prime_rl ipo sapo gmpo luspo gspo_token vespo topr dro "
    "gpg tis sequence_tis icepop sequence_mis worst_token_mis deepseek_v3p2 lite_ppo maxrl "
    "opo gdpo pass_at_k best_minus_second otb clip_cov kl_cov "
    "high_entropy adaptive_entropy length_penalty echo fipo real m2po dft log_linear "
    "on_policy_distillation gkd sdft opsd sdpo rlsd"
)
PRESETS: dict[str, Callable[[], Algorithm]] = {name: globals()[name] for name in _NAMES.split()}


def preset(name: str) -> Algorithm:
    """Return the algorithm of this name; raises `ConfigError` for an unknown name.

    >>> dapo_jax.preset("dapo").clip_high, dapo_jax.preset("grpo").clip_high
    (0.28, 0.2)
    """
    require(name in PRESETS, "algorithm preset", name, f"one of {', '.join(PRESETS)}")
    return PRESETS[name]()
