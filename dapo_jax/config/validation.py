"""Validation of a config, from its settings alone; folders and devices are checked when opened.

A check is (dotted name of a setting, True if its value fits the others, what is allowed).
"""

from collections.abc import Iterator
from typing import Any

from dapo_jax.config.algorithm import (
    GROUP_ESTIMATORS,
    OF_ENERGIES,
    OF_VALUES,
    REWARD_FREE_ESTIMATORS,
    Algorithm,
)
from dapo_jax.config.experiment import (
    GENERATED,
    SHAPING,
    Config,
    DpoConfig,
    Sampler,
    ServeConfig,
    SftConfig,
)
from dapo_jax.config.rules import is_own
from dapo_jax.config.settings import check_read, check_types, check_values, leaves
from dapo_jax.runtime import registry
from dapo_jax.types.errors import require

Checks = Iterator[tuple[str, bool, str]]


def _advantage(a: Algorithm) -> Checks:
    estimator = f"algorithm.advantage = {a.advantage!r}"
    needs_critic = a.advantage in OF_VALUES
    has_reward = a.advantage not in REWARD_FREE_ESTIMATORS
    prefers = a.advantage == "preference"
    trained = a.trained_responses

    fits = a.critic == needs_critic or is_own(a.advantage)
    yield "algorithm.critic", fits, f"{needs_critic} with {estimator}"
    allowed = "'all' with a critic, which learns from every response"
    yield "algorithm.trained_responses", not a.critic or trained == "all", allowed
    allowed = f"above algorithm.reward_wrong = {a.reward_wrong}"
    yield "algorithm.reward_correct", a.reward_correct > a.reward_wrong, allowed

    allowed = "with algorithm.advantage = 'preference', and only with it"
    yield "algorithm.trained_responses", (trained == "pairs") == prefers, f"'pairs' {allowed}"
    yield "algorithm.aggregate", (a.aggregate == "pair_sum") == prefers, f"'pair_sum' {allowed}"
    allowed = "empty with algorithm.advantage = 'preference': its margins weight all tokens equally"
    yield "algorithm.token_weights", not a.token_weights or not prefers, allowed
    yield "algorithm.ratio", a.ratio == "none" or not prefers, f"'none' with {estimator}"

    allowed = "'correct' with algorithm.advantage = 'one', which imitates wrong answers too"
    yield "algorithm.trained_responses", a.advantage != "one" or trained == "correct", allowed
    allowed = f"false: {estimator} is no estimate from rewards"
    yield "algorithm.whiten", not a.whiten or has_reward, allowed
    allowed = f"false with algorithm.trained_responses = {trained!r}: it would push half down"
    yield "algorithm.whiten", not a.whiten or trained == "all", allowed
    allowed = f"false: {estimator} reads no reward"
    yield "algorithm.overlong_punishment", not a.overlong_punishment or has_reward, allowed
    allowed = f"'none' with {estimator}, which does not vary with the reward"
    yield "algorithm.covariance", a.covariance == "none" or has_reward, allowed
    allowed = "'none' or 'clip' unless algorithm.kl = 'loss', whose tokens it chooses"
    yield "algorithm.covariance", a.covariance != "kl" or a.kl == "loss", allowed
    fits = a.covariance != "clip" or a.covariance_high > a.covariance_low
    yield "algorithm.covariance_high", fits, f"above algorithm.covariance_low = {a.covariance_low}"
    fits = a.advantage not in OF_ENERGIES or a.old_logprobs == "recompute"
    yield "algorithm.old_logprobs", fits, f"'recompute' with {estimator}: only a pass has energies"


