"""The optimizer, the sharded, jitted optimizer step and score pass of a model; a run's models.

Step and score pass loop over microbatches in one compiled call. The number of iterations is dynamic
and the array shapes are static, so a batch that packs into fewer rows does not recompile.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

from dapo_jax.config.experiment import Config, Optimizer
from dapo_jax.learner.batches import (
    CRITIC,
    Mean,
    PackedRows,
    TokenScores,
    TrainBatch,
    TrainState,
)
from dapo_jax.learner.muon import with_muon
from dapo_jax.learner.packing import Segment
from dapo_jax.model.decoder import DecoderConfig
from dapo_jax.model.layers import ADAPTER_NAMES
from dapo_jax.model.lm_head import put, take
from dapo_jax.model.trainable import join, without
from dapo_jax.runtime import sharding
from dapo_jax.runtime.nonfinite import REASONS
from dapo_jax.types.errors import require

POLICY = "policy"
ROWS = (None, "batch", "sequence")  # logical axes of [M, R, T]
MATRICES = ("kernel", "embedding", "head", "score", *ADAPTER_NAMES)


class UpdateOutputs(NamedTuple):
    """Metrics of an update, and the log-probs that it differentiated if they are kept."""

    means: dict[str, Mean]
    token_logprobs: Float[Array, "*M R T"] | None = None


def weighted(values: Float[Array, "R T"], weights: Float[Array, "R T"]) -> Mean:
    """Return the weighted mean over a microbatch; values with weight 0 may be NaN."""
    return Mean(jnp.sum(jnp.where(weights > 0, values, 0.0) * weights), jnp.sum(weights))


def make_optimizer(settings: Optimizer) -> optax.GradientTransformation:
    """Return AdamW or Muon without the learning rate: clipping by norm, direction, weight decay.

    The caller multiplies by -lr, because the schedule counts rollout steps, not optimizer steps.
    """

    def is_matrix(path: tuple, _: Any) -> bool:  # norms and biases are not decayed
        return any(getattr(part, "key", None) in MATRICES for part in path)

    matrices = functools.partial(jax.tree_util.tree_map_with_path, is_matrix)
    adam = optax.scale_by_adam(settings.beta1, settings.beta2, settings.eps)
    return optax.chain(
        optax.clip_by_global_norm(settings.max_grad_norm),
        with_muon(settings, adam) if settings.name == "muon" else adam,
        optax.add_decayed_weights(settings.weight_decay, mask=matrices),
    )


# Schedule after the warm-up: completed fraction of the steps -> fraction of the peak.
SCHEDULES = {
    "constant": lambda done: 1.0,
    "linear": lambda done: 1.0 - done,
    "cosine": lambda done: 0.5 * (1.0 + math.cos(math.pi * done)),
}


def learning_rate(settings: Optimizer, step: int, total_steps: int) -> float:
    """Return the learning rate of `step` (from 0): a linear warm-up, then the schedule.

    No step has rate 0: the first has peak / warmup_steps, and a decay reaches 0 after the last.
    """
    warmup = settings.warmup_steps
    assert warmup >= 0 < settings.learning_rate  # `choose_rates` replaces 'auto'
    if step < warmup:
        return settings.learning_rate * (step + 1) / warmup
    done = (step - warmup) / max(1, total_steps - warmup)
    return settings.learning_rate * SCHEDULES[settings.schedule](done)


def device_memory(mesh: jax.sharding.Mesh) -> float:
    """Return the bytes of memory of one device of the mesh; infinite if it does not say."""
    return float((mesh.local_devices[0].memory_stats() or {}).get("bytes_limit", math.inf))


class Learner:
    """Compiled score pass and update of a model, made by `policy_learner` or `critic_learner`.

    `start` makes a fresh `TrainState` of parameters; `copy` copies them, since an update donates
    its state. `shardings` and `abstract_state` describe a `TrainState`.
    """

    def __init__(
        self,
        score: Callable[[Any, PackedRows], TokenScores],  # of parameters and rows [R, T]
        loss: Callable[[Any, TrainBatch], tuple[Array, UpdateOutputs]],  # a sum over microbatches
        boxed_params: Any,  # shapes and logical axis names of all parameters
        settings: Optimizer,
        mesh: jax.sharding.Mesh,
        frozen: Any = None,  # parameters on the mesh that never change; no state has them
        sums_rows: bool = True,  # loss and metrics are sums over rows: replicas reduce once
    ):
        self.mesh = mesh
        self.frozen = frozen or {}
        # Reduce over replicas once per update instead of in every microbatch. XLA then also
        # reduce-scatters float32 gradients over fsdp instead of all-reducing bfloat16 ones.
        self._per_replica = sums_rows and mesh.size > 1
        self._score_rows = score
        self._fitting: set[tuple[int, int]] = set()  # shapes of rows whose update fits into memory
        self._loss = loss
        self._optimizer = make_optimizer(settings)
        self._checked_apart = settings.name != "muon"
        boxed = jax.eval_shape(self._fresh_state, without(boxed_params, self.frozen))
        self.shardings: TrainState = sharding.tree_shardings(mesh, boxed)
        self.abstract_state: TrainState = jax.tree.map(
            lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place),
            sharding.unbox(boxed),
            self.shardings,
        )
        self.start = jax.jit(self._fresh_state, out_shardings=self.shardings)
        self.copy = jax.jit(
            lambda params: jax.tree.map(jnp.copy, params), out_shardings=self.shardings.params
        )
        rows = sharding.sharding(mesh, *ROWS)
        self._score = jax.jit(self._score_fn, out_shardings=rows)
        self._gradient = jax.jit(self._gradient_fn)
        self._update = jax.jit(
            self._update_fn, donate_argnums=0, out_shardings=(self.shardings, None)
        )

    def score(self, params: Any, rollouts: PackedRows, microbatches: int) -> TokenScores:
        """Return log-probs of the tokens (values, for a critic) [M, R, T]; 0 on unused rows."""
        rollouts = sharding.put(self.mesh, rollouts, *ROWS)
        with sharding.activate(self.mesh):
            return self._score(join(self.frozen, params), rollouts, microbatches)

    def _check_memory(self, arguments: tuple) -> None:
        """Raise `ConfigError` if an update needs more than a device has, as the compiler counts."""
        limit, (_, rows, tokens) = device_memory(self.mesh), arguments[2].loss_weights.shape
        if limit == math.inf or (rows, tokens) in self._fitting:
            return
        # The call of the same program compiles nothing after this.
        counted: Any = self._update.lower(*arguments).compile().memory_analysis()
        results = counted.output_size_in_bytes - counted.alias_size_in_bytes
        needed = counted.argument_size_in_bytes + results + counted.temp_size_in_bytes
        allowed = (
            f"smaller, or packing.row_tokens = {tokens} or the model: an update takes "
            f"{needed / 1e9:,.1f} GB ({counted.temp_size_in_bytes / 1e9:,.1f} of them temporary) "
            f"on each of {self.mesh.size} devices, which have {limit / 1e9:,.1f}"
        )
        require(needed <= limit, "packing.rows_per_microbatch", rows, allowed)
        self._fitting.add((rows, tokens))

    def update(
        self, state: TrainState, batch: TrainBatch, microbatches: int, learning_rate: float
    ) -> tuple[TrainState, UpdateOutputs]:
        """Take an optimizer step on a minibatch; donates `state`.

        If the gradient, or the moments or parameters after the step, are not finite, the state does
        not change and the metric `skipped_updates` is 1. Raises `ConfigError` before the first one
        if it takes more memory than a device has.
        """
        batch = sharding.put(self.mesh, batch, *ROWS)
        arguments = state, self.frozen, batch, microbatches, learning_rate
        with sharding.activate(self.mesh):
            self._check_memory(arguments)
            return self._update(*arguments)

    def differentiate(
        self, params: Any, batch: TrainBatch, microbatches: int
    ) -> tuple[Any, UpdateOutputs]:
        """Return the gradient that `update` would use, and the outputs of the loss."""
        batch = sharding.put(self.mesh, batch, *ROWS)
        with sharding.activate(self.mesh):
            return self._gradient(params, self.frozen, batch, microbatches)

    def lower(
        self, program: str, batch: PackedRows | TrainBatch, params: Any = None
    ) -> jax.stages.Lowered:
        """Lower the program "score" or "update" for a batch of these shapes [M, R, T].

        Nothing is computed, and the devices of the mesh need not exist.
        """
        place = sharding.sharding(self.mesh, *ROWS)
        batch = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place), batch
        )
        state = self.abstract_state
        with sharding.activate(self.mesh):
            if program == "score":
                params = state.params if params is None else params
                return self._score.lower(join(self.frozen, params), batch, 1)
            return self._update.lower(state, self.frozen, batch, 1, 0.0)

    def _fresh_state(self, params: Any) -> TrainState:
        return TrainState(params, self._optimizer.init(params), jnp.zeros((), jnp.int32))

    def _score_fn(self, params: Any, rollouts: PackedRows, microbatches) -> TokenScores:
        def score_microbatch(i):
            return self._score_rows(params, take(rollouts, i))

        def body(i, scores):
            return put(scores, score_microbatch(i), i)

        count = len(rollouts.tokens)
        shapes = jax.eval_shape(score_microbatch, 0)
        zeros = jax.tree.map(lambda leaf: jnp.zeros((count, *leaf.shape), leaf.dtype), shapes)
        return jax.lax.fori_loop(0, microbatches, body, zeros)

    def _gradient_fn(self, params, frozen, batch: TrainBatch, microbatches):
        arguments = (params, frozen, batch, microbatches)
        if self._per_replica:
            split = (None, None, 1, None)  # axis of each argument that is sharded over replicas
            outputs_split = (None, None, 1)
            add_up = sharding.per_replica(self._add_replica, self.mesh, split, outputs_split)
            gradient, means, logprobs = add_up(*arguments)
        else:
            gradient, means, logprobs = self._add_microbatches(*arguments)
        gradient = jax.lax.with_sharding_constraint(gradient, self.shardings.params)
        return gradient, UpdateOutputs(means, logprobs)

    def _add_replica(self, *arguments):
        """Sum over the microbatches of a replica's rows, then over replicas."""
        gradient, means, logprobs = self._add_microbatches(*arguments)
        if self.mesh.shape["data"] > 1:
            gradient, means = jax.lax.psum((gradient, means), "data")
        return gradient, means, logprobs

    def _add_microbatches(self, params, frozen, batch: TrainBatch, microbatches):
        """Return the gradient, the metrics, and the log-probs of all tokens if they are kept."""

        def loss(params, batch: TrainBatch):
            value, outputs = self._loss(join(frozen, params), batch)
            outputs.means["loss"] = Mean(value, jnp.zeros(()))  # normalised already: a sum
            return value, jax.lax.stop_gradient(outputs)

        def compute_microbatch(i):
            rows = jax.grad(loss, has_aux=True)(params, take(batch, i))
            # XLA:TPU crashes on microbatch gradients added in a loop without the barrier.
            gradient, (means, logprobs) = jax.lax.optimization_barrier(rows)
            if logprobs is not None:  # placed among zeros, so that adding combines microbatches
                zeros = jnp.zeros(batch.loss_weights.shape)
                logprobs = jax.lax.dynamic_update_index_in_dim(zeros, logprobs, i, 0)
            return gradient, means, logprobs

        def body(i, carry):
            return jax.tree.map(jnp.add, carry, compute_microbatch(i))

        shapes = jax.eval_shape(compute_microbatch, 0)
        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
        return jax.lax.fori_loop(0, microbatches, body, zeros)

    def _update_fn(self, state: TrainState, frozen, batch: TrainBatch, microbatches, learning_rate):
        gradient, outputs = self._gradient_fn(state.params, frozen, batch, microbatches)
        means = outputs.means
        loss = means["loss"].total
        arrays = state, gradient, learning_rate, self._checked_apart
        new, measured = apply_gradient(self._optimizer, *arrays)
        applied = measured["gradient_norm"].weight
        means["loss"] = Mean(jnp.where(applied > 0, loss, 0.0), applied)
        return new, outputs._replace(means=means | measured)


