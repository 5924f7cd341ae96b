"""Ablation of DAPO (2503.14476, table 1): a rare strategy is long and right, a common one short.

dapo-jax train --config=configs/two_strategies.py:1_naive
dapo-jax train --config=configs/two_strategies.py:clip_higher+token_level    (any of the switches)
dapo-jax train --config=configs/two_strategies.py:dr_grpo                    (any of the claims)

The policy of configs/two_strategies_base.py answers at once with the sum of the first two operands,
mostly wrong for four to eight of them; five responses in a hundred work step by step and are mostly
right unless they start over until the budget cuts them off. Reinforcement has to find them.
"""

import operator
from typing import Any

from dapo_jax import algorithms
from dapo_jax.config.experiment import (
    Checkpoint,
    Compute,
    Config,
    Data,
    Evaluation,
    Log,
    Model,
    Optimizer,
    Packing,
    Rollout,
    Sampler,
)
from dapo_jax.types.errors import require

NAIVE = {  # DAPO's settings with every trick off, and no KL
    "clip_high": 0.2,
    "dynamic_sampling": False,
    "aggregate": "sequence_mean",
    "overlong_punishment": False,
}
DAPO = algorithms.preset("dapo")
SWITCHES = {
    "clip_higher": {"clip_high": DAPO.clip_high},
    "dynamic_sampling": {"dynamic_sampling": True},
    "token_level": {"aggregate": DAPO.aggregate},
    "overlong_punishment": {"overlong_punishment": True},
    "overlong_filtering": {"overlong_filtering": True},
}
# The paper does not say whether filtering stays beside the punishment; its last rung, DAPO as it
# was released, has none, so here the punishment takes its place.
RUNGS = {
    "1_naive": (),
    "2_overlong_filtering": ("overlong_filtering",),
    "3_clip_higher": ("overlong_filtering", "clip_higher"),
    "4_overlong_punishment": ("overlong_punishment", "clip_higher"),
    "5_token_level": ("overlong_punishment", "clip_higher", "token_level"),
    "6_dynamic_sampling": (
        "overlong_punishment",
        "clip_higher",
        "token_level",
        "dynamic_sampling",
    ),
}
# Changes of other papers: the combination that each starts from, and its settings.
ONE_UPDATE = {"rollout.updates_per_rollout": 1, "optimizer.learning_rate": 4e-4}
UNCLIPPED = {
    "algorithm.ratio": "none",
    "algorithm.region": "none",
    "algorithm.clip_high": DAPO.clip_high,  # not read
    "algorithm.dual_clip": 0.0,
}
CRITIC = {
    "algorithm.critic": True,
    "algorithm.advantage": "length_adaptive_gae",
    "algorithm.lambda_alpha": 0.5,  # of some 40 tokens, not of thousands
    "critic.optimizer.learning_rate": 1e-3,
    "critic.optimizer.warmup_steps": 0,
    "critic.pretrain_steps": 0,
}
LAMBDA_095 = {
    "algorithm.advantage": "gae",
    "algorithm.lambda_alpha": 0.05,  # not read
    "algorithm.lambda_policy": 0.95,
    "algorithm.lambda_value": 0.95,
}
CLAIMS: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "dr_grpo": (  # 2503.20783
        (),
        {
            "algorithm.aggregate": "token_sum_over_budget",
            "algorithm.advantage": "group_centre",
        },
    ),
    "no_std": (("token_level",), {"algorithm.advantage": "group_centre"}),  # 2503.20783
    "kl": (  # 2402.03300
        ("token_level",),
        {"algorithm.reference": True, "algorithm.kl": "loss", "algorithm.kl_coefficient": 0.04},
    ),
    "gspo": (  # 2507.18071
        (),
        {"algorithm.ratio": "sequence", "algorithm.clip_low": 3e-4, "algorithm.clip_high": 4e-4},
    ),
    "critic": (("token_level",), CRITIC),  # 2504.05118
    "critic_pretrained": (("token_level",), CRITIC | {"critic.pretrain_steps": 4}),
    "critic_lambda_0.95": (("token_level",), CRITIC | LAMBDA_095 | {"critic.pretrain_steps": 4}),
    "one_update": (("token_level",), UNCLIPPED | ONE_UPDATE),
    "rft": (  # 2308.01825
        ("token_level",),
        UNCLIPPED
        | ONE_UPDATE
        | {"algorithm.advantage": "one", "algorithm.trained_responses": "correct"},
    ),
    "dpo": (  # 2305.18290
        (),
        UNCLIPPED
        | ONE_UPDATE
        | {
            "algorithm.advantage": "preference",
            "algorithm.trained_responses": "pairs",
            "algorithm.aggregate": "pair_sum",
            "algorithm.reference": True,
        },
    ),
}


def get_config(name: str = "6_dynamic_sampling") -> Config:
    switches, changes = CLAIMS.get(name, ((), {}))
    if name not in CLAIMS:
        switches = RUNGS.get(name, () if name == "none" else tuple(name.split("+")))
    for switch in switches:
        known = ", ".join([*RUNGS, *CLAIMS, "none"])
        allowed = f"one of {known}, or of {', '.join(SWITCHES)} with + between"
        require(switch in SWITCHES, "configs/two_strategies.py", name, allowed)
    config = _experiment(name)
    for settings in (NAIVE, *(SWITCHES[switch] for switch in switches)):
        for setting, value in settings.items():
            setattr(config.algorithm, setting, value)
    for setting, value in changes.items():
        section, _, field = setting.rpartition(".")
        setattr(operator.attrgetter(section)(config), field, value)
    if config.critic_pretrain_steps():  # the policy still learns for as many steps
        config.total_steps += config.critic_pretrain_steps()
    return config


def _experiment(name: str) -> Config:
    return Config(
        run_dir=f"runs/two_strategies/{name}",
        total_steps=20,
        algorithm=algorithms.preset("dapo"),
        model=Model(folder="dapo_jax:two_strategies_base"),
        compute=Compute(scan_unroll=3),
        data=Data(min_terms=4, max_terms=8, max_prompt_tokens=16, heldout_problems=512),
        rollout=Rollout(prompts_per_step=64, samples_per_prompt=8, updates_per_rollout=16),
        sampler=Sampler(slots=128, burst_tokens=8, max_response_tokens=64),
        # Without momentum, which carries a ratio past its clip: here a batch is all that counts.
        optimizer=Optimizer(learning_rate=4e-5, warmup_steps=2, beta1=0.0),
        packing=Packing(row_tokens=80, rows_per_microbatch=4),
        # Whole distributions, so that held-out accuracy and entropy describe what is trained.
        evaluation=Evaluation(every_steps=0, samples_per_problem=4, top_p=1.0),
        checkpoint=Checkpoint(every_steps=0),
        log=Log(show_group_every_steps=0, report=False),
    )