def _ratio(a: Algorithm, sampler: Sampler) -> Checks:
    allowed = "'none' with algorithm.ratio = 'none', which never moves"
    yield "algorithm.region", a.region == "none" or a.ratio != "none", allowed
    is_per_response = a.ratio in ("sequence", "product")
    allowed = f"'ratio', 'log_ratio' or 'none' with algorithm.ratio = {a.ratio!r}, of a response"
    yield "algorithm.region", a.region not in ("tv", "kl") or not is_per_response, allowed
    upper = 1 + a.clip_high
    bounds_ratio = a.region in ("ratio", "log_ratio") or is_own(a.region)
    fits = a.dual_clip == 0 or bounds_ratio and a.dual_clip > upper
    allowed = f"0 (off) or, with algorithm.region = 'ratio' or 'log_ratio', above {upper}"
    yield "algorithm.dual_clip", fits, f"{allowed} = 1 + clip_high"
    for name in ("weight", "rejection"):
        low = getattr(a, f"{name}_low")
        high = getattr(a, f"{name}_high")
        allowed = f"0 (no bound) or above algorithm.{name}_low = {low}"
        yield f"algorithm.{name}_high", high == 0 or high > low, allowed

    from_sampler = a.old_logprobs == "sampler"
    is_truncated = sampler.top_p != 1 or sampler.top_k != 0
    allowed = "'recompute' if sampler.top_p or sampler.top_k truncates the distribution"
    yield "algorithm.old_logprobs", not (from_sampler and is_truncated), allowed
    is_expectation = a.advantage not in REWARD_FREE_ESTIMATORS or a.distillation == "reverse"
    allowed = f"with algorithm.advantage = {a.advantage!r}: it is no expectation over samples"
    yield "algorithm.importance_cap", a.importance_cap == 0 or is_expectation, f"0 {allowed}"
    yield "algorithm.rejection", a.rejection == "none" or is_expectation, f"'none' {allowed}"
    sampler_is_old = "with algorithm.old_logprobs = 'sampler'"
    allowed = f"0 {sampler_is_old}: the ratio is already relative to the sampler"
    yield "algorithm.importance_cap", a.importance_cap == 0 or not from_sampler, allowed
    allowed = f"below algorithm.importance_cap = {a.importance_cap}"
    fits = a.importance_cap == 0 or a.importance_floor < a.importance_cap
    yield "algorithm.importance_floor", fits, allowed
    allowed = f"'none' or 'sampler' {sampler_is_old}: there is no forward pass before the update"
    yield "algorithm.router_replay", a.router_replay != "old" or not from_sampler, allowed
    fits = a.rejection == "none" or not from_sampler or a.rejection_of == "new"
    allowed = f"'new' {sampler_is_old}: the sampler is the policy before the step"
    yield "algorithm.rejection_of", fits, allowed


def _reference(a: Algorithm) -> Checks:
    has_kl = a.kl != "none"
    needed = has_kl and a.kl_to == "reference" or a.advantage == "preference"
    allowed = "true, for the KL or the preference" if needed else "false: nothing reads it"
    yield "algorithm.reference", a.reference == needed, allowed
    allowed = "above 0" if has_kl else "0 with algorithm.kl = 'none'"
    yield "algorithm.kl_coefficient", has_kl == (a.kl_coefficient > 0), allowed
    allowed = "k2 or k3 with algorithm.kl = 'loss': the expected gradient of k1 is 0 there"
    yield "algorithm.kl_estimator", a.kl != "loss" or a.kl_estimator != "k1", allowed
    allowed = "false, or with algorithm.kl_estimator = 'k3': the ratio corrects its expectation"
    yield "algorithm.kl_importance", not a.kl_importance or a.kl_estimator == "k3", allowed
    has_reward = a.advantage not in REWARD_FREE_ESTIMATORS
    allowed = f"'none' or 'loss': algorithm.advantage = {a.advantage!r} reads no reward"
    yield "algorithm.kl", a.kl != "reward" or has_reward, allowed
    # E[penalty * grad log p] is the KL's gradient for k1. The others are also positive if the
    # policy's probability is too small, and reduce it further.
    allowed = "'k1' with algorithm.kl = 'reward': k2 and k3 push the policy away from the reference"
    fits = a.kl != "reward" or a.kl_estimator == "k1" or is_own(a.kl_estimator)
    yield "algorithm.kl_estimator", fits, allowed


