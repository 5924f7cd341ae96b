"""Which settings, and which combinations of them, make no sense.

Checks here see only the settings; what depends on the model folder or the devices is checked where
those are opened, before anything is compiled.
"""

import itertools
import math
from typing import Any

from dapo_jax.config.combinations import GENERATED, check_algorithm, check_unread
from dapo_jax.config.experiment import (
    Config,
    Data,
    DpoConfig,
    Examples,
    ExportConfig,
    Mesh,
    OneMesh,
    ReportConfig,
    ServeConfig,
    SftConfig,
)
from dapo_jax.config.sections import SHAPING
from dapo_jax.runtime.settings import leaves, require

CHOICES = {
    "dtype": ("float32", "bfloat16"),
    "compute.dtype": ("float32", "bfloat16"),
    "compute.remat": ("none", "full", "dots", "attention", "offload"),
    "compute.attention": ("auto", "plain", "blocked", "splash"),
    "data.changed": ("refuse", "allow"),
    "data.overlong": ("drop", "cut"),
    "data.overlong_prompts": ("truncate_left", "drop"),
    "rollout.when_starved": ("partial", "stop"),
    "rollout.carry_over": ("none", "unfinished", "all"),
    "algorithm.old_logprobs": ("recompute", "sampler"),
    "sampler.cache": ("auto", "slots", "paged"),
    "cache": ("auto", "slots", "paged"),
    "sampler.cache_dtype": ("auto", "int8"),
    "sampler.weights_dtype": ("auto", "int8"),
    "weights_dtype": ("auto", "int8"),
    "algorithm.kl": ("none", "loss", "reward"),
    "reward.unfinished": ("wrong", "right"),
    "reward.percent": ("exact", "as_asked"),
    "reward.correct": ("verifier", "threshold", "spread"),
}
AT_LEAST_ZERO = (
    "algorithm.clip_low algorithm.clip_high algorithm.dual_clip algorithm.value_clip "
    "algorithm.kl_coefficient algorithm.entropy_coefficient algorithm.positive_nll_coefficient "
    "algorithm.importance_cap reward.min_spread algorithm.critic_pretrain_steps sampler.top_k "
    "optimizer.warmup_steps optimizer.weight_decay checkpoint.every_steps "
    "evaluation.every_steps "
    "log.show_group_every_steps log.token_groups data.bad_rows_limit temperature top_k "
    "evaluation.temperature shutdown_seconds checkpoint.leave_seconds lora.rank sampler.pages "
    "sampler.prefill_chunk_tokens sampler.load_layers total_steps watch.min_entropy "
    "watch.max_length_growth watch.max_all_right watch.max_all_wrong watch.max_answer_not_found "
    "watch.max_verifier_failures"
).split()
POSITIVE = (
    "examples_per_step pairs_per_step save_every_steps beta data.passes max_response_tokens "
    "algorithm.lambda_alpha "
    "algorithm.preference_beta compute.logprob_chunk_tokens "
    "compute.scan_unroll data.train_problems data.few_shot data.max_prompt_tokens "
    "rollout.prompts_per_step rollout.samples_per_prompt rollout.updates_per_rollout "
    "rollout.max_sample_rounds rollout.carry_over_max_age "
    "sampler.slots sampler.burst_tokens sampler.first_window_tokens "
    "sampler.max_response_tokens sampler.temperature optimizer.eps reward.workers "
    "reward.timeout_seconds optimizer.learning_rate optimizer.max_grad_norm "
    "packing.rows_per_microbatch mesh.tensor mesh.decode_tensor "
    "checkpoint.keep "
    "evaluation.samples_per_problem architecture.layers "
    "architecture.embed architecture.heads architecture.kv_heads architecture.head_dim "
    "architecture.mlp slots waiting max_body_mb lora.alpha sampler.page_tokens "
    "sampler.prefill_prompts"
).split()
SHARES = {  # open below, closed above
    "sampler.top_p": (0.0, 1.0),
    "top_p": (0.0, 1.0),
    "evaluation.top_p": (0.0, 1.0),
    "algorithm.overlong_buffer_share": (0.0, 1.0),
    "algorithm.gamma": (0.0, 1.0),
}
PORTS = ("port", "http_port", "metrics_port")
JETSTREAM_LONGEST_PROMPT = 32_768
# What float32 has: beyond, a number is 0 or infinite once it is computed with.
SMALLEST, LARGEST = 1e-30, 1e30
RANGES = {  # closed; whether also 0, the other tables say
    "sampler.temperature": (0.001, 100.0),
    "evaluation.temperature": (0.001, 100.0),
    "temperature": (0.001, 100.0),
    "optimizer.learning_rate": (SMALLEST, 1.0),
    "optimizer.max_grad_norm": (SMALLEST, 1e15),  # whose square is still a number
}
FROM_0_TO_1 = ("algorithm.lambda_policy", "algorithm.lambda_value")


