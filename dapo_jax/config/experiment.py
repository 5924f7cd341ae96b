"""Experiments of the commands as nested typed dataclasses.

A file in `configs/` returns one of these; the command line overrides its settings, and
`validation.py` rejects invalid combinations.
"""

import dataclasses
from typing import Annotated, Literal

from dapo_jax.config.algorithm import IF_TEACHER, Algorithm
from dapo_jax.config.sections import (
    GENERATED,
    Architecture,
    Checkpoint,
    Compute,
    Critic,
    Data,
    Environment,
    Evaluation,
    Examples,
    Log,
    Lora,
    Mesh,
    Model,
    OneMesh,
    Optimizer,
    OwnData,
    Packing,
    Reward,
    Rollout,
    Sampler,
    Teacher,
    Watch,
)
from dapo_jax.runtime.rules import (
    Count,
    CountOr0,
    Dtype,
    Port,
    Positive,
    PositiveOr0,
    Range,
    Seed,
    Share,
    Temperature,
    When,
)
from dapo_jax.runtime.settings import part, section, setting

# With other schedules, the rate of every step depends on total_steps.
CONSTANT_RATES = When(
    "optimizer.schedule algorithm.critic critic.optimizer.schedule",
    lambda policy, has_critic, critic: policy == "constant" == (critic if has_critic else policy),
)
IF_MERGED = When("weights", "merged")
MIN_PAGE_MB = 6.0  # the plotting library needs most of it
GENERATES = When("data.source", " ".join(GENERATED))
READS_FILES = When("data.source", lambda source: source not in GENERATED)


