"""The whole experiment as nested typed dataclasses: every default once, every field explained.

A file in `configs/` returns one of these; the command line overrides leaves of it. Checks here see
only the settings; what depends on the model folder is checked where the folder is read.
"""

import dataclasses
import math

from dapo_jax.algorithms import Algorithm
from dapo_jax.settings import leaves, require, setting


@dataclasses.dataclass
class Model:
    """Which policy, and how it is computed."""

    folder: str = setting("", "Hugging Face layout: config.json, tokenizer.json, *.safetensors.")
    compute_dtype: str = setting("float32", "'float32' or 'bfloat16'; parameters stay float32.")
    remat: str = setting(
        "none", "What backward recomputes: 'none', 'full' or 'dots' (keeps matrix products)."
    )
    scan_unroll: int = setting(
        1, "Layers per iteration of the training scan; more: faster on CPU, slower to compile."
    )
    attention: str = setting("auto", "'auto' (by platform), 'plain' or 'cudnn' (bfloat16, GPU).")
    logprob_chunk_tokens: int = setting(2048, "Tokens whose logits exist at the same time.")


@dataclasses.dataclass
class Architecture:
    """Shape of a policy made from nothing (Qwen2 family)."""

    layers: int = setting(3, "Decoder layers.")
    embed: int = setting(128, "Width of the residual stream.")
    heads: int = setting(4, "Query heads.")
    kv_heads: int = setting(2, "Key/value heads; divides heads.")
    head_dim: int = setting(32, "Width of a head; even.")
    mlp: int = setting(384, "Width of the gated MLP.")


@dataclasses.dataclass
class Data:
    """Problems with known answers."""

    source: str = setting("arithmetic", "A key of data.pipeline.SOURCES.")
    template: str = setting("none", "Prompt template: a key of templates.TEMPLATES.")
    train_problems: int = setting(20_000, "Problems of one pass; then they are shuffled anew.")
    heldout_problems: int = setting(256, "Problems kept for evaluation, disjoint from training.")
    min_terms: int = setting(3, "Fewest operands of a sum.")
    max_terms: int = setting(9, "Most operands of a sum.")
    max_prompt_tokens: int = setting(32, "Longest prompt the sampler accepts.")
    overlong_prompts: str = setting(
        "truncate_left", "'truncate_left' keeps the end of a longer prompt, 'drop' skips it."
    )


@dataclasses.dataclass
class Rollout:
    """How many responses a step collects and trains on."""

    prompts_per_step: int = setting(32, "Groups per rollout batch (N).")
    samples_per_prompt: int = setting(16, "Responses of a group (G).")
    updates_per_rollout: int = setting(4, "Optimizer steps per rollout batch (U), in data order.")
    max_sample_rounds: int = setting(
        10, "Dynamic sampling asks for at most this many times prompts_per_step prompts."
    )
    when_starved: str = setting(
        "partial", "Too few groups after the last round: 'partial' trains on them, 'stop' stops."
    )


@dataclasses.dataclass
class Sampler:
    """The decoding engine."""

    slots: int = setting(128, "Responses decoded side by side.")
    burst_tokens: int = setting(8, "Tokens decoded per call, between two looks from the host.")
    first_window_tokens: int = setting(
        64, "Cache length to begin with; it doubles as responses outgrow it."
    )
    max_response_tokens: int = setting(96, "Budget of a response; beyond it, it is truncated.")
    temperature: float = setting(1.0, "Softmax temperature while training.")
    top_p: float = setting(1.0, "Nucleus share; below 1 the importance ratio is biased.")
    top_k: int = setting(0, "Keep the k likeliest tokens; 0 keeps all; biases the ratio too.")


@dataclasses.dataclass
class Reward:
    """The rule reward and the processes that apply it."""

    verifier: str = setting("final_number", "A key of rewards.verifier.VERIFIERS.")
    workers: int = setting(1, "Worker processes.")
    timeout_seconds: float = setting(5.0, "A worker that needs longer for one response is killed.")


@dataclasses.dataclass
class Optimizer:
    """AdamW; warm-up and schedule count rollout steps."""

    learning_rate: float = setting(1e-6, "Peak learning rate.")
    schedule: str = setting("constant", "After the warm-up: a key of optimizer.SCHEDULES.")
    warmup_steps: int = setting(20, "Rollout steps; the first runs at learning_rate / warmup.")
    beta1: float = setting(0.9, "Decay of the first moment.")
    beta2: float = setting(0.999, "Decay of the second moment.")
    eps: float = setting(1e-8, "Added to the root of the second moment.")
    weight_decay: float = setting(0.1, "Decoupled; on matrices only.")
    max_grad_norm: float = setting(1.0, "Gradients are scaled down to this global norm.")


@dataclasses.dataclass
class Packing:
    """Rows that responses are packed into, prompt included."""

    row_tokens: int = setting(256, "Length of a row; at least prompt + response budget.")
    rows_per_microbatch: int = setting(16, "Rows whose gradient is taken at once, all devices.")


