"""An algorithm is a value: which advantage, ratio, clip, weights and filters one run uses.

Every method of the family multiplies the gradient of log p(token) by a coefficient (DeepSeekMath,
arXiv 2402.03300, section 5.2). The fields below say how that coefficient is formed, and the preset
table at the end gives the published choices. Nothing elsewhere asks for a paper's name.
"""

import dataclasses

from dapo_jax.settings import require, setting


@dataclasses.dataclass
class Algorithm:
    """How rewards become per-token coefficients. Defaults are DAPO's (arXiv 2503.14476)."""

    advantage: str = setting("group_zscore", "Estimator: a key of advantages.ESTIMATORS.")
    ratio: str = setting("token", "Importance ratio: a key of losses.RATIOS.")
    clip_low: float = setting(0.2, "The ratio is clipped below 1 - clip_low.")
    clip_high: float = setting(0.28, "The ratio is clipped above 1 + clip_high.")
    dual_clip: float = setting(10.0, "Cap c of the loss, -A * c, where A < 0; 0 switches it off.")
    aggregate: str = setting("token_mean", "Loss weights: a key of losses.LOSS_WEIGHTS.")
    old_logprobs: str = setting(
        "recompute", "'recompute' by the trainer's forward pass, or the 'sampler' ones."
    )
    dynamic_sampling: bool = setting(True, "Keep only groups with 0 < correct < G, and refill.")
    reward_correct: float = setting(1.0, "Reward of a right answer.")
    reward_wrong: float = setting(-1.0, "Reward of a wrong or missing answer.")
    overlong_punishment: bool = setting(True, "Soft punishment in the last tokens of the budget.")
    overlong_buffer_share: float = setting(
        0.2, "Share of max_response_tokens over which the punishment grows from 0 to -1."
    )
    overlong_filtering: bool = setting(False, "Truncated responses get loss weight 0.")


def dapo() -> Algorithm:
    """DAPO: clip-higher, dynamic sampling, token-level loss, soft overlong punishment, no KL."""
    return Algorithm()


def grpo() -> Algorithm:
    """GRPO (arXiv 2402.03300) without its KL term: the baseline of DAPO's Table 1."""
    return dataclasses.replace(
        dapo(),
        clip_high=0.2,
        dual_clip=0.0,
        aggregate="sequence_mean",
        dynamic_sampling=False,
        overlong_punishment=False,
    )


def sft() -> Algorithm:
    """Supervised fine-tuning: each token of a worked example has coefficient 1."""
    return dataclasses.replace(
        dapo(),
        advantage="one",
        ratio="none",
        dual_clip=0.0,
        dynamic_sampling=False,
        overlong_punishment=False,
    )


PRESETS = {"dapo": dapo, "grpo": grpo, "sft": sft}


def preset(name: str) -> Algorithm:
    """The algorithm of that name. Raises `ConfigError` that lists the names."""
    require(name in PRESETS, "algorithm preset", name, f"one of {', '.join(PRESETS)}")
    return PRESETS[name]()