def _check_single_fields(values: dict[str, Any]) -> None:
    for full_name, value in values.items():
        name = full_name.removeprefix("critic.") if ".optimizer." in full_name else full_name
        if isinstance(value, float):
            require(math.isfinite(value), full_name, value, "a finite number")
            low, high = RANGES.get(name, (SMALLEST, LARGEST))
            allowed = f"{'0, or ' * (name not in POSITIVE)}from {low:g} to {high:g}"
            negative = "" if name in RANGES else " in size"
            require(value == 0 or low <= abs(value) <= high, full_name, value, allowed + negative)
        if name in CHOICES:
            require(value in CHOICES[name], full_name, value, "one of " + ", ".join(CHOICES[name]))
        if name in AT_LEAST_ZERO:
            require(value >= 0, full_name, value, "at least 0")
        if name in POSITIVE:
            require(value > 0, full_name, value, "above 0")
        if name in SHARES:
            low, high = SHARES[name]
            require(low < value <= high, full_name, value, f"above {low} and at most {high}")
        if name in FROM_0_TO_1:
            require(0 <= value <= 1, full_name, value, "from 0 to 1")
        if name in PORTS:
            require(0 <= value <= 65_535, full_name, value, "from 0 to 65535")
        if name.startswith("optimizer.beta") or name == "model.freeze_layers":
            require(0 <= value < 1, full_name, value, "at least 0 and below 1")
    require(0 <= values["seed"] < 2**32, "seed", values["seed"], f"from 0 to {2**32 - 1}")


def _check_terms(section: str, terms: Data | Examples) -> None:
    require(
        2 <= terms.min_terms <= terms.max_terms,
        f"{section}.min_terms",
        terms.min_terms,
        f"from 2 to {section}.max_terms = {terms.max_terms}",
    )


def _check_mesh(mesh: OneMesh) -> None:
    require(mesh.data == -1 or mesh.data > 0, "mesh.data", mesh.data, "above 0, or -1")
    rest = "above 0, or -1 where mesh.data is not"
    require(mesh.fsdp > 0 or mesh.fsdp == -1 != mesh.data, "mesh.fsdp", mesh.fsdp, rest)
    if isinstance(mesh, Mesh):
        share = mesh.sampler_share
        require(0 <= share < 1, "mesh.sampler_share", share, "at least 0 and below 1")


def _check_serving(config: ServeConfig) -> None:
    require(config.model != "", "model", config.model, "a model folder: --model=FOLDER")
    limit = JETSTREAM_LONGEST_PROMPT - 1
    asked = config.max_prompt_tokens
    require(0 < asked <= limit, "max_prompt_tokens", asked, f"from 1 to {limit}")
    for name, other in itertools.combinations(PORTS, 2):
        port = getattr(config, other)
        free = port == 0 or port != getattr(config, name)
        require(free, other, port, f"another one than {name}")
    _check_mesh(config.mesh)


def _check_shared_sections(config: Config | SftConfig, prompt_tokens: int, budget: int) -> None:
    row_tokens, chooses = config.packing.row_tokens, isinstance(config, Config)
    require(
        row_tokens >= prompt_tokens + budget or chooses and row_tokens == -1,
        "packing.row_tokens",
        row_tokens,
        f"at least the longest prompt + the response budget = {prompt_tokens + budget}"
        + ", or 'auto' (-1)" * chooses,
    )
    _check_mesh(config.mesh)


