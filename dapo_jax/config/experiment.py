"""The whole experiment as nested typed dataclasses.

A file in `configs/` returns one of these; the command line overrides leaves of it, and
`validation.py` says which combinations make no sense.
"""

import dataclasses
from typing import TypeVar

from dapo_jax.algorithms import Algorithm
from dapo_jax.config.alerts import Watch
from dapo_jax.config.checkpoint import Checkpoint
from dapo_jax.config.compute import Compute, Mesh, OneMesh, Packing
from dapo_jax.config.sections import (
    Architecture,
    Critic,
    Data,
    Evaluation,
    Examples,
    Log,
    Lora,
    Model,
    Optimizer,
    OwnData,
    Reward,
    Rollout,
    Sampler,
)
from dapo_jax.runtime.settings import section, setting

T = TypeVar("T")


def _section(kind: type[T]) -> T:
    return dataclasses.field(default_factory=kind)


@section
class Config:
    """A reinforcement-learning run (`dapo-jax train`, `dapo-jax evaluate`)."""

    run_dir: str = setting(
        "runs/dapo",
        "Everything a run writes; new, empty, or a run's: its newest checkpoint is resumed.",
    )
    seed: int = setting(0, "Key of every random choice.")
    total_steps: int = setting(20, "Rollout steps.")
    algorithm: Algorithm = _section(Algorithm)
    model: Model = _section(Model)
    lora: Lora = _section(Lora)
    compute: Compute = _section(Compute)
    data: Data = _section(Data)
    rollout: Rollout = _section(Rollout)
    sampler: Sampler = _section(Sampler)
    reward: Reward = _section(Reward)
    optimizer: Optimizer = _section(Optimizer)
    critic: Critic = _section(Critic)
    packing: Packing = _section(Packing)
    mesh: Mesh = _section(Mesh)
    checkpoint: Checkpoint = _section(Checkpoint)
    evaluation: Evaluation = _section(Evaluation)
    log: Log = _section(Log)
    watch: Watch = _section(Watch)

    def rows(self) -> Packing:
        """The rows that are compiled first: with packing.row_tokens 'auto' the shortest of all."""
        if self.packing.row_tokens > 0:
            return self.packing
        longest = self.data.max_prompt_tokens + self.sampler.max_response_tokens
        unit = 128 if longest > 512 else 8  # a TPU's attention takes multiples of 128
        return dataclasses.replace(self.packing, row_tokens=-(-longest // unit) * unit)

    def critic_pretrain_steps(self) -> int:
        """First steps that train the critic alone: the setting, or what the algorithm says."""
        steps = self.critic.pretrain_steps
        return self.algorithm.critic_pretrain_steps if steps < 0 else steps


@section
class SftConfig:
    """A supervised run on examples (`dapo-jax sft`); writes a model folder."""

    out: str = setting(
        "runs/base", "The model folder to write; an earlier one of this command is replaced."
    )
    seed: int = setting(0, "Key of every random choice.")
    start: str = setting("", "Model folder to go on from; empty: random, of `architecture`.")
    total_steps: int = setting(0, "Optimizer steps; 0: as many as data.passes takes.")
    examples_per_step: int = setting(32, "Examples per optimizer step.")
    save_every_steps: int = setting(
        100, "Steps between saves of where the run is, beside `out`, until that is written."
    )
    architecture: Architecture = _section(Architecture)
    compute: Compute = _section(Compute)
    data: OwnData = _section(OwnData)
    examples: Examples = _section(Examples)
    max_response_tokens: int = setting(160, "A worked example is cut here, without an end token.")
    optimizer: Optimizer = dataclasses.field(
        default_factory=lambda: Optimizer(learning_rate=1e-5, schedule="cosine", warmup_steps=10)
    )
    packing: Packing = _section(Packing)
    mesh: OneMesh = _section(OneMesh)


@section
class DpoConfig:
    """Preference optimisation on offline pairs (`dapo-jax dpo`); writes a model folder."""

    out: str = setting(
        "runs/dpo", "The model folder to write; an earlier one of this command is replaced."
    )
    seed: int = setting(0, "Key of every random choice.")
    start: str = setting("", "Model folder to go on from.")
    reference: str = setting("", "The frozen reference policy; empty: `start` as it is.")
    beta: float = setting(0.1, "How hard a margin pulls, in 1 / nats.")
    total_steps: int = setting(0, "Optimizer steps; 0: as many as data.passes takes.")
    pairs_per_step: int = setting(32, "Pairs per optimizer step.")
    save_every_steps: int = setting(
        100, "Steps between saves of where the run is, beside `out`, until that is written."
    )
    compute: Compute = _section(Compute)
    data: OwnData = dataclasses.field(default_factory=lambda: OwnData(source="", passes=1.0))
    optimizer: Optimizer = dataclasses.field(
        default_factory=lambda: Optimizer(learning_rate=1e-6, schedule="linear", warmup_steps=10)
    )
    packing: Packing = _section(Packing)
    mesh: OneMesh = _section(OneMesh)


@section
class ExportConfig:
    """A checkpoint to a model folder (`dapo-jax export`)."""

    run: str = setting("", "The run_dir to take the policy from.")
    out: str = setting(
        "", "The model folder to write; new, empty, or an earlier export, which is replaced."
    )
    step: int = setting(0, "Of which step; 0: the newest checkpoint.")
    model: str = setting("", "Folder with its config and tokenizer; empty: the run's model.folder.")
    dtype: str = setting(
        "auto", "'float32' (exact), 'bfloat16', 'float16' or 'auto': that of the model folder."
    )
    max_shard_gb: float = setting(
        5.0, "A weight file ends before it exceeds 10^9 bytes times this."
    )


@section
class ReportConfig:
    """Runs as one page to look at (`dapo-jax report`)."""

    run: str = setting("", "The run_dir of a run, or a glob of several; may be given again.")
    out: str = setting("report.html", "The page to write; an earlier report is replaced.")
    preset: str = setting(
        "", "What a run's algorithm is compared with: a key of PRESETS; empty: the nearest one."
    )
    max_mb: float = setting(
        20.0, "Largest page, in 10^6 bytes; curves and rollouts are sampled to fit."
    )


@section
class ServeConfig:
    """A served policy (`dapo-jax serve`)."""

    model: str = setting("", "Model folder, Hugging Face layout.")
    host: str = setting("127.0.0.1", "Address to listen on; the default is this machine alone.")
    port: int = setting(9000, "gRPC port; 0: any that is free.")
    http_port: int = setting(8000, "Port of OpenAI's HTTP protocol; 0: none.")
    served_name: str = setting(
        "", "What clients of HTTP call the model; empty: the name of its folder."
    )
    metrics_port: int = setting(0, "HTTP port of the Prometheus metrics; 0: none.")
    slots: int = setting(32, "Responses decoded side by side.")
    waiting: int = setting(128, "Responses that wait for a slot; more are refused.")
    max_body_mb: float = setting(
        1.0, "Largest body of an HTTP request or message of gRPC, in 10^6 bytes; larger: refused."
    )
    max_prompt_tokens: int = setting(255, "Longest prompt that is accepted.")
    max_response_tokens: int = setting(256, "Largest max_tokens of a request.")
    temperature: float = setting(
        1.0, "Softmax temperature; 0 takes the likeliest token. Requests of HTTP may say another."
    )
    top_p: float = setting(1.0, "Nucleus share. Requests of HTTP may say another.")
    top_k: int = setting(
        0, "Keep the k likeliest tokens; 0 keeps all. Requests of HTTP may say another."
    )
    seed: int = setting(0, "Key of the draws, with the order in which requests arrive.")
    cache: str = setting("auto", "Of keys and values: 'auto' (paged on TPU), 'slots' or 'paged'.")
    dtype: str = setting("float32", "'float32' or 'bfloat16'.")
    weights_dtype: str = setting(
        "auto",
        "Of matrices (not the embedding): 'auto' (dtype) or 'int8', a scale per output channel.",
    )
    shutdown_seconds: float = setting(
        20.0, "What running requests are given to finish after SIGTERM; then they are cancelled."
    )
    mesh: OneMesh = _section(OneMesh)
