"""The critic: a decoder with a scalar head that predicts what a response will still earn.

The only structural branch of the family (PPO, VAPO). It is a second `Learner`: the same rows, the
same loop over microbatches, its own parameters and optimizer. A learned reward model is the same
network, read at the last token.
"""

import dataclasses

import jax
from jaxtyping import Array, Float

from dapo_jax.algorithms import Algorithm
from dapo_jax.config.experiment import Optimizer
from dapo_jax.learner.batches import Mean, PackedRows, TrainBatch
from dapo_jax.learner.losses import value_loss
from dapo_jax.learner.update import Learner, weighted
from dapo_jax.model.decoder import DecoderConfig, abstract_params
from dapo_jax.model.logprobs import token_values
from dapo_jax.structs import present


def critic_objective(
    algorithm: Algorithm, batch: TrainBatch, values: Float[Array, "R T"]
) -> tuple[Array, dict[str, Mean]]:
    """Clipped squared error of a microbatch [R, T], summed with the value weights."""
    old, returns = present(batch.scored.values, "values"), present(batch.returns, "returns")
    weights = present(batch.value_weights, "value_weights")
    losses, cut = value_loss(values, old, returns, algorithm.value_clip)
    return (weights * losses).sum(), {"value_clip_fraction": weighted(cut, weights)}


def critic_learner(
    algorithm: Algorithm, settings: Optimizer, config: DecoderConfig, mesh: jax.sharding.Mesh
) -> Learner:
    """The learner whose score is V(tokens before t), aligned with token t."""

    def score(params, rows: PackedRows):
        return token_values(params, config, rows.tokens, rows.segment_ids, rows.positions)

    def loss(params, batch: TrainBatch):
        return critic_objective(algorithm, batch, score(params, batch.scored.rollouts))

    return Learner(score, loss, abstract_params(config), settings, mesh)


def as_value_metrics(means: dict[str, Mean]) -> dict[str, Mean]:
    """Metrics of the critic's update under their names in metrics.jsonl."""
    return {f"value_{name.removeprefix('value_')}": mean for name, mean in means.items()}


def scalar_config(config: DecoderConfig) -> DecoderConfig:
    """The decoder of that shape with a scalar head; all its layers are trained."""
    return dataclasses.replace(
        config, scalar_head=True, tie_embeddings=True, frozen_layers=0, adapters=None
    )
