"""Loss functions of Tinker's API, computed by `learner/losses.py` if they are equal."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float

from dapo_jax.config.algorithm import Algorithm
from dapo_jax.config.experiment import Optimizer
from dapo_jax.learner.batches import PackedRows
from dapo_jax.learner.losses import clamp_log, k2, policy_loss
from dapo_jax.learner.update import Learner, UpdateOutputs
from dapo_jax.model import training_attention
from dapo_jax.model.decoder import DecoderConfig, abstract_params, head_kernel
from dapo_jax.model.lm_head import Scale, head_logprobs
from dapo_jax.model.logprobs import hidden_states
from dapo_jax.runtime.sharding import shards

LOGPROB_CHUNK_TOKENS = 2048  # with logits at a time
CROSS_ENTROPY = "cross_entropy"
POLICY_LOSSES = {  # those that `policy_loss` computes
    "importance_sampling": Algorithm(region="none", dual_clip=0.0),
    "ppo": Algorithm(dual_clip=0.0),
    "gspo": Algorithm(ratio="sequence", dual_clip=0.0),
}
# Loss functions with the options that `loss_fn_config` may set, and their defaults.
CLIP_LOW, CLIP_HIGH = "clip_low_threshold", "clip_high_threshold"
OPTIONS: dict[str, dict[str, float]] = {
    CROSS_ENTROPY: {},
    "importance_sampling": {},
    "ppo": {CLIP_LOW: 0.8, CLIP_HIGH: 1.2},
    "cispo": {CLIP_LOW: 0.8, CLIP_HIGH: 1.2},
    "dro": {"beta": 0.05},
    "gspo": {CLIP_LOW: 1 - 3e-4, CLIP_HIGH: 1 + 4e-4},
}


class LossBatch(struct.PyTreeNode):
    """Packed rows with the inputs of a loss; a position has K targets."""

    rows: PackedRows
    inputs: Mapping[str, Any]  # [M R T K] by the client's names, options included
    loss: str = struct.field(pytree_node=False, default=CROSS_ENTROPY)

    @property
    def tokens(self) -> Any:
        return self.rows.tokens

    @property
    def loss_weights(self) -> Any:  # the learner keeps log-probs of this shape
        return self.inputs["weights"]


def _target_logprobs(params: Any, config: DecoderConfig, batch: LossBatch) -> Array:
    """Return log p(target k | tokens up to and including t) at [t, k]."""
    hidden, _ = hidden_states(params, config, batch.rows.inputs)
    shape = batch.inputs["target_tokens"].shape
    count, targets = shape[-1], batch.inputs["target_tokens"].reshape(len(hidden), -1)
    repeated = jnp.repeat(hidden, count, axis=1) if count > 1 else hidden
    scale = Scale(cap=config.logit_cap)
    needed = jnp.repeat(batch.rows.segment_ids > 0, count, axis=1)
    arrays = repeated, head_kernel(params), targets, needed
    pair: Any = head_logprobs(*arrays, scale, LOGPROB_CHUNK_TOKENS)
    return pair[0].reshape(shape)


def _position_losses(batch: LossBatch, logprobs: Float[Array, "R T K"]) -> Float[Array, "R T"]:
    """Return the loss of each position."""
    if batch.loss == CROSS_ENTROPY:
        counted = jnp.where(batch.loss_weights != 0, logprobs, 0.0)  # padding may hold NaN
        return -jnp.sum(batch.loss_weights * counted, axis=-1)
    inputs: Any = {name: values[..., 0] for name, values in batch.inputs.items()}
    segments = batch.rows.segment_ids
    old, advantages = inputs["logprobs"], inputs["advantages"]
    low, high = inputs.get(CLIP_LOW), inputs.get(CLIP_HIGH)
    logprobs = logprobs[..., 0]
    if batch.loss in POLICY_LOSSES:
        mask = inputs.get("sequence_ratio_mask", (segments > 0).astype(jnp.float32))
        algorithm = POLICY_LOSSES[batch.loss]
        if low is not None:
            bounds: Any = {"clip_low": 1 - low, "clip_high": high - 1}
            algorithm = dataclasses.replace(algorithm, **bounds)
        return policy_loss(algorithm, logprobs, old, advantages, mask, segments)[0]
    logprobs = jnp.where(segments > 0, logprobs, 0.0)
    if batch.loss == "dro":
        return inputs["beta"] * k2(logprobs, old) - advantages * logprobs
    ratio = jnp.exp(clamp_log(jax.lax.stop_gradient(logprobs) - old))
    return -jnp.clip(ratio, low, high) * advantages * logprobs  # cispo


def loss_learner(config: DecoderConfig, mesh: jax.sharding.Mesh, frozen: Any) -> Learner:
    """Return the learner of all loss functions; its scores are log-probs and losses."""
    device = mesh.devices.flat[0]

    def score(params: Any, batch: Any) -> Any:
        attention = training_attention.choose(
            "auto", device, batch.tokens.shape[-1], config.dtype, shards(mesh, "sequence")
        )
        decoder = dataclasses.replace(config, attention=attention)
        logprobs = _target_logprobs(params, decoder, batch)
        return logprobs, _position_losses(batch, logprobs)

    def loss(params: Any, batch: Any) -> tuple[Array, UpdateOutputs]:
        logprobs, losses = score(params, batch)
        return jnp.sum(losses), UpdateOutputs({}, logprobs)

    return Learner(score, loss, abstract_params(config), Optimizer(), mesh, frozen)
