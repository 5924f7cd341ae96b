"""Ablation of DAPO (2503.14476, table 1), on sums hard enough to tell its rungs apart.

dapo-jax train --config=configs/ladder.py:1_naive
dapo-jax train --config=configs/ladder.py:clip_higher+token_level    (any of the switches)

The policy is that of configs/arithmetic_base.py. Problems are its longest chains, of which it gets
one in three right, and the budget cuts off second attempts. An update sees only two groups, so a
group without signal matters. `notebooks/measure.py` runs every rung and combination with seeds.
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
        require(switch in SWITCHES, "configs/ladder.py", name, allowed)
    algorithm = algorithms.preset("dapo")
    for changes in (NAIVE, *(SWITCHES[switch] for switch in switches)):
        for setting, value in changes.items():
            setattr(algorithm, setting, value)
    return Config(
        run_dir=f"runs/ladder/{name}",
        total_steps=16,
        algorithm=algorithm,
        model=Model(folder="dapo_jax:arithmetic_base"),
        compute=Compute(scan_unroll=3),
        data=Data(min_terms=7, max_terms=8, max_prompt_tokens=16),
        rollout=Rollout(prompts_per_step=32, samples_per_prompt=8, updates_per_rollout=16),
        sampler=Sampler(slots=128, burst_tokens=8, max_response_tokens=64),
        optimizer=Optimizer(learning_rate=2.5e-4, warmup_steps=2),
        packing=Packing(row_tokens=160, rows_per_microbatch=8),
        # Whole distributions, so that held-out accuracy and entropy describe what is trained.
        evaluation=Evaluation(every_steps=0, samples_per_problem=4, top_p=1.0),
        checkpoint=Checkpoint(every_steps=0),
        log=Log(tensorboard=False, show_group_every_steps=0, report=False),
    )
