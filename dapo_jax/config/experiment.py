"""Experiments of the commands as nested typed dataclasses.

A file in `configs/` returns one of these; the command line overrides its settings, and
`validation.py` refuses combinations that make no sense.
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

# Other schedules stretch over total_steps: every step's rate depends on it.
CONSTANT_RATES = When(
    "optimizer.schedule algorithm.critic critic.optimizer.schedule",
    lambda policy, has_critic, critic: policy == "constant" == (critic if has_critic else policy),
)
IF_MERGED = When("weights", "merged")
SMALLEST_PAGE_MB = 6.0  # the plotting library and little else
GENERATES = When("data.source", " ".join(GENERATED))
READS_FILES = When("data.source", lambda source: source not in GENERATED)


@section
class Config:
    """A reinforcement-learning run (`dapo-jax train`, `dapo-jax evaluate`)."""

    run_dir: str = setting(
        "runs/dapo",
        "Everything a run writes; new, empty, or a run's: its newest checkpoint is resumed.",
        may_change=True,
    )
    seed: Seed = setting(0, "Key of every random choice.")
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
        """Packing whose rows are compiled first: the shortest with packing.row_tokens 'auto'."""
        if self.packing.row_tokens > 0:
            return self.packing
        longest = self.longest_tokens()
        unit = 128 if longest > 512 else 8  # a TPU's attention takes multiples of 128
        unit *= 2 * self.mesh.context if self.mesh.context > 1 else 1  # of each piece of a row
        return dataclasses.replace(self.packing, row_tokens=-(-longest // unit) * unit)

    def longest_tokens(self) -> int:
        """Most tokens of a prompt and its response."""
        return self.data.max_prompt_tokens + self.sampler.max_response_tokens

    def drawn_budget(self) -> int:
        """Most tokens that the policy draws for a response, or for a trajectory."""
        most = self.sampler.max_response_tokens
        return min(self.environment.max_drawn_tokens or most, most)

    def critic_pretrain_steps(self) -> int:
        """Number of first steps that train the critic alone; by default the algorithm's."""
        steps = self.critic.pretrain_steps
        return self.algorithm.critic_pretrain_steps if steps < 0 else steps


@section
class SftConfig:
    """A supervised run on examples (`dapo-jax sft`); writes a model folder."""

    out: str = setting(
        "runs/base", "The model folder to write; an earlier one of this command is replaced."
    )
    seed: Seed = setting(0, "Key of every random choice.")
    start: str = setting("", "Model folder to go on from; empty: random, of `architecture`.")
    total_steps: CountOr0 = setting(0, "Optimizer steps; 0: as many as data.passes takes.")
    examples_per_step: Count = setting(32, "Examples per optimizer step.")
    save_every_steps: Count = setting(
        100, "Steps between saves of where the run is, beside `out`, until that is written."
    )
    architecture: Architecture = part(Architecture, read=When("start", lambda start: not start))
    lora: Lora = part(Lora)
    compute: Compute = part(Compute)
    data: OwnData = part(OwnData, read=READS_FILES)
    examples: Examples = part(Examples, read=GENERATES)
    max_response_tokens: Count = setting(
        160, "A worked example is cut here, without an end token.", read=GENERATES
    )
    optimizer: Optimizer = part(
        lambda: Optimizer(learning_rate=1e-5, schedule="cosine", warmup_steps=10)
    )
    packing: Packing = part(Packing, may_change=True)
    mesh: OneMesh = part(OneMesh, may_change=True)


