"""DAPO on the embedded task, chains of sums: from about half right to nearly always right.

bash launch/local.sh
dapo-jax train --config=configs/arithmetic.py        (the preset: dapo)
dapo-jax train --config=configs/arithmetic.py:grpo
"""

from dapo_jax import algorithms
from dapo_jax.config.experiment import (
    Compute,
    Config,
    Critic,
    Data,
    Evaluation,
    Mesh,
    Model,
    Optimizer,
    Packing,
    Rollout,
    Sampler,
)


def get_config(preset: str = "dapo") -> Config:
    algorithm = algorithms.preset(preset)
    # 8 groups per optimizer step. A ratio, or a KL to the old policy, allows four such steps per
    # rollout batch; without them every update has to be on policy.
    held = algorithm.ratio != "none" or algorithm.kl_to == "old"
    updates, steps = (4, 30) if held else (1, 120)
    critic = Critic()
    if algorithm.critic:
        critic.optimizer = Optimizer(learning_rate=1e-3, schedule="linear", warmup_steps=2)
    if algorithm.advantage == "length_adaptive_gae":
        algorithm.lambda_alpha = 1.0  # 0.05 is for thousands of tokens; here are tens
        critic.pretrain_steps = 5  # of 30, not the preset's 50
    config = Config(
        run_dir=f"runs/arithmetic_{preset}",
        total_steps=steps,
        algorithm=algorithm,
        model=Model(folder="dapo_jax:arithmetic_base"),
        compute=Compute(scan_unroll=3),
        data=Data(max_terms=8, max_prompt_tokens=16),
        rollout=Rollout(
            prompts_per_step=8 * updates, samples_per_prompt=16, updates_per_rollout=updates
        ),
        sampler=Sampler(slots=128, burst_tokens=8, max_response_tokens=64),
        optimizer=Optimizer(learning_rate=2e-4, schedule="linear", warmup_steps=2),
        critic=critic,
        packing=Packing(row_tokens=160, rows_per_microbatch=16),
        mesh=Mesh(data=-1, fsdp=1),  # so small a policy is on every device
        # Whole distributions, so that held-out accuracy and entropy describe what is trained.
        evaluation=Evaluation(every_steps=steps // 3, samples_per_problem=4, top_p=1.0),
    )
    if algorithm.distils:
        config.extras.teacher.folder = "runs/arithmetic_sft"  # of dapo-jax sft arithmetic_sft
    return config