class AveragedLearner:
    """An exponential mean of a policy's parameters: m += rate (p - m) after each of its updates.

    Its state is a `TrainState` without an optimizer; it scores as the policy does.
    """

    def __init__(self, policy: Learner, rate: float):
        self.score, self.lower = policy.score, policy.lower
        self.abstract_state = policy.abstract_state.replace(opt_state=())
        shardings = policy.shardings.replace(opt_state=())

        def start(params: Any) -> TrainState:
            return TrainState(params, (), jnp.zeros((), jnp.int32))

        def move(state: TrainState, params: Any) -> TrainState:
            mean = jax.tree.map(lambda m, p: m + rate * (p - m), state.params, params)
            return TrainState(mean, (), state.update_count + 1)

        self.start = jax.jit(start, out_shardings=shardings)
        self.update = jax.jit(move, donate_argnums=0, out_shardings=shardings)


def apply_gradient(
    optimizer: optax.GradientTransformation,
    state: TrainState,
    gradient: Any,
    learning_rate: Any,
    checked_apart: bool = True,
) -> tuple[TrainState, dict[str, Mean]]:
    """Return the state after an optimizer step, and its norm, skips and reasons of skips.

    The state does not change if something is not finite, as `Learner.update` says. `checked_apart`
    computes the step once for that check, which keeps nothing of it, and once in place of the old
    state; False, for a step of many products: once, beside the old state.
    """

    def step(gradient: Any, state: TrainState) -> TrainState:
        direction, opt_state = optimizer.update(gradient, state.opt_state, state.params)
        params = jax.tree.map(lambda p, d: p - learning_rate * d, state.params, direction)
        return TrainState(params, opt_state, state.update_count + 1)

    norm = optax.tree.norm(gradient)
    arrays = gradient, state  # the barrier keeps XLA from computing both steps as one
    new = step(*jax.lax.optimization_barrier(arrays)) if checked_apart else step(*arrays)
    moments = jnp.stack([jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(new.opt_state)])
    # Check the norm of the parameters, because a forward pass squares them.
    sizes = [norm, jnp.where(moments.all(), 0.0, jnp.nan), optax.tree.norm(new.params)]
    is_finite = jnp.isfinite(jnp.stack(sizes))
    finite = is_finite.all()
    take = (lambda: step(*arrays)) if checked_apart else (lambda: new)
    new = jax.lax.cond(finite, take, lambda: state)
    is_applied = finite.astype(jnp.float32)
    means = {
        "gradient_norm": Mean(jnp.where(finite, norm, 0.0), is_applied),
        "skipped_updates": Mean(1.0 - is_applied, jnp.ones(())),
    }
    first = jnp.argmin(is_finite)  # it makes the later ones non-finite
    for i, name in enumerate(REASONS):
        means[name] = Mean(jnp.where(first == i, 1.0 - is_applied, 0.0), jnp.ones(()))
    return new, means