@section
class DpoConfig:
    """Preference optimisation on offline pairs (`dapo-jax dpo`); writes a model folder."""

    out: str = setting(
        "runs/dpo", "The model folder to write; an earlier one of this command is replaced."
    )
    seed: Seed = setting(0, "Key of every random choice.")
    start: str = setting("", "Model folder to go on from.")
    reference: str = setting("", "The frozen reference policy; empty: `start` as it is.")
    beta: Positive = setting(0.1, "How hard a margin pulls, in 1 / nats.")
    lora: Lora = part(Lora)
    total_steps: CountOr0 = setting(0, "Optimizer steps; 0: as many as data.passes takes.")
    pairs_per_step: Count = setting(32, "Pairs per optimizer step.")
    save_every_steps: Count = setting(
        100, "Steps between saves of where the run is, beside `out`, until that is written."
    )
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

    run: str = setting("", "The run_dir to take the policy from.")
    out: str = setting(
        "", "The model folder to write; new, empty, or an earlier export, which is replaced."
    )
    step: CountOr0 = setting(0, "Of which step; 0: the newest checkpoint.")
    model: str = setting("", "Folder with its config and tokenizer; empty: the run's model.folder.")
    weights: Literal["merged", "adapter"] = setting(
        "merged",
        "Of a run with adapters: 'merged' into a model folder, beside which OUT.adapter has them "
        "as PEFT saves them, or that 'adapter' folder alone, as OUT.",
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = setting(
        "auto",
        "'float32' (exact), 'bfloat16', 'float16' or 'auto': that of the model folder.",
        read=IF_MERGED,
    )
    max_shard_gb: Positive = setting(
        5.0, "A weight file ends before it exceeds 10^9 bytes times this.", read=IF_MERGED
    )
    base_model: str = setting(
        "", "OWNER/NAME on the hub of the model that the run began with, for the model card."
    )
    datasets: str = setting("", "Data sets on the hub, comma-separated, for the model card.")
    license: str = setting("", "Licence for the model card, as apache-2.0; empty: none is said.")
    push_to_hub: str = setting(
        "", "NAME or OWNER/NAME of the repository to send the folder to; empty: nothing is sent."
    )
    private: bool = setting(
        True, "Whether only its owners see that repository.", read=When("push_to_hub")
    )


@section
class ReportConfig:
    """One page that shows runs (`dapo-jax report`)."""

    run: str = setting("", "The run_dir of a run, or a glob of several; may be given again.")
    out: str = setting("report.html", "The page to write; an earlier report is replaced.")
    preset: str = setting(
        "", "What a run's algorithm is compared with: a key of PRESETS; empty: the nearest one."
    )
    max_mb: Annotated[float, Range(at_least=SMALLEST_PAGE_MB)] = setting(
        20.0, "Largest page, in 10^6 bytes; curves and rollouts are sampled to fit."
    )


@section
class ServeConfig:
    """A served policy (`dapo-jax serve`)."""

    model: str = setting("", "Model folder, Hugging Face layout.")
    host: str = setting("127.0.0.1", "Address to listen on; the default is this machine alone.")
    port: Port = setting(9000, "gRPC port; 0: any that is free.")
    http_port: Port = setting(8000, "Port of OpenAI's HTTP protocol; 0: none.")
    served_name: str = setting(
        "", "What clients of HTTP call the model; empty: the name of its folder."
    )
    metrics_port: Port = setting(0, "HTTP port of the Prometheus metrics; 0: none.")
    slots: Count = setting(32, "Responses decoded side by side.")
    waiting: Count = setting(128, "Responses that wait for a slot; more are refused.")
    max_body_mb: Positive = setting(
        1.0, "Largest body of an HTTP request or message of gRPC, in 10^6 bytes; larger: refused."
    )
    max_connections: Count = setting(
        1000, "Connections of each protocol; at this limit HTTP closes the longest idle one."
    )
    request_seconds: Positive = setting(
        10.0, "What a client is given to send a request, or to read an answer of HTTP."
    )
    idle_seconds: Positive = setting(5.0, "What a connection of HTTP is kept after an answer.")
    allowed_hosts: str = setting(
        "",
        "Names of this server in requests of HTTP, comma between, besides host and localhost; "
        "'*': any.",
    )
    api_key_file: str = setting(
        "", "File with the key that clients must send; else the variable DAPO_API_KEY; empty: none."
    )
    max_prompt_tokens: Annotated[int, Range(at_least=1, at_most=32_767, also=-1)] = setting(
        -1,
        "Longest prompt that is accepted. 'auto' (-1): what the model's context holds, or as much "
        "of it as fits into memory for all slots.",
        auto=-1,
    )
    max_response_tokens: Annotated[int, Range(above=0, also=-1)] = setting(
        -1,
        "Largest max_tokens of a request. 'auto' (-1): what the context leaves after the prompt.",
        auto=-1,
    )
    temperature: Temperature = setting(
        1.0, "Softmax temperature; 0 takes the likeliest token. Requests of HTTP may say another."
    )
    top_p: Share = setting(1.0, "Nucleus share. Requests of HTTP may say another.")
    top_k: CountOr0 = setting(
        0, "Keep the k likeliest tokens; 0 keeps all. Requests of HTTP may say another."
    )
    seed: Seed = setting(0, "Key of the draws, with the order in which requests arrive.")
    cache: Literal["auto", "slots", "paged"] = setting(
        "auto", "Of keys and values: 'auto' (paged on TPU), 'slots' or 'paged'."
    )
    dtype: Dtype = setting("float32", "'float32' or 'bfloat16'.")
    weights_dtype: Literal["auto", "int8"] = setting(
        "auto",
        "Of matrices (not the embedding): 'auto' (dtype) or 'int8', a scale per output channel.",
    )
    shutdown_seconds: PositiveOr0 = setting(
        20.0, "What running requests are given to finish after SIGTERM; then they are cancelled."
    )
    mesh: OneMesh = part(OneMesh, may_change=True)
