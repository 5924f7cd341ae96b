"""The policy's loss: every term that an algorithm may have, weighted, added up, and measured."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from dapo_jax.algorithms import Algorithm
from dapo_jax.config.experiment import Compute, Optimizer
from dapo_jax.learner.batches import Mean, PackedRows, TrainBatch
from dapo_jax.learner.corrections import importance_weights, rejections
from dapo_jax.learner.losses import KL_ESTIMATORS, clamp_log, k3, policy_loss
from dapo_jax.learner.ratio_quantiles import RATIO_HISTOGRAM, histogram
from dapo_jax.learner.update import TOKEN_LOGPROBS, Learner, weighted
from dapo_jax.model.decoder import DecoderConfig, abstract_params
from dapo_jax.model.divergence import Divergence
from dapo_jax.model.experts import BALANCE, REPLACED, ROUTES, RouterRecords
from dapo_jax.model.logprobs import divergences_of, hidden_states, logprobs_of
from dapo_jax.structs import present

IMPORTANCE_SQUARE = "importance_square"  # for the effective sample size
TEACHER = "teacher"  # its parameters among those of a learner that never change


def token_metrics(
    batch: TrainBatch,
    algorithm: Algorithm,
    logprobs: Float[Array, "R T"],
    old_logprobs: Float[Array, "R T"],
    entropy: Float[Array, "R T"],
    seen: dict[str, Float[Array, "R T"]],
) -> dict[str, Mean]:
    """Means over trained tokens (DAPO's figures 2 and 3a, and the sampler's mismatch)."""
    trained = (batch.loss_weights > 0).astype(jnp.float32)
    probability = jnp.exp(old_logprobs)
    sampler = batch.scored.rollouts.sampler_logprobs
    # Where the sampler's are the old ones, the trainer's own view is only in this forward pass.
    trainer = logprobs if algorithm.old_logprobs == "sampler" else old_logprobs
    values = {
        "entropy": entropy,
        "mean_probability": probability,
        "clip_fraction_low": seen["clipped_low"],
        "clip_fraction_high": seen["clipped_high"],
        "clip_fraction_dual": seen["clipped_dual"],
        "kl_sampler_trainer": sampler - trainer,
        "policy_nll": -logprobs,
    }
    if batch.scored.reference_logprobs is not None:
        values["kl_reference"] = k3(logprobs, batch.scored.reference_logprobs)
    if batch.scored.teacher_logprobs is not None:
        values["teacher_kl"] = old_logprobs - batch.scored.teacher_logprobs
    means = {name: weighted(value, trained) for name, value in values.items()}
    means["up_clipped_probability"] = weighted(probability, seen["clipped_high"])
    if batch.scored.old_logprobs is not None and algorithm.ratio != "none":
        means[RATIO_HISTOGRAM] = histogram(seen["ratio"], trained)
    return means


def policy_objective(
    algorithm: Algorithm,
    batch: TrainBatch,
    logprobs: Float[Array, "R T"],
    entropy: Float[Array, "R T"],
    divergence: Float[Array, "R T"] | None = None,
) -> tuple[Array, dict[str, Mean]]:
    """The loss of one microbatch, `sum(loss_weights * token_loss)` and the positive NLL.

    token_loss = importance weight * surrogate, 0 where rejected, + KL + divergence from the
    teacher - entropy bonus.
    """
    scored, weights = batch.scored, batch.loss_weights
    rollouts, trained = scored.rollouts, batch.loss_weights > 0
    segments, counted = rollouts.segment_ids, trained.astype(jnp.float32)
    old = scored.old_logprobs
    old = jax.lax.stop_gradient(logprobs) if old is None else old
    losses, seen = policy_loss(algorithm, logprobs, old, batch.advantages, weights, segments)
    metrics = token_metrics(batch, algorithm, logprobs, old, entropy, seen)
    # Select first: what stands off the trained tokens must not reach an exp, not even times 0.
    logprobs, old, sampler = (
        jnp.where(trained, one, 0.0) for one in (logprobs, old, rollouts.sampler_logprobs)
    )
    if algorithm.importance_cap:
        importance = importance_weights(algorithm, old, sampler, segments, trained)
        losses = importance * losses
        metrics["importance_weight"] = weighted(importance, counted)
        metrics[IMPORTANCE_SQUARE] = weighted(jnp.square(importance), counted)
    if algorithm.rejection != "none":
        policies = logprobs, old, sampler
        below, above = rejections(algorithm, *policies, batch.advantages, segments, trained)
        losses = jnp.where(below | above, 0.0, losses)
        metrics["rejected_fraction_low"] = weighted(below.astype(jnp.float32), counted)
        metrics["rejected_fraction_high"] = weighted(above.astype(jnp.float32), counted)
    if algorithm.kl == "loss":
        other = {"old": old, "sampler": sampler}.get(algorithm.kl_to)
        if other is None:
            reference = present(scored.reference_logprobs, "reference_logprobs")
            other = jnp.where(trained, reference, 0.0)
        kl = KL_ESTIMATORS[algorithm.kl_estimator](logprobs, other)
        if algorithm.kl_importance:  # r k3 has the gradient r (log p - log ref) (2512.02556)
            ratio = jnp.exp(clamp_log(jax.lax.stop_gradient(logprobs) - old))
            kl = ratio * KL_ESTIMATORS["k3+"](logprobs, other)
        losses += algorithm.kl_coefficient * kl
    if divergence is not None:
        divergence = jnp.where(trained, divergence, 0.0)
        losses += algorithm.distillation_coefficient * divergence
        metrics["teacher_kl"] = weighted(divergence, counted)
    if algorithm.entropy_coefficient:
        losses -= algorithm.entropy_coefficient * jnp.where(trained, entropy, 0.0)
    loss = jnp.sum(weights * losses)
    if batch.nll_weights is not None:
        loss -= jnp.sum(batch.nll_weights * logprobs)
    return loss, metrics


def recorded_of_routers(algorithm: Algorithm, config: DecoderConfig) -> list[str]:
    """Records that an update asks of routers: some of `experts.RECORDS`."""
    if not config.experts:
        return []
    return [BALANCE] if algorithm.router_replay == "none" else [BALANCE, REPLACED]


def router_terms(batch: TrainBatch, records: RouterRecords) -> tuple[Array, dict[str, Mean]]:
    """The load-balance loss of a microbatch, and means of the routers' records.

    A token is drawn with what routers did at the token before it. Loads are those of the
    microbatch, and a token's part weighs as its loss does.
    """
    trained = (batch.loss_weights > 0).astype(jnp.float32)
    by_layer = {BALANCE: records.balance, REPLACED: records.replaced}
    seen = {
        name: jnp.roll(layers.mean(axis=0), 1, axis=1)
        for name, layers in by_layer.items()
        if layers is not None
    }
    means = {name: weighted(value, trained) for name, value in seen.items()}
    return jnp.sum(batch.loss_weights * seen[BALANCE]), means


def policy_learner(
    algorithm: Algorithm,
    compute: Compute,
    settings: Optimizer,
    config: DecoderConfig,
    mesh: jax.sharding.Mesh,
    temperature: float = 1.0,
    frozen: Any = None,
    keep_logprobs: bool = False,
    teacher: DecoderConfig | None = None,
) -> Learner:
    """The learner whose score is the log-prob of each token.

    Args:
        frozen: parameters that never change (see `Learner`).
        temperature: the sampler's, so that both speak of the same distribution.
        keep_logprobs: each update also returns the log-probs of the policy it differentiates.
        teacher: that the loss diverges from; its parameters are `frozen[TEACHER]`.
    """
    chunk_tokens = compute.logprob_chunk_tokens
    routers = recorded_of_routers(algorithm, config)

    def states_of(params, shape: DecoderConfig, rows: PackedRows, **options: Any):
        arrays = rows.tokens, rows.segment_ids, rows.positions
        return hidden_states(params, shape, *arrays, **options)

    def of_rows(params, rows: PackedRows, record: Sequence[str] = ()):
        hidden, records = states_of(params, config, rows, routes=rows.routes, record=record)
        pair = logprobs_of(params, hidden, rows.tokens, temperature, chunk_tokens)
        return hidden, *pair, records

    def score(params, rows: PackedRows):
        if algorithm.router_replay != "old" or rows.routes is not None:
            return of_rows(params, rows)[1]
        _, logprobs, _, records = of_rows(params, rows, record=[ROUTES])
        return logprobs, records.routes

    def divergence_of(params, hidden, shape: DecoderConfig, rows: PackedRows):
        given, top_k = params[TEACHER], algorithm.distillation_top_k
        beta, temperature = algorithm.distillation_beta, algorithm.distillation_temperature
        kind = Divergence(beta, top_k, temperature)
        theirs = given, states_of(given, shape, rows)[0]
        return divergences_of(params, hidden, *theirs, kind, chunk_tokens)

    def loss(params, batch: TrainBatch):
        rows = batch.scored.rollouts
        hidden, logprobs, entropy, records = of_rows(params, rows, routers)
        divergence = divergence_of(params, hidden, teacher, rows) if teacher else None
        value, metrics = policy_objective(algorithm, batch, logprobs, entropy, divergence)
        if routers:
            balance, of_routers = router_terms(batch, records)
            value += algorithm.router_balance_coefficient * balance
            metrics |= of_routers
        kept: dict[str, Any] = {TOKEN_LOGPROBS: logprobs} if keep_logprobs else {}
        return value, metrics | kept

    shapes, by_rows = abstract_params(config), not routers  # whose loads are a microbatch's
    return Learner(score, loss, shapes, settings, mesh, frozen, by_rows)
