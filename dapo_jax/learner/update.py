"""The jitted, donated, sharded optimizer step, and the score pass before it.

Both loop over microbatches inside one compiled call. The loop count is dynamic and the arrays have
one static shape, so nothing recompiles when a batch packs into fewer rows.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

from dapo_jax.config.experiment import Optimizer
from dapo_jax.learner.batches import Mean, PackedRows, TrainBatch, TrainState
from dapo_jax.learner.optimizer import make_optimizer
from dapo_jax.model.trainable import join, without
from dapo_jax.runtime import sharding
from dapo_jax.runtime.nonfinite import REASONS

ROWS = None, "batch", "sequence"  # logical names of [M, R, T]
TOKEN_LOGPROBS = "token_logprobs"  # [M, R, T] among the metrics of an update that keeps them


def weighted(values: Float[Array, "R T"], weights: Float[Array, "R T"]) -> Mean:
    """The weighted mean over a microbatch, to be added to those of the others.

    What stands where the weight is 0 is not looked at, be it infinite.
    """
    return Mean(jnp.sum(jnp.where(weights > 0, values, 0.0) * weights), jnp.sum(weights))


class Learner:
    """Compiled score pass and update of a model, with their shardings; policy and critic are two.

    Args:
        score: (params, rollouts [R, T]) -> what the model says of each token, [R, T, ...].
        loss: (params, batch [R, T]) -> the loss and its metrics; both only add over microbatches.
        boxed_params: shapes and logical axis names of all parameters.
        settings: the optimizer.
        mesh: data x fsdp splits rows, context their length, fsdp x context x tensor weights and
            moments.
        frozen: parameters that never change, on the mesh; a state holds the others alone, and so
            do its checkpoints.
        by_rows: the loss and its metrics add over rows, too.
    """

    def __init__(
        self,
        score: Callable[[Any, PackedRows], Any],
        loss: Callable[[Any, TrainBatch], tuple[Array, dict[str, Mean]]],
        boxed_params: Any,
        settings: Optimizer,
        mesh: jax.sharding.Mesh,
        frozen: Any = None,
        by_rows: bool = True,
    ):
        self.mesh, self.frozen = mesh, frozen or {}
        # Then replicas need each other once an update, not in every microbatch; and XLA scatters
        # a microbatch's float32 gradients over fsdp, not sums of bfloat16 to all chips.
        self._apart = by_rows and mesh.size > 1
        self._score_rows, self._loss = score, loss
        self._optimizer = make_optimizer(settings)
        boxed = jax.eval_shape(self._fresh_state, without(boxed_params, self.frozen))
        self.shardings: TrainState = sharding.tree_shardings(mesh, boxed)
        self.abstract_state: TrainState = jax.tree.map(
            lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place),
            sharding.unbox(boxed),
            self.shardings,
        )
        self.start = jax.jit(self._fresh_state, out_shardings=self.shardings)
        self.copy = jax.jit(  # of the parameters, which an update consumes
            lambda params: jax.tree.map(jnp.copy, params), out_shardings=self.shardings.params
        )
        rows = sharding.sharding(mesh, *ROWS)
        self._score = jax.jit(self._score_fn, out_shardings=rows)
        self._gradient = jax.jit(self._gradient_fn)
        self._update = jax.jit(
            self._update_fn, donate_argnums=0, out_shardings=(self.shardings, None)
        )

    def score(self, params: Any, rollouts: PackedRows, microbatches: int) -> Any:
        """Log-probs of the tokens (values, for a critic) [M, R, T]; 0 on unused rows.

        A policy that records routes returns them too [M, R, T, L, k].

        `params` are those of a state, or all of them where the frozen ones are others.
        """
        rollouts = sharding.put(self.mesh, rollouts, *ROWS)
        with self._rules():
            return self._score(join(self.frozen, params), rollouts, microbatches)

    def update(
        self, state: TrainState, batch: TrainBatch, microbatches: int, learning_rate: float
    ) -> tuple[TrainState, dict[str, Mean]]:
        """Optimizer step on one minibatch; consumes `state`.

        Where its gradient, or the moments or parameters after it, are not finite it changes
        nothing and is counted in `skipped_updates`.
        """
        batch = sharding.put(self.mesh, batch, *ROWS)
        with self._rules():
            return self._update(state, self.frozen, batch, microbatches, learning_rate)

    def gradient(self, params: Any, batch: TrainBatch, microbatches: int) -> Any:
        """Gradient along which `update` would step."""
        return self.loss_and_gradient(params, batch, microbatches)[1]

    def loss_and_gradient(
        self, params: Any, batch: TrainBatch, microbatches: int
    ) -> tuple[Array, Any]:
        """Loss and gradient that `update` would compute; changes nothing."""
        batch = sharding.put(self.mesh, batch, *ROWS)
        with self._rules():
            gradient, means = self._gradient(params, self.frozen, batch, microbatches)
        return means["loss"].total, gradient

    def lower(
        self, program: str, batch: PackedRows | TrainBatch, params: Any = None
    ) -> jax.stages.Lowered:
        """`score` of rollouts or `update` on a batch, of these shapes [M, R, T], to be compiled.

        Nothing is computed: the devices of the mesh need not be here, nor any parameter.

        Args:
            params: shapes and places of the parameters that score; None: the state's.
        """
        place = sharding.sharding(self.mesh, *ROWS)
        batch = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place), batch
        )
        state = self.abstract_state
        with self._rules():
            if program == "score":
                params = state.params if params is None else params
                return self._score.lower(join(self.frozen, params), batch, 1)
            return self._update.lower(state, self.frozen, batch, 1, 0.0)

    def _rules(self):
        return sharding.activate(self.mesh)

    def _fresh_state(self, params: Any) -> TrainState:
        return TrainState(params, self._optimizer.init(params), jnp.zeros((), jnp.int32))

    def _score_fn(self, params: Any, rollouts: PackedRows, microbatches) -> Any:
        def of_microbatch(i):
            return self._score_rows(params, _microbatch(rollouts, i))

        def body(i, scores):
            def place(all_rows, rows):
                return jax.lax.dynamic_update_index_in_dim(all_rows, rows, i, 0)

            return jax.tree.map(place, scores, of_microbatch(i))

        many, shapes = len(rollouts.tokens), jax.eval_shape(of_microbatch, 0)
        zeros = jax.tree.map(lambda leaf: jnp.zeros((many, *leaf.shape), leaf.dtype), shapes)
        return jax.lax.fori_loop(0, microbatches, body, zeros)

    def _gradient_fn(self, params, frozen, batch: TrainBatch, microbatches):
        arguments = params, frozen, batch, microbatches
        if not self._apart:
            gradient, metrics, kept = self._add_microbatches(*arguments)
        else:
            cut, gives = (None, None, 1, None), (None, None, 1)
            add_up = sharding.per_replica(self._add_apart, self.mesh, cut, gives)
            gradient, metrics, kept = add_up(*arguments)
        gradient = jax.lax.with_sharding_constraint(gradient, self.shardings.params)
        return gradient, metrics | kept

    def _add_apart(self, *arguments):
        """Sums over a replica's own rows of all microbatches, then over replicas."""
        gradient, metrics, kept = self._add_microbatches(*arguments)
        if self.mesh.shape["data"] > 1:
            gradient, metrics = jax.lax.psum((gradient, metrics), "data")
        return gradient, metrics, kept

    def _add_microbatches(self, params, frozen, batch: TrainBatch, microbatches):
        """Gradient and metrics, and apart from them what is kept of every token."""

        def loss(params, batch: TrainBatch):
            value, metrics = self._loss(join(frozen, params), batch)
            metrics["loss"] = Mean(value, jnp.zeros(()))  # already normalised; see _update_fn
            return value, jax.lax.stop_gradient(metrics)

        def of_microbatch(i):
            rows = jax.grad(loss, has_aux=True)(params, _microbatch(batch, i))
            # XLA:TPU crashes on microbatch gradients added in a loop without the barrier.
            gradient, metrics = jax.lax.optimization_barrier(rows)
            kept = {name: metrics.pop(name) for name in (TOKEN_LOGPROBS,) if name in metrics}
            empty = jnp.zeros(batch.loss_weights.shape)
            for name, new in kept.items():  # at the place of the microbatch: adding is enough
                kept[name] = jax.lax.dynamic_update_index_in_dim(empty, new, i, 0)
            return gradient, metrics, kept

        def body(i, carry):
            return jax.tree.map(jnp.add, carry, of_microbatch(i))

        shapes = jax.eval_shape(of_microbatch, 0)
        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
        return jax.lax.fori_loop(0, microbatches, body, zeros)

    def _update_fn(self, state: TrainState, frozen, batch: TrainBatch, microbatches, learning_rate):
        gradient, metrics = self._gradient_fn(state.params, frozen, batch, microbatches)
        norm = optax.tree.norm(gradient)
        direction, opt_state = self._optimizer.update(gradient, state.opt_state, state.params)
        params = jax.tree.map(lambda p, d: p - learning_rate * d, state.params, direction)
        new = TrainState(params, opt_state, state.update_count + 1)
        moments = jnp.stack([jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(opt_state)])
        # Of parameters the norm: a forward pass squares what it computes with them.
        sizes = [norm, jnp.where(moments.all(), 0.0, jnp.nan), optax.tree.norm(params)]
        sound = jnp.isfinite(jnp.stack(sizes))
        finite = sound.all()
        new = jax.tree.map(lambda new, old: jnp.where(finite, new, old), new, state)
        taken = finite.astype(jnp.float32)
        loss = metrics["loss"].total
        metrics["loss"] = Mean(jnp.where(finite, loss, 0.0), taken)
        metrics["gradient_norm"] = Mean(jnp.where(finite, norm, 0.0), taken)
        metrics["skipped_updates"] = Mean(1.0 - taken, jnp.ones(()))
        first = jnp.argmin(sound)  # what comes later is not finite because of it
        for i, name in enumerate(REASONS):
            metrics[name] = Mean(jnp.where(first == i, 1.0 - taken, 0.0), jnp.ones(()))
        return new, metrics


def _microbatch(tree: Any, index: Any) -> Any:
    """Rows of one microbatch from every [M, R, T] array of a tree."""
    return jax.tree.map(
        lambda leaf: jax.lax.dynamic_index_in_dim(leaf, index, keepdims=False), tree
    )