def _is_divergence(a: Algorithm) -> bool:  # from a teacher, valid on any tokens
    return a.advantage == "zero" and a.distillation == "jsd"


def _distillation(config: Config) -> Checks:
    a = config.algorithm
    distils = a.distillation != "none"
    allowed = "'reverse' or 'jsd' with algorithm.advantage = 'zero', which alone teaches nothing"
    yield "algorithm.distillation", distils or a.advantage != "zero", allowed
    allowed = f"a model folder with algorithm.distillation = {a.distillation!r}"
    yield "teacher.folder", not distils or config.teacher.folder != "", allowed
    fits = a.distillation != "reverse" or a.advantage not in ("one", "preference")
    allowed = f"'none' or 'jsd' with algorithm.advantage = {a.advantage!r}: it is no expectation"
    yield "algorithm.distillation", fits, f"{allowed} over samples"
    allowed = "false with algorithm.advantage = 'zero': every group teaches something"
    yield "algorithm.dynamic_sampling", not a.dynamic_sampling or a.advantage != "zero", allowed
    allowed = "'none' with algorithm.advantage = 'zero' and algorithm.distillation = 'jsd'"
    yield "algorithm.ratio", a.ratio == "none" or not _is_divergence(a), allowed


def _updates(config: Config) -> Checks:
    a = config.algorithm
    rollout = config.rollout
    samples = rollout.samples_per_prompt
    updates = rollout.updates_per_rollout
    needs_group = a.advantage in GROUP_ESTIMATORS or a.dynamic_sampling
    allowed = "at least 2: a group of one has no statistics and can't differ in correctness"
    yield "rollout.samples_per_prompt", not needs_group or samples > 1, allowed
    allowed = f"at most rollout.samples_per_prompt = {samples}"
    yield "algorithm.pass_k", a.advantage != "pass_at_k" or a.pass_k <= samples, allowed
    allowed = f"a divisor of rollout.prompts_per_step = {rollout.prompts_per_step}"
    yield "rollout.updates_per_rollout", rollout.prompts_per_step % updates == 0, allowed
    has_trust_kl = a.kl == "loss" and a.kl_to != "reference"
    fits = a.ratio != "none" or has_trust_kl or _is_divergence(a) or updates == 1
    allowed = "1 with algorithm.ratio = 'none': later updates would be off-policy, uncorrected"
    yield "rollout.updates_per_rollout", fits, allowed
    from_sampler = a.ratio != "none" and a.old_logprobs == "sampler"
    has_weight = a.importance_cap > 0 or a.rejection != "none"
    is_corrected = has_weight or from_sampler or _is_divergence(a)
    allowed = "without algorithm.importance_cap, algorithm.rejection or old_logprobs = 'sampler'"
    yield "rollout.staleness", rollout.staleness == 0 or is_corrected, f"0 {allowed}"
    carries = rollout.carry_over != "none"
    yield "rollout.carry_over", not carries or is_corrected, f"'none' {allowed}"
    allowed = "'none' with rollout.staleness above 0, which samples ahead with a separate policy"
    yield "rollout.carry_over", not carries or rollout.staleness == 0, allowed
    yield from _other_engine(config, carries, has_weight)


def _other_engine(config: Config, carries: bool, has_weight: bool) -> Checks:
    engine, engines = config.sampler.engine, ("own", *registry.names("samplers"))
    yield "sampler.engine", engine in engines, f"one of {', '.join(engines)}"
    fits = not carries or engine != "samplers"
    yield "rollout.carry_over", fits, "'none' with sampler.engine = 'samplers': whole groups"
    if engine != "vllm":
        return
    settings, field = config.extras.vllm, "extras.vllm.servers"
    fits = all(url.strip().startswith("http") for url in settings.servers.split(","))
    yield field, fits, "URLs such as http://HOST:8000, comma-separated"
    allowed = "above 0 with sampler.engine = 'vllm': a running server loads adapters alone"
    yield "lora.rank", config.lora.rank > 0, allowed
    allowed = "'own' without algorithm.importance_cap or rejection: vLLM rounds otherwise"
    yield "sampler.engine", has_weight, allowed
    fits = not config.environment.used and config.algorithm.router_replay != "sampler"
    yield "sampler.engine", fits, "'own' with an environment or router_replay = 'sampler'"
    fits = bool(settings.folder) or "://" not in config.run_dir
    yield "extras.vllm.folder", fits, "a folder that servers see, with run_dir in a bucket"