@dataclasses.dataclass
class Mesh:
    """Device mesh. Batch is split over data x fsdp, weights over fsdp x tensor."""

    data: int = setting(1, "Replicas of the weights.")
    fsdp: int = setting(-1, "Shards of weights and optimizer along embed; -1 takes what is left.")
    tensor: int = setting(1, "Shards along heads, mlp and vocabulary.")


@dataclasses.dataclass
class Checkpoint:
    """Orbax checkpoints in run_dir/checkpoints."""

    every_steps: int = setting(10, "Rollout steps between saves; 0 saves only at the end.")
    keep: int = setting(2, "How many of the newest stay.")


@dataclasses.dataclass
class Evaluation:
    """Sampled accuracy on held-out problems."""

    every_steps: int = setting(10, "Rollout steps between evaluations; 0: only before and after.")
    samples_per_problem: int = setting(4, "Responses per problem (k of avg@k).")
    temperature: float = setting(1.0, "Softmax temperature while evaluating.")
    top_p: float = setting(1.0, "Nucleus share while evaluating.")


@dataclasses.dataclass
class Log:
    """What people see."""

    show_group_every_steps: int = setting(10, "Show one group as a table; 0: never.")
    tensorboard: bool = setting(True, "Write TensorBoard event files.")
    rollouts: bool = setting(True, "Write every trained response to rollouts/step_*.jsonl.")


def _section(kind: type) -> dataclasses.Field:
    return dataclasses.field(default_factory=kind)


@dataclasses.dataclass
class Config:
    """A reinforcement-learning run (`dapo_jax.main`, `dapo_jax.evaluate`)."""

    run_dir: str = setting("runs/dapo", "Everything a run writes; a checkpoint in it is resumed.")
    seed: int = setting(0, "Key of every random choice.")
    total_steps: int = setting(20, "Rollout steps.")
    algorithm: Algorithm = _section(Algorithm)
    model: Model = _section(Model)
    data: Data = _section(Data)
    rollout: Rollout = _section(Rollout)
    sampler: Sampler = _section(Sampler)
    reward: Reward = _section(Reward)
    optimizer: Optimizer = _section(Optimizer)
    packing: Packing = _section(Packing)
    mesh: Mesh = _section(Mesh)
    checkpoint: Checkpoint = _section(Checkpoint)
    evaluation: Evaluation = _section(Evaluation)
    log: Log = _section(Log)


@dataclasses.dataclass
class SftConfig:
    """A supervised run on worked examples (`dapo_jax.sft`); writes a model folder."""

    out: str = setting("runs/base", "The model folder to write.")
    seed: int = setting(0, "Key of every random choice.")
    total_steps: int = setting(1000, "Optimizer steps.")
    examples_per_step: int = setting(128, "Worked examples per optimizer step.")
    architecture: Architecture = _section(Architecture)
    model: Model = _section(Model)
    data: Data = _section(Data)
    max_response_tokens: int = setting(160, "A worked example is cut here, without an end token.")
    optimizer: Optimizer = _section(Optimizer)
    packing: Packing = _section(Packing)
    mesh: Mesh = _section(Mesh)


CHOICES = {
    "model.compute_dtype": ("float32", "bfloat16"),
    "model.remat": ("none", "full", "dots"),
    "model.attention": ("auto", "plain", "cudnn"),
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
    "total_steps examples_per_step max_response_tokens model.logprob_chunk_tokens "
    "model.scan_unroll data.train_problems data.max_prompt_tokens rollout.prompts_per_step "
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


def _check_shared_sections(config: "Config | SftConfig", response_tokens: int) -> None:
    data, packing, mesh = config.data, config.packing, config.mesh
    require(
        2 <= data.min_terms <= data.max_terms,
        "data.min_terms",
        data.min_terms,
        f"from 2 to data.max_terms = {data.max_terms}",
    )
    longest = data.max_prompt_tokens + response_tokens
    require(
        packing.row_tokens >= longest,
        "packing.row_tokens",
        packing.row_tokens,
        f"at least data.max_prompt_tokens + the response budget = {longest}",
    )
    require(mesh.fsdp == -1 or mesh.fsdp > 0, "mesh.fsdp", mesh.fsdp, "above 0, or -1")
    require(
        config.model.attention != "cudnn" or config.model.compute_dtype == "bfloat16",
        "model.attention",
        config.model.attention,
        "'plain' or 'auto' unless model.compute_dtype is 'bfloat16'",
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
        _check_shared_sections(config, config.max_response_tokens)
        shape = config.architecture
        require(shape.head_dim % 2 == 0, "architecture.head_dim", shape.head_dim, "even")
        require(
            shape.heads % shape.kv_heads == 0,
            "architecture.kv_heads",
            shape.kv_heads,
            f"a divisor of architecture.heads = {shape.heads}",
        )
    else:
        _check_shared_sections(config, config.sampler.max_response_tokens)
        _check_algorithm(config)