# --- all models of a run ----------------------------------------------------------------------


class Model(NamedTuple):
    """Shape and parameters of a frozen model; the parameters may be abstract."""

    decoder: DecoderConfig
    params: Any


@dataclasses.dataclass(frozen=True)
class TokenScorer:
    """A model beside the policy: its program, and its parameters if it is frozen."""

    # None: no score pass, the policy's update reads the parameters
    learner: Learner | AveragedLearner | None
    params: Any = None  # None: the model is trained, and `LearnerStates` has them
    # Responses -> those that it scores, behind prompts of its own; None: it scores the policy's.
    tell: Callable[[Sequence[Segment]], list[Segment]] | None = None


@dataclasses.dataclass(frozen=True)
class LearnerPrograms:
    """Compiled programs of the policy, and of the models that score its tokens, by name."""

    policy: Learner
    scorers: Mapping[str, TokenScorer] = dataclasses.field(default_factory=dict)

    def trained(self) -> dict[str, Any]:
        """Return the programs of the models that have a state, by name; the policy is the first."""
        pairs = self.scorers.items()
        others = {name: s.learner for name, s in pairs if s.learner and s.params is None}
        return {POLICY: self.policy} | others


@dataclasses.dataclass(frozen=True)
class LearnerStates:
    """The train states of the policy and of the other trained models, by name."""

    policy: TrainState
    others: Mapping[str, TrainState] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(cls, states: Mapping[str, TrainState]) -> "LearnerStates":
        """Return the states of a mapping that has all of them."""
        return cls(states[POLICY], {k: state for k, state in states.items() if k != POLICY})

    def by_name(self) -> dict[str, TrainState]:
        """Return all of them by name; the policy is the first."""
        return {POLICY: self.policy, **self.others}


