"""The rooms of one run, built from its config: what training and evaluation share."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from dapo_jax.config import Compute, Config, Mesh
from dapo_jax.data.pipeline import PromptStream
from dapo_jax.model import attention, huggingface
from dapo_jax.progress import Progress
from dapo_jax.rewards.pool import RewardPool
from dapo_jax.sampler.engine import PolicyEngine
from dapo_jax.sampler.rollout import RolloutSampler
from dapo_jax.settings import require
from dapo_jax.sharding import make_mesh, shards
from dapo_jax.tokenizer import Tokenizer
from dapo_jax.update import Learner

SHARDED_SIZES = ("embed", "heads", "kv_heads", "mlp", "vocab")  # decoder fields = logical names


def open_mesh(settings: Mesh, rows_per_microbatch: int) -> jax.sharding.Mesh:
    """The mesh, checked against the rows it has to split."""
    mesh = make_mesh(settings.data, settings.fsdp, settings.tensor)
    pieces = shards(mesh, "batch")
    require(
        rows_per_microbatch % pieces == 0,
        "packing.rows_per_microbatch",
        rows_per_microbatch,
        f"a multiple of data x fsdp = {pieces}",
    )
    return mesh


def numerics(compute: Compute, mesh: jax.sharding.Mesh) -> dict[str, Any]:
    """The fields of `DecoderConfig` that the run chooses, not the model folder."""
    dtype, platform = jnp.dtype(compute.dtype), mesh.devices.flat[0].platform
    require(
        compute.attention != "cudnn" or platform == "gpu",
        "compute.attention",
        compute.attention,
        f"'auto' or 'plain' on {platform}",
    )
    return {
        "dtype": dtype,
        "remat": compute.remat,
        "scan_unroll": compute.scan_unroll,
        "attention": attention.choose(compute.attention, mesh.devices.flat[0].platform, dtype),
    }


def check_divisible(decoder: Any, mesh: jax.sharding.Mesh) -> None:
    """Raises `ConfigError` where the mesh can't cut the model evenly."""
    for name in SHARDED_SIZES:
        size, pieces = getattr(decoder, name), shards(mesh, name)
        require(
            size % pieces == 0,
            "mesh",
            dict(mesh.shape),
            f"one whose {pieces} shards divide the model's {name} = {size}",
        )


@dataclasses.dataclass
class Parts:
    """What a rollout step works with."""

    config: Config
    tokenizer: Tokenizer
    prompts: PromptStream
    sampler: RolloutSampler
    pool: RewardPool
    learner: Learner
    progress: Progress

    def folder_params(self) -> Any:
        """The parameters of the model folder, on the mesh."""
        return huggingface.load_params(
            self.config.model.folder, self.learner.config, self.learner.mesh
        )

    def close(self) -> None:
        """Ends the reward workers."""
        self.pool.close()


def build(config: Config) -> Parts:
    """Opens the model folder and compiles nothing yet. Raises `ConfigError` at the door."""
    mesh = open_mesh(config.mesh, config.packing.rows_per_microbatch)
    decoder = huggingface.read_config(config.model.folder, **numerics(config.compute, mesh))
    check_divisible(decoder, mesh)
    tokenizer = Tokenizer.from_folder(config.model.folder)
    engine = PolicyEngine(
        decoder,
        mesh,
        slots=config.sampler.slots,
        burst_tokens=config.sampler.burst_tokens,
        max_prompt_tokens=config.data.max_prompt_tokens,
        max_response_tokens=config.sampler.max_response_tokens,
        first_window_tokens=config.sampler.first_window_tokens,
        insert_width=max(config.rollout.samples_per_prompt, config.evaluation.samples_per_problem),
        end_ids=tokenizer.end_ids,
    )
    return Parts(
        config=config,
        tokenizer=tokenizer,
        prompts=PromptStream(config.data, config.seed, tokenizer),
        sampler=RolloutSampler(engine, tokenizer, config.seed),
        pool=RewardPool(config.reward),
        learner=Learner(
            config.algorithm,
            config.compute,
            config.optimizer,
            decoder,
            mesh,
            config.sampler.temperature,
        ),
        progress=Progress(),
    )
