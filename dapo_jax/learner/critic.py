"""The critic: a decoder with a scalar head that predicts the return of a response (PPO, VAPO).

It is a second `Learner` on the same rows, with separate parameters and optimizer. A learned reward
model is the same network, read at the last token.
"""

import dataclasses

import jax
from jaxtyping import Array, Float

from dapo_jax.config.algorithm import Algorithm
from dapo_jax.config.experiment import Optimizer
from dapo_jax.learner.batches import Mean, PackedRows, TokenScores, TrainBatch
from dapo_jax.learner.losses import value_loss
from dapo_jax.learner.update import Learner, UpdateOutputs, weighted
from dapo_jax.model.decoder import DecoderConfig, abstract_params
from dapo_jax.model.logprobs import token_values
from dapo_jax.structs import present


def critic_objective(
    algorithm: Algorithm, batch: TrainBatch, values: Float[Array, "R T"]
) -> tuple[Array, dict[str, Mean]]:
    """Return the value loss of a microbatch [R, T] and its metrics."""
    old = present(batch.scored.values, "values")
    returns = present(batch.returns, "returns")
    weights = present(batch.value_weights, "value_weights")
    losses, cut = value_loss(values, old, returns, algorithm.value_clip)
    return (weights * losses).sum(), {"value_clip_fraction": weighted(cut, weights)}


def critic_learner(
    algorithm: Algorithm, settings: Optimizer, config: DecoderConfig, mesh: jax.sharding.Mesh
) -> Learner:
    """Return the critic's learner; it scores token t with V(tokens before t)."""

    def score(params, rows: PackedRows) -> TokenScores:
        return TokenScores(token_values(params, config, rows.inputs))

    def loss(params, batch: TrainBatch) -> tuple[Array, UpdateOutputs]:
        values = score(params, batch.scored.rollouts).values
        total, means = critic_objective(algorithm, batch, values)
        return total, UpdateOutputs(means)

    return Learner(score, loss, abstract_params(config), settings, mesh)


def as_value_metrics(means: dict[str, Mean]) -> dict[str, Mean]:
    """Rename metrics of the critic's update as in metrics.jsonl."""
    return {f"value_{name.removeprefix('value_')}": mean for name, mean in means.items()}


def scalar_config(config: DecoderConfig) -> DecoderConfig:
    """Return the decoder config with a scalar head and all layers trained."""
    return dataclasses.replace(
        config, scalar_head=True, tie_embeddings=True, frozen_layers=0, adapters=None
    )
