"""Decoders with a scalar head: the critic of PPO and VAPO, and learned reward models.

The critic predicts the return of a response. It is a second `Learner` on the same rows, with
separate parameters and optimizer. A reward model is read at the last token of a response.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from dapo_jax.config.algorithm import Algorithm
from dapo_jax.config.experiment import Optimizer
from dapo_jax.learner.batches import CRITIC, Mean, PackedRows, TokenScores, TrainBatch
from dapo_jax.learner.losses import value_loss
from dapo_jax.learner.packing import Segment, pack, tree_index
from dapo_jax.learner.update import Learner, UpdateOutputs, weighted
from dapo_jax.model.decoder import DecoderConfig, abstract_params
from dapo_jax.model.logprobs import scalars_after, token_values
from dapo_jax.runtime import sharding
from dapo_jax.types.structs import Completion, Prompt, present


def critic_objective(
    algorithm: Algorithm, batch: TrainBatch, values: Float[Array, "R T"]
) -> tuple[Array, dict[str, Mean]]:
    """Return the value loss of a microbatch [R, T] and its metrics."""
    weights = present(batch.value_weights, "value_weights")
    # Padding may hold NaN, and NaN * 0 is NaN.
    values = jnp.where(weights > 0, values, 0.0)
    old = jnp.where(weights > 0, present(batch.scored.scores.get(CRITIC), "values"), 0.0)
    returns = jnp.where(weights > 0, present(batch.returns, "returns"), 0.0)
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


def scalar_config(config: DecoderConfig) -> DecoderConfig:
    """Return the decoder config with a scalar head and all layers trained."""
    return dataclasses.replace(
        config, scalar_head=True, tie_embeddings=True, frozen_layers=0, adapters=None
    )


class RewardModel:
    """A reward model on devices, sharded like the policy."""

    def __init__(
        self,
        params: Any,  # parameters of a `scalar_head` decoder, in their forward dtype
        config: DecoderConfig,
        mesh: jax.sharding.Mesh,
        row_tokens: int,  # shape of the only batch that is compiled
        rows: int,  # shape of the only batch that is compiled
    ):
        self._mesh = mesh
        self._shape = (row_tokens, rows)
        self._params = params
        self._read_rows = jax.jit(lambda params, rows: scalars_after(params, config, rows.inputs))

    def score(self, groups: Sequence[tuple[Prompt, Sequence[Completion]]]) -> list[np.ndarray]:
        """Return the scores of each group, [len(completions)] float32.

        Groups share batches but no rows, so scores do not depend on the other groups.
        """
        row_tokens, rows = self._shape
        no_prompt = Prompt(0, "", "", np.zeros(0, np.int32), "", "")
        parts = []
        ends = np.cumsum([len(completions) for _, completions in groups])
        for (prompt, completions), end in zip(groups, ends.tolist(), strict=True):
            texts = [np.concatenate([prompt.tokens, done.tokens]) for done in completions]
            first = end - len(texts)
            segments = [
                Segment(no_prompt, Completion(text, np.zeros(len(text)), False, 0, ""), first + i)
                for i, text in enumerate(texts)
            ]
            packed, used = pack(segments, row_tokens, 1)
            parts.append(tree_index(packed, slice(used)))
        stacked = jax.tree.map(lambda *arrays: np.concatenate(arrays), *parts)
        scores = np.zeros(ends[-1], np.float32)
        for i in range(0, len(stacked.tokens), rows):
            batch = tree_index(stacked, (slice(i, i + rows), 0))
            pad = rows - len(batch.tokens)  # padding repeats rows, which rewrites equal scores
            batch = jax.tree.map(lambda x, pad=pad: np.pad(x, ((0, pad), (0, 0)), "edge"), batch)
            index = batch.response_index
            following = np.pad(index[:, 1:], ((0, 0), (0, 1)), constant_values=-1)
            last = (index >= 0) & (following != index)
            with sharding.activate(self._mesh):
                rows_on_mesh = sharding.put(self._mesh, batch, "batch", "sequence")
                values = self._read_rows(self._params, rows_on_mesh)
            scores[index[last]] = sharding.to_host(values)[last]
        return np.split(scores, ends[:-1])
