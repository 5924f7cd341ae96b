"""The jitted, donated, sharded optimizer step, and the score pass before it.

Both loop over microbatches inside one compiled call. The loop count is dynamic and the arrays have
one static shape, so nothing recompiles when a batch packs into fewer rows.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

from dapo_jax import sharding
from dapo_jax.algorithms import Algorithm
from dapo_jax.config import Compute, Optimizer
from dapo_jax.losses import policy_loss
from dapo_jax.model.decoder import DecoderConfig, abstract_params
from dapo_jax.model.logprobs import token_logprobs
from dapo_jax.optimizer import make_optimizer
from dapo_jax.structs import Mean, Rollouts, TrainBatch, TrainState


def _weighted(values: Float[Array, "R T"], weights: Float[Array, "R T"]) -> Mean:
    return Mean(jnp.sum(values * weights), jnp.sum(weights))


def token_metrics(
    batch: TrainBatch,
    algorithm: Algorithm,
    logprobs: Float[Array, "R T"],
    old_logprobs: Float[Array, "R T"],
    entropy: Float[Array, "R T"],
    clipped: dict[str, Float[Array, "R T"]],
) -> dict[str, Mean]:
    """Means over trained tokens (DAPO's figures 2 and 3a, and the sampler's mismatch)."""
    trained = (batch.loss_weights > 0).astype(jnp.float32)
    probability = jnp.exp(jnp.where(trained > 0, old_logprobs, 0.0))
    sampler = batch.scored.rollouts.sampler_logprobs
    # Where the sampler's are the old ones, the trainer's own view is only in this forward pass.
    trainer = logprobs if algorithm.old_logprobs == "sampler" else old_logprobs
    values = {
        "entropy": entropy,
        "mean_probability": probability,
        "clip_fraction_low": clipped["clipped_low"],
        "clip_fraction_high": clipped["clipped_high"],
        "kl_sampler_trainer": jnp.where(trained > 0, sampler - trainer, 0.0),
        "policy_nll": -logprobs,
    }
    means = {name: _weighted(value, trained) for name, value in values.items()}
    means["up_clipped_probability"] = _weighted(probability, clipped["clipped_high"])
    return means


class Learner:
    """Owns the compiled update and the shardings of what it changes.

    Args:
        algorithm: ratio, clips; its weights and advantages arrive with the batch.
        compute: chunking of the log-probs.
        settings: the optimizer.
        config: the policy.
        mesh: data x fsdp splits rows, fsdp x tensor splits weights and moments.
        temperature: the sampler's, so that both speak of the same distribution.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        compute: Compute,
        settings: Optimizer,
        config: DecoderConfig,
        mesh: jax.sharding.Mesh,
        temperature: float = 1.0,
    ):
        self.config, self.mesh = config, mesh
        self._algorithm = algorithm
        self._optimizer = make_optimizer(settings)
        self._logprobs = functools.partial(
            token_logprobs,
            config=config,
            temperature=temperature,
            chunk_tokens=compute.logprob_chunk_tokens,
        )
        boxed = jax.eval_shape(self._fresh_state, abstract_params(config))
        self.shardings: TrainState = sharding.tree_shardings(mesh, boxed)
        self.abstract_state: TrainState = jax.tree.map(
            lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place),
            sharding.unbox(boxed),
            self.shardings,
        )
        self.start = jax.jit(self._fresh_state, out_shardings=self.shardings)
        rows = sharding.sharding(mesh, None, "batch")
        self._score = jax.jit(self._score_fn, out_shardings=rows)
        self._update = jax.jit(
            self._update_fn, donate_argnums=0, out_shardings=(self.shardings, None)
        )

    def score(self, params: Any, rollouts: Rollouts, microbatches: int) -> Float[Array, "M R T"]:
        """Log-probs of the rollouts under `params`, before any update; 0 on unused rows."""
        rollouts = sharding.put(self.mesh, rollouts, None, "batch")
        with self._rules():
            return self._score(params, rollouts, microbatches)

    def update(
        self, state: TrainState, batch: TrainBatch, microbatches: int, learning_rate: float
    ) -> tuple[TrainState, dict[str, Mean]]:
        """One optimizer step on one minibatch; `state` is consumed.

        A gradient that is not finite changes nothing and is counted in `skipped_updates`.
        """
        batch = sharding.put(self.mesh, batch, None, "batch")
        with self._rules():
            return self._update(state, batch, microbatches, learning_rate)

    def gradient(self, params: Any, batch: TrainBatch, microbatches: int) -> Any:
        """The gradient that `update` would take its step along."""
        batch = sharding.put(self.mesh, batch, None, "batch")
        with self._rules():
            return jax.jit(self._gradient_fn)(params, batch, microbatches)[0]

    def _rules(self):
        return sharding.activate(self.mesh)

    def _fresh_state(self, params: Any) -> TrainState:
        return TrainState(params, self._optimizer.init(params), jnp.zeros((), jnp.int32))

    def _of_rows(self, params: Any, rollouts: Rollouts) -> tuple[Array, Array]:
        return self._logprobs(
            params,
            tokens=rollouts.tokens,
            segment_ids=rollouts.segment_ids,
            positions=rollouts.positions,
        )

    def _score_fn(self, params: Any, rollouts: Rollouts, microbatches) -> Float[Array, "M R T"]:
        def body(i, scores):
            logprobs, _ = self._of_rows(params, _microbatch(rollouts, i))
            return jax.lax.dynamic_update_index_in_dim(scores, logprobs, i, 0)

        zeros = jnp.zeros(rollouts.tokens.shape, jnp.float32)
        return jax.lax.fori_loop(0, microbatches, body, zeros)

    def _loss(self, params: Any, batch: TrainBatch) -> tuple[Array, dict[str, Mean]]:
        logprobs, entropy = self._of_rows(params, batch.scored.rollouts)
        old = batch.scored.old_logprobs
        old = jax.lax.stop_gradient(logprobs) if old is None else old
        weights = batch.loss_weights
        losses, clipped = policy_loss(self._algorithm, logprobs, old, batch.advantages, weights)
        loss = jnp.sum(weights * losses)
        metrics = token_metrics(batch, self._algorithm, logprobs, old, entropy, clipped)
        metrics["loss"] = Mean(loss, jnp.zeros(()))  # already normalised; see _update_fn
        return loss, jax.lax.stop_gradient(metrics)

    def _gradient_fn(self, params, batch: TrainBatch, microbatches):
        of_microbatch = jax.grad(self._loss, has_aux=True)

        def body(i, carry):
            # XLA:TPU crashes on microbatch gradients added in a loop without the barrier.
            new = jax.lax.optimization_barrier(of_microbatch(params, _microbatch(batch, i)))
            return jax.tree.map(jnp.add, carry, new)

        shapes = jax.eval_shape(of_microbatch, params, _microbatch(batch, 0))
        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
        gradient, metrics = jax.lax.fori_loop(0, microbatches, body, zeros)
        return jax.lax.with_sharding_constraint(gradient, self.shardings.params), metrics

    def _update_fn(self, state: TrainState, batch: TrainBatch, microbatches, learning_rate):
        gradient, metrics = self._gradient_fn(state.params, batch, microbatches)
        norm = optax.tree.norm(gradient)
        finite = jnp.isfinite(norm)
        direction, opt_state = self._optimizer.update(gradient, state.opt_state, state.params)
        finite &= jnp.isfinite(optax.tree.norm(direction))
        params = jax.tree.map(lambda p, d: p - learning_rate * d, state.params, direction)
        new = TrainState(params, opt_state, state.update_count + 1)
        new = jax.tree.map(lambda new, old: jnp.where(finite, new, old), new, state)
        taken = finite.astype(jnp.float32)
        loss = metrics["loss"].total
        metrics["loss"] = Mean(jnp.where(finite, loss, 0.0), taken)
        metrics["gradient_norm"] = Mean(jnp.where(finite, norm, 0.0), taken)
        metrics["skipped_updates"] = Mean(1.0 - taken, jnp.ones(()))
        return new, metrics


def _microbatch(tree: Any, index: Any) -> Any:
    """Rows of one microbatch from every [M, R, T] array of a tree."""
    return jax.tree.map(
        lambda leaf: jax.lax.dynamic_index_in_dim(leaf, index, keepdims=False), tree
    )