def _rewards(config: Config) -> Checks:
    a = config.algorithm
    reward = config.reward
    environment = config.environment
    weights = reward.weights()
    allowed = "a folder if reward.parts names 'model', else empty"
    yield "reward.model_folder", ("model" in weights) == bool(reward.model_folder), allowed
    allowed = "without 'tests' unless reward.verifier = 'code' runs them"
    yield "reward.parts", "tests" not in weights or reward.verifier == "code", allowed
    allowed = "another one with environment.name = 'second_try', which sees no tests"
    fits = reward.verifier != "code" or environment.name != "second_try"
    yield "reward.verifier", fits, allowed
    allowed = "the judge's name at reward.judge.url with reward.parts = 'judge=...'"
    yield "reward.judge.model", "judge" not in weights or bool(reward.judge.model), allowed
    has_verdict = reward.correct == "verifier" or not set(weights) <= set(SHAPING)
    allowed = f"more than shaping parts with reward.correct = {reward.correct!r}"
    yield "reward.parts", has_verdict, allowed
    needs_verdict = a.trained_responses != "all" or a.positive_nll_coefficient > 0
    allowed = "'verifier' or 'threshold': the algorithm needs to know which responses are correct"
    yield "reward.correct", reward.correct != "spread" or not needs_verdict, allowed

    allowed = "empty with environment.name: an environment defines its tools"
    yield "environment.tools", not (environment.name and environment.tools), allowed
    is_chat = config.data.template == "chat"
    allowed = "empty, or with data.template = 'chat', which shows the policy how to call"
    yield "environment.tools", not environment.tools or is_chat, allowed
    allowed = "without 'environment' if environment.name is empty: nothing gives that reward"
    yield "reward.parts", "environment" not in weights or bool(environment.name), allowed


def _run(config: Config) -> Checks:
    steps = config.critic.pretrain_steps
    has_critic = config.algorithm.critic
    yield "critic.pretrain_steps", has_critic or steps <= 0, "0 without a critic"
    fits = not has_critic or config.critic_pretrain_steps() < config.total_steps
    preset = config.algorithm.critic_pretrain_steps
    allowed = f"below total_steps = {config.total_steps}"
    allowed += f"; -1 means algorithm.critic_pretrain_steps = {preset}" * (steps < 0)
    yield "critic.pretrain_steps", fits, allowed
    carry = config.rollout.carry_over
    allowed = f"false with rollout.carry_over = {carry!r}: a step trains the groups scored first"
    yield "checkpoint.keep_groups", carry == "none" or not config.checkpoint.keep_groups, allowed
    allowed = "above 0, or 'auto', with rollout.carry_over or an environment"
    counts = carry == "none" and not config.environment.used
    yield "rollout.reward_bursts", counts or config.rollout.reward_bursts != 0, allowed
    rank = config.lora.rank
    allowed = f"0 with lora.rank = {rank}, which freezes all but its adapters"
    yield "model.freeze_layers", not rank or config.model.freeze_layers == 0, allowed


def _terms(section: str, terms: Any) -> Checks:
    allowed = f"from 2 to {section}.max_terms = {terms.max_terms}"
    yield f"{section}.min_terms", 2 <= terms.min_terms <= terms.max_terms, allowed


def _rows(config: Config | SftConfig, longest: int) -> Checks:
    is_auto = isinstance(config, Config) and config.packing.row_tokens == -1
    allowed = f"at least the longest prompt + the response limit = {longest}"
    allowed += ", or 'auto' (-1)" * isinstance(config, Config)
    yield "packing.row_tokens", config.packing.row_tokens >= longest or is_auto, allowed