@dataclasses.dataclass(frozen=True)
class UpdateRecord:
    """The batch and metrics of an optimizer update; arrays may still be computed on devices."""

    learner: str  # name of the model
    minibatch: int  # its index in the step
    batch: TrainBatch
    microbatches: int  # number of microbatches that are not empty
    means: dict[str, Mean]  # by name; empty if the learning rate is 0 and nothing was updated
    token_logprobs: jax.Array | None = None  # [M, R, T] of the policy, with `log.token_ratios`


def optimizers(config: Config) -> dict[str, Optimizer]:
    """Return the optimizer settings of the trained models, by name."""
    critic = {CRITIC: config.critic.optimizer} if config.algorithm.critic else {}
    return {POLICY: config.optimizer} | critic


def learning_rates(config: Config, step: int) -> dict[str, float]:
    """Return the rates by model; the policy's is 0 while only the critic is trained."""
    rates = {}
    for name, settings in optimizers(config).items():
        wait = config.critic_pretrain_steps() if name == POLICY else 0
        schedule = step - wait, config.total_steps - wait
        rates[name] = learning_rate(settings, *schedule) if step >= wait else 0.0
    return rates


def update(
    programs: LearnerPrograms,
    states: LearnerStates,
    rates: Mapping[str, float],  # by model
    minibatch: int,
    batch: TrainBatch,
    microbatches: int,
) -> tuple[LearnerStates, list[UpdateRecord]]:
    """Take an optimizer step of each trained model; skip a batch without loss weights.

    The new states and metrics are returned while the devices still compute them.
    """
    if not batch.loss_weights.any():  # all responses were filtered
        return states, []
    new, records = states.by_name(), []
    for name, learner in programs.trained().items():
        if isinstance(learner, AveragedLearner):
            new[name] = learner.update(new[name], new[POLICY].params)
            continue
        outputs = UpdateOutputs({})
        if rates[name]:
            new[name], outputs = learner.update(new[name], batch, microbatches, rates[name])
        means, logprobs = outputs
        records.append(UpdateRecord(name, minibatch, batch, microbatches, means, logprobs))
    return LearnerStates.of(new), records