@section
class Config:
    """A reinforcement-learning run (`dapo-jax train`, `dapo-jax evaluate`)."""

    run_dir: str = setting(
        "runs/dapo", "Output folder; the newest checkpoint in it is resumed.", may_change=True
    )
    seed: Seed = setting(0, "Random seed.")
    total_steps: Count = setting(20, "Rollout steps.", may_change=CONSTANT_RATES)
    algorithm: Algorithm = part(Algorithm)
    model: Model = part(Model)
    teacher: Teacher = part(Teacher, read=IF_TEACHER)
    lora: Lora = part(Lora)
    compute: Compute = part(Compute)
    data: Data = part(Data)
    rollout: Rollout = part(Rollout)
    environment: Environment = part(Environment)
    sampler: Sampler = part(Sampler)
    reward: Reward = part(Reward)
    optimizer: Optimizer = part(Optimizer)
    critic: Critic = part(Critic)
    packing: Packing = part(Packing, may_change=True)
    mesh: Mesh = part(Mesh, may_change=True)
    checkpoint: Checkpoint = part(Checkpoint, may_change=True)
    evaluation: Evaluation = part(Evaluation, may_change=True)
    log: Log = part(Log, may_change=True)
    watch: Watch = part(Watch, may_change=True)

    def rows(self) -> Packing:
        """Return the packing that is compiled first: 'auto' begins with the shortest rows."""
        if self.packing.row_tokens > 0:
            return self.packing
        longest = self.longest_tokens()
        unit = 128 if longest > 512 else 8  # attention on TPU needs multiples of 128
        unit *= 2 * self.mesh.context if self.mesh.context > 1 else 1  # for each shard of a row
        return dataclasses.replace(self.packing, row_tokens=-(-longest // unit) * unit)

    def longest_tokens(self) -> int:
        """Return the largest number of tokens of a prompt and its response."""
        return self.data.max_prompt_tokens + self.sampler.max_response_tokens

    def drawn_budget(self) -> int:
        """Return the largest number of sampled tokens of a response or a trajectory."""
        limit = self.sampler.max_response_tokens
        return min(self.environment.max_drawn_tokens or limit, limit)

    def critic_pretrain_steps(self) -> int:
        """Return the number of first steps that train only the critic."""
        steps = self.critic.pretrain_steps
        return self.algorithm.critic_pretrain_steps if steps < 0 else steps


@section
class SftConfig:
    """A supervised run on examples (`dapo-jax sft`); writes a model folder."""

    out: str = setting("runs/base", "Model folder to write; replaces an earlier one of sft.")
    seed: Seed = setting(0, "Random seed.")
    start: str = setting("", "Model folder to start from; empty: random weights of `architecture`.")
    total_steps: CountOr0 = setting(0, "Optimizer steps; 0: as data.passes requires.")
    examples_per_step: Count = setting(32, "Examples per optimizer step.")
    save_every_steps: Count = setting(100, "Steps between checkpoints, next to `out`.")
    architecture: Architecture = part(Architecture, read=When("start", lambda start: not start))
    lora: Lora = part(Lora)
    compute: Compute = part(Compute)
    data: OwnData = part(OwnData, read=READS_FILES)
    examples: Examples = part(Examples, read=GENERATES)
    max_response_tokens: Count = setting(
        160, "Longest worked example; a longer one is cut, without an end token.", read=GENERATES
    )
    optimizer: Optimizer = part(
        lambda: Optimizer(learning_rate=1e-5, schedule="cosine", warmup_steps=10)
    )
    packing: Packing = part(Packing, may_change=True)
    mesh: OneMesh = part(OneMesh, may_change=True)


@section
class DpoConfig:
    """Preference optimisation on offline pairs (`dapo-jax dpo`); writes a model folder."""

    out: str = setting("runs/dpo", "Model folder to write; replaces an earlier one of dpo.")
    seed: Seed = setting(0, "Random seed.")
    start: str = setting("", "Model folder to start from.")
    reference: str = setting("", "The frozen reference policy; empty: `start`.")
    beta: Positive = setting(0.1, "Strength of a margin, in 1 / nats.")
    lora: Lora = part(Lora)
    total_steps: CountOr0 = setting(0, "Optimizer steps; 0: as data.passes requires.")
    pairs_per_step: Count = setting(32, "Pairs per optimizer step.")
    save_every_steps: Count = setting(100, "Steps between checkpoints, next to `out`.")
    compute: Compute = part(Compute)
    data: OwnData = part(lambda: OwnData(source="", passes=1.0))
    optimizer: Optimizer = part(
        lambda: Optimizer(learning_rate=1e-6, schedule="linear", warmup_steps=10)
    )
    packing: Packing = part(Packing, may_change=True)
    mesh: OneMesh = part(OneMesh, may_change=True)


@section
class ExportConfig:
    """Export of a checkpoint as a model folder (`dapo-jax export`)."""

    run: str = setting("", "The run_dir with the policy.")
    out: str = setting("", "Model folder to write; new, empty, or an earlier export.")
    step: CountOr0 = setting(0, "Step of the checkpoint; 0: the newest.")
    model: str = setting("", "Folder with its config and tokenizer; empty: the run's model.folder.")
    weights: Literal["merged", "adapter"] = setting(
        "merged",
        "Of a run with adapters: 'merged' into a model folder, and separately in PEFT's format as "
        "OUT.adapter; or only that 'adapter' folder, as OUT.",
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = setting(
        "auto", "'float32', 'bfloat16', 'float16' or 'auto' (as the model folder).", read=IF_MERGED
    )
    max_shard_gb: Positive = setting(5.0, "Largest weight file, in 10^9 bytes.", read=IF_MERGED)
    base_model: str = setting("", "OWNER/NAME of the start model on the hub, for the model card.")
    datasets: str = setting("", "Data sets on the hub, comma-separated, for the model card.")
    license: str = setting("", "Licence for the model card, as apache-2.0; empty: no entry.")
    push_to_hub: str = setting("", "Hub repository to upload to: NAME or OWNER/NAME; empty: none.")
    private: bool = setting(True, "Whether that repository is private.", read=When("push_to_hub"))


@section
class ReportConfig:
    """One page that shows runs (`dapo-jax report`)."""

    run: str = setting("", "The run_dir of a run, or a glob of several; may be repeated.")
    out: str = setting("report.html", "The page to write; an earlier report is replaced.")
    preset: str = setting(
        "", "Preset to compare a run's algorithm with: a key of PRESETS; empty: the nearest one."
    )
    max_mb: Annotated[float, Range(at_least=MIN_PAGE_MB)] = setting(
        20.0, "Largest page, in 10^6 bytes; curves and rollouts are sampled to fit."
    )


@section
class ServeConfig:
    """A served policy (`dapo-jax serve`)."""

    model: str = setting("", "Model folder, Hugging Face layout.")
    host: str = setting("127.0.0.1", "Address to listen on; the default is this machine only.")
    port: Port = setting(9000, "gRPC port; 0: any that is free.")
    http_port: Port = setting(8000, "Port of OpenAI's HTTP protocol; 0: none.")
    served_name: str = setting("", "Model name for HTTP clients; empty: the folder's name.")
    metrics_port: Port = setting(0, "HTTP port of the Prometheus metrics; 0: none.")
    slots: Count = setting(32, "Responses decoded in parallel.")
    waiting: Count = setting(128, "Responses that wait for a slot; more are rejected.")
    max_body_mb: Positive = setting(
        1.0, "Largest body of an HTTP request or gRPC message, in 10^6 bytes."
    )
    max_connections: Count = setting(
        1000, "Connections of each protocol; above the limit HTTP answers 503, gRPC refuses."
    )
    request_seconds: Positive = setting(
        10.0, "Seconds for the body of an HTTP request to arrive; later: status 408."
    )
    idle_seconds: Positive = setting(
        5.0, "Seconds that an HTTP connection is kept after a response."
    )
    allowed_hosts: str = setting(
        "", "Names of this server in HTTP requests, comma-separated, next to host; '*': any."
    )
    api_key_file: str = setting(
        "", "File with the key that clients must send; else the variable DAPO_API_KEY; empty: none."
    )
    max_prompt_tokens: Annotated[int, Range(at_least=1, at_most=32_767, also=-1)] = setting(
        -1,
        "Longest accepted prompt. 'auto' (-1): the model's context, or as much of it as fits into "
        "memory for all slots.",
        auto=-1,
    )
    max_response_tokens: Annotated[int, Range(above=0, also=-1)] = setting(
        -1, "Largest max_tokens of a request. 'auto' (-1): the remaining context.", auto=-1
    )
    temperature: Temperature = setting(
        1.0, "Softmax temperature; 0 takes the likeliest token. HTTP requests may override it."
    )
    top_p: Share = setting(1.0, "Nucleus fraction. HTTP requests may override it.")
    top_k: CountOr0 = setting(
        0, "Keep the k likeliest tokens; 0 keeps all. HTTP requests may override it."
    )
    seed: Seed = setting(0, "Random seed; samples also depend on the order of requests.")
    cache: Literal["auto", "slots", "paged"] = setting(
        "auto", "Of keys and values: 'auto' (paged on TPU), 'slots' or 'paged'."
    )
    dtype: Dtype = setting("float32", "'float32' or 'bfloat16'.")
    weights_dtype: Literal["auto", "int8"] = setting(
        "auto", "Of matrices (not the embedding): 'auto' (dtype) or 'int8', scaled per channel."
    )
    shutdown_seconds: PositiveOr0 = setting(
        20.0, "Time for running requests to finish after SIGTERM; then they are cancelled."
    )
    mesh: OneMesh = part(OneMesh, may_change=True)