def _check_heldout(data: Data) -> None:
    asked = data.heldout_problems
    require(asked >= -1, "data.heldout_problems", asked, "at least 0, or -1 (256, or a fifth)")
    require(
        not data.heldout_source or asked != 0,
        "data.heldout_problems",
        asked,
        "not 0 with data.heldout_source, which is kept out of training and evaluated whole",
    )


def _check_reward(config: Config) -> None:
    reward, weights = config.reward, config.reward.weights()
    require(
        ("model" in weights) == bool(reward.model_folder),
        "reward.model_folder",
        reward.model_folder,
        "a folder where reward.parts names 'model', and only there",
    )
    require(
        reward.correct == "verifier" or not set(weights) <= set(SHAPING),
        "reward.parts",
        reward.parts,
        f"with a part that judges where reward.correct = {reward.correct!r}; these only shape",
    )
    needs_right = config.algorithm.trained_responses != "all" or (
        config.algorithm.positive_nll_coefficient > 0
    )
    require(
        reward.correct != "spread" or not needs_right,
        "reward.correct",
        reward.correct,
        "'verifier' or 'threshold': the algorithm asks which responses are right",
    )


def _check_pretraining(config: Config) -> None:
    own, preset = config.critic.pretrain_steps, config.algorithm.critic_pretrain_steps
    require(own >= -1, "critic.pretrain_steps", own, "at least 0, or -1 (as the algorithm says)")
    alone, total = config.critic_pretrain_steps(), config.total_steps
    meant = f"; -1 means algorithm.critic_pretrain_steps = {preset}" if own < 0 else ""
    require(
        alone < total if config.algorithm.critic else own <= 0,
        "critic.pretrain_steps",
        own,
        f"below total_steps = {total}{meant}" if config.algorithm.critic else "0 without a critic",
    )


def _check_kept_groups(config: Config) -> None:
    keeps, carry = config.checkpoint.keep_groups, config.rollout.carry_over
    allowed = f"false with rollout.carry_over = {carry!r}: a step takes what is judged first"
    require(carry == "none" or not keeps, "checkpoint.keep_groups", keeps, allowed)


def _check_steps(total_steps: int) -> None:
    require(total_steps > 0, "total_steps", total_steps, "above 0")


def _check_examples(config: SftConfig) -> None:
    """Of generated examples, and of the policy that they may make from nothing."""
    _check_steps(config.total_steps)
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


def _check_own_data(config: SftConfig | DpoConfig) -> None:
    data, start = config.data, config.start
    require(data.source != "", "data.source", "", "a file, folder or glob of rows")
    require(start != "", "start", start, f"a model folder with data.source = {data.source!r}")
    require(
        data.template != "few_shot",
        "data.template",
        data.template,
        "another one: examples are no problems to be shown before others",
    )
    rows = config.packing.row_tokens
    require(rows > 0, "packing.row_tokens", rows, "above 0")
    held = data.heldout_examples
    require(held >= -1, "data.heldout_examples", held, "at least 0, or -1 (one in 20)")
    _check_mesh(config.mesh)


def validate(
    config: Config | SftConfig | DpoConfig | ServeConfig | ExportConfig | ReportConfig,
) -> None:
    """Raises `ConfigError` for the first setting or combination that makes no sense."""
    if isinstance(config, ExportConfig | ReportConfig):  # whose few checks need the run
        return
    _check_single_fields({name: value for name, _, value in leaves(config)})
    if isinstance(config, ServeConfig):
        _check_serving(config)
    elif isinstance(config, SftConfig | DpoConfig):
        check_unread(config)
        if isinstance(config, SftConfig) and config.data.source == GENERATED:
            _check_examples(config)
        else:
            _check_own_data(config)
    else:
        _check_steps(config.total_steps)
        _check_terms("data", config.data)
        longest, budget = config.data.max_prompt_tokens, config.sampler.max_response_tokens
        _check_shared_sections(config, longest, budget)
        _check_heldout(config.data)
        freeze, rank = config.model.freeze_layers, config.lora.rank
        allowed = f"0 with lora.rank = {rank}, which freezes all but its adapters"
        require(not rank or not freeze, "model.freeze_layers", freeze, allowed)
        check_algorithm(config)
        _check_reward(config)
        _check_pretraining(config)
        _check_kept_groups(config)
        check_unread(config)
