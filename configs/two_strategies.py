"""Ablation of DAPO (2503.14476, table 1): a rare strategy is long and right, a common one short.

dapo-jax train --config=configs/two_strategies.py:1_naive
dapo-jax train --config=configs/two_strategies.py:clip_higher+token_level    (any of the switches)

The policy of configs/two_strategies_base.py answers at once with the sum of the first two operands,
right for two of them and mostly wrong for eight; five responses in a hundred work step by step and
are right unless they start over until the budget cuts them off. Reinforcement has to find them.
"""

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
from dapo_jax.runtime.settings import require

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


def get_config(name: str = "6_dynamic_sampling") -> Config:
    switches = RUNGS.get(name, () if name == "none" else tuple(name.split("+")))
    for switch in switches:
        allowed = f"one of {', '.join(RUNGS)}, or none, or of {', '.join(SWITCHES)} with + between"
        require(switch in SWITCHES, "configs/two_strategies.py", name, allowed)
    algorithm = algorithms.preset("dapo")
    for changes in (NAIVE, *(SWITCHES[switch] for switch in switches)):
        for setting, value in changes.items():
            setattr(algorithm, setting, value)
    return Config(
        run_dir=f"runs/two_strategies/{name}",
        total_steps=16,
        algorithm=algorithm,
        model=Model(folder="dapo_jax:two_strategies_base"),
        compute=Compute(scan_unroll=3),
        data=Data(min_terms=4, max_terms=8, max_prompt_tokens=16, heldout_problems=512),
        rollout=Rollout(prompts_per_step=64, samples_per_prompt=8, updates_per_rollout=16),
        sampler=Sampler(slots=128, burst_tokens=8, max_response_tokens=64),
        # Without momentum, which carries a ratio past its clip: here a batch is all that counts.
        optimizer=Optimizer(learning_rate=5e-5, warmup_steps=2, beta1=0.0),
        packing=Packing(row_tokens=80, rows_per_microbatch=4),
        # Whole distributions, so that held-out accuracy and entropy describe what is trained.
        evaluation=Evaluation(every_steps=0, samples_per_problem=4, top_p=1.0),
        checkpoint=Checkpoint(every_steps=0),
        log=Log(tensorboard=False, show_group_every_steps=0, report=False),
    )
