"""Which settings, and which combinations of them, make no sense.

Checks here see only the settings; what depends on the model folder or the devices is checked where
those are opened, before anything is compiled.
"""

import math

from dapo_jax.config import Config, Data, Examples, SftConfig
from dapo_jax.settings import leaves, require

CHOICES = {
    "compute.dtype": ("float32", "bfloat16"),
    "compute.remat": ("none", "full", "dots"),
    "compute.attention": ("auto", "plain", "cudnn"),
    "data.overlong_prompts": ("truncate_left", "drop"),
    "rollout.when_starved": ("partial", "stop"),
    "algorithm.old_logprobs": ("recompute", "sampler"),
}
AT_LEAST_ZERO = (
    "algorithm.clip_low algorithm.clip_high algorithm.dual_clip sampler.top_k "
    "optimizer.warmup_steps optimizer.weight_decay checkpoint.every_steps evaluation.every_steps "
    "log.show_group_every_steps data.heldout_problems"
).split()
POSITIVE = (
    "total_steps examples_per_step max_response_tokens compute.logprob_chunk_tokens "
    "compute.scan_unroll data.train_problems data.max_prompt_tokens rollout.prompts_per_step "
    "rollout.samples_per_prompt rollout.updates_per_rollout rollout.max_sample_rounds "
    "sampler.slots sampler.burst_tokens sampler.first_window_tokens "
    "sampler.max_response_tokens sampler.temperature optimizer.eps reward.workers "
    "reward.timeout_seconds optimizer.learning_rate optimizer.max_grad_norm "
    "packing.row_tokens packing.rows_per_microbatch mesh.data mesh.tensor checkpoint.keep "
    "evaluation.samples_per_problem evaluation.temperature architecture.layers "
    "architecture.embed architecture.heads architecture.kv_heads architecture.head_dim "
    "architecture.mlp"
).split()
SHARES = {  # open below, closed above
    "sampler.top_p": (0.0, 1.0),
    "evaluation.top_p": (0.0, 1.0),
    "algorithm.overlong_buffer_share": (0.0, 1.0),
}


def _check_single_fields(values: dict[str, object]) -> None:
    for name, value in values.items():
        if isinstance(value, float):
            require(math.isfinite(value), name, value, "a finite number")
        if name in CHOICES:
            require(value in CHOICES[name], name, value, "one of " + ", ".join(CHOICES[name]))
        if name in AT_LEAST_ZERO:
            require(value >= 0, name, value, "at least 0")
        if name in POSITIVE:
            require(value > 0, name, value, "above 0")
        if name in SHARES:
            low, high = SHARES[name]
            require(low < value <= high, name, value, f"above {low} and at most {high}")
        if name.startswith("optimizer.beta"):
            require(0 <= value < 1, name, value, "at least 0 and below 1")
    require(0 <= values["seed"] < 2**32, "seed", values["seed"], f"from 0 to {2**32 - 1}")


def _check_terms(section: str, terms: Data | Examples) -> None:
    require(
        2 <= terms.min_terms <= terms.max_terms,
        f"{section}.min_terms",
        terms.min_terms,
        f"from 2 to {section}.max_terms = {terms.max_terms}",
    )


def _check_shared_sections(config: Config | SftConfig, prompt_tokens: int, budget: int) -> None:
    packing, mesh, compute = config.packing, config.mesh, config.compute
    require(
        packing.row_tokens >= prompt_tokens + budget,
        "packing.row_tokens",
        packing.row_tokens,
        f"at least the longest prompt + the response budget = {prompt_tokens + budget}",
    )
    require(mesh.fsdp == -1 or mesh.fsdp > 0, "mesh.fsdp", mesh.fsdp, "above 0, or -1")
    require(
        compute.attention != "cudnn" or compute.dtype == "bfloat16",
        "compute.attention",
        compute.attention,
        "'plain' or 'auto' unless compute.dtype is 'bfloat16'",
    )


def _check_algorithm(config: Config) -> None:
    algorithm, rollout, sampler = config.algorithm, config.rollout, config.sampler
    require(algorithm.clip_low <= 1, "algorithm.clip_low", algorithm.clip_low, "at most 1")
    require(
        algorithm.dual_clip == 0 or algorithm.dual_clip > 1 + algorithm.clip_high,
        "algorithm.dual_clip",
        algorithm.dual_clip,
        f"0 (off) or above 1 + clip_high = {1 + algorithm.clip_high}",
    )
    require(
        algorithm.advantage != "one",
        "algorithm.advantage",
        algorithm.advantage,
        "a reward's estimator: 'one' imitates wrong answers too and is for supervised runs",
    )
    grouped = algorithm.advantage.startswith("group") or algorithm.dynamic_sampling
    require(
        not grouped or rollout.samples_per_prompt > 1,
        "rollout.samples_per_prompt",
        rollout.samples_per_prompt,
        "at least 2: a group of one has no statistics and can't differ in correctness",
    )
    require(
        rollout.prompts_per_step % rollout.updates_per_rollout == 0,
        "rollout.updates_per_rollout",
        rollout.updates_per_rollout,
        f"a divisor of rollout.prompts_per_step = {rollout.prompts_per_step}",
    )
    require(
        algorithm.reward_correct > algorithm.reward_wrong,
        "algorithm.reward_correct",
        algorithm.reward_correct,
        f"above algorithm.reward_wrong = {algorithm.reward_wrong}",
    )
    require(
        algorithm.ratio != "none" or rollout.updates_per_rollout == 1,
        "rollout.updates_per_rollout",
        rollout.updates_per_rollout,
        "1 with algorithm.ratio = 'none': later updates would be off-policy, uncorrected",
    )
    require(
        algorithm.old_logprobs != "sampler" or (sampler.top_p == 1 and sampler.top_k == 0),
        "algorithm.old_logprobs",
        algorithm.old_logprobs,
        "'recompute' where sampler.top_p or sampler.top_k truncates the distribution",
    )


def validate(config: Config | SftConfig) -> None:
    """Raises `ConfigError` for the first setting or combination that makes no sense."""
    _check_single_fields({name: value for name, _, value in leaves(config)})
    if isinstance(config, SftConfig):
        _check_terms("examples", config.examples)
        longest = 2 * config.examples.max_terms  # a digit and a sign each
        _check_shared_sections(config, longest, config.max_response_tokens)
        shape = config.architecture
        require(shape.rope_theta > 1, "architecture.rope_theta", shape.rope_theta, "above 1")
        require(shape.head_dim % 2 == 0, "architecture.head_dim", shape.head_dim, "even")
        require(
            shape.heads % shape.kv_heads == 0,
            "architecture.kv_heads",
            shape.kv_heads,
            f"a divisor of architecture.heads = {shape.heads}",
        )
    else:
        _check_terms("data", config.data)
        longest, budget = config.data.max_prompt_tokens, config.sampler.max_response_tokens
        _check_shared_sections(config, longest, budget)
        _check_algorithm(config)