def _training(config: Config) -> Checks:
    yield from _terms("data", config.data)
    yield from _rows(config, config.longest_tokens())
    fits = not config.data.heldout_source or config.data.heldout_problems != 0
    allowed = "not 0 with data.heldout_source, which is kept out of training and evaluated whole"
    yield "data.heldout_problems", fits, allowed
    yield from _advantage(config.algorithm)
    yield from _ratio(config.algorithm, config.sampler)
    yield from _reference(config.algorithm)
    yield from _distillation(config)
    yield from _updates(config)
    yield from _rewards(config)
    yield from _run(config)


def _generated_examples(config: SftConfig) -> Checks:
    yield "total_steps", config.total_steps > 0, "above 0"
    yield from _terms("examples", config.examples)
    longest = 2 * config.examples.max_terms  # a digit and a sign each
    yield from _rows(config, longest + config.max_response_tokens)
    shape = config.architecture
    yield "architecture.head_dim", shape.head_dim % 2 == 0, "even"
    allowed = f"a divisor of architecture.heads = {shape.heads}"
    yield "architecture.kv_heads", shape.heads % shape.kv_heads == 0, allowed


def _own_examples(config: SftConfig | DpoConfig) -> Checks:
    source = config.data.source
    yield "data.source", source != "", "a file, folder or glob of rows"
    yield "start", config.start != "", f"a model folder with data.source = {source!r}"
    allowed = "not few_shot: examples are no problems to show before others"
    yield "data.template", config.data.template != "few_shot", allowed
    yield "packing.row_tokens", config.packing.row_tokens > 0, "above 0"


def _checks(config: Any, settings: dict[str, Any]) -> Checks:
    if isinstance(config, ServeConfig):
        yield "model", config.model != "", "a model folder: --model=FOLDER"
        yield "host", config.host != "", "an address of this machine; 0.0.0.0: all"
        fits = config.metrics_port == 0 or config.metrics_port != config.http_port
        yield "metrics_port", fits, "different from http_port"
        yield "http_port", config.http_port > 0 or not config.tinker, "above 0 with tinker"
    elif isinstance(config, Config):
        yield from _training(config)
    elif isinstance(config, SftConfig) and config.data.source in GENERATED:
        yield from _generated_examples(config)
    elif isinstance(config, SftConfig | DpoConfig):
        yield from _own_examples(config)
    if folder := settings.get("lora.folder"):
        allowed = f"r of {folder}/adapter_config.json, with lora.folder"
        yield "lora.rank", settings["lora.rank"] != 0, allowed
    if rank := settings.get("lora.rank"):
        allowed = f"'adamw' with lora.rank = {rank}: adapters are trained by AdamW alone"
        yield "optimizer.name", settings.get("optimizer.name") != "muon", allowed
    if isinstance(config, SftConfig):
        allowed = "0 without start: there is no base model to adapt"
        yield "lora.rank", config.lora.rank == 0 or config.start != "", allowed
    if "mesh.data" in settings:
        fits = settings["mesh.fsdp"] > 0 or settings["mesh.data"] > 0
        yield "mesh.fsdp", fits, "above 0, or -1 if mesh.data is above 0"


def check_warmup(config: Any) -> None:
    """Raise `ConfigError` for a warm-up that is longer than a run of fixed length."""
    values = {name: value for name, _, value in leaves(config)}
    for name, value in values.items() if config.total_steps else ():
        section, _, last = name.rpartition(".")
        if last != "warmup_steps" or values[f"{section}.schedule"] == "constant":
            continue
        allowed = f"at most total_steps = {config.total_steps}, or the peak rate is never reached"
        require(value <= config.total_steps, name, value, allowed)


def validate(config: Any) -> None:
    """Raise `ConfigError` for the first invalid setting or combination of settings."""
    check_types(config)
    check_values(config)
    settings = {name: value for name, _, value in leaves(config)}
    for name, fits, allowed in _checks(config, settings):
        require(fits, name, settings[name], allowed)
    check_read(config)
