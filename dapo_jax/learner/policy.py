"""The policy's loss: every term that an algorithm may have, weighted, added up, and measured."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from dapo_jax.algorithms import Algorithm
from dapo_jax.config.experiment import Compute, Optimizer
from dapo_jax.learner.losses import KL_ESTIMATORS, importance_weights, k3, policy_loss
from dapo_jax.learner.update import TOKEN_LOGPROBS, Learner, weighted
from dapo_jax.model.decoder import DecoderConfig, abstract_params
from dapo_jax.model.logprobs import token_logprobs
from dapo_jax.structs import Mean, Rollouts, TrainBatch, present


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
    probability = jnp.exp(old_logprobs)
    sampler = batch.scored.rollouts.sampler_logprobs
    # Where the sampler's are the old ones, the trainer's own view is only in this forward pass.
    trainer = logprobs if algorithm.old_logprobs == "sampler" else old_logprobs
    values = {
        "entropy": entropy,
        "mean_probability": probability,
        "clip_fraction_low": clipped["clipped_low"],
        "clip_fraction_high": clipped["clipped_high"],
        "clip_fraction_dual": clipped["clipped_dual"],
        "kl_sampler_trainer": sampler - trainer,
        "policy_nll": -logprobs,
    }
    if batch.scored.reference_logprobs is not None:
        values["kl_reference"] = k3(logprobs, batch.scored.reference_logprobs)
    means = {name: weighted(value, trained) for name, value in values.items()}
    means["up_clipped_probability"] = weighted(probability, clipped["clipped_high"])
    return means


def policy_objective(
    algorithm: Algorithm,
    batch: TrainBatch,
    logprobs: Float[Array, "R T"],
    entropy: Float[Array, "R T"],
) -> tuple[Array, dict[str, Mean]]:
    """The loss of one microbatch, `sum(loss_weights * token_loss)` and the positive NLL.

    token_loss = importance weight * clipped surrogate + KL to the reference - entropy bonus.
    """
    scored, weights = batch.scored, batch.loss_weights
    rollouts, trained = scored.rollouts, batch.loss_weights > 0
    old = scored.old_logprobs
    old = jax.lax.stop_gradient(logprobs) if old is None else old
    losses, clipped = policy_loss(
        algorithm, logprobs, old, batch.advantages, weights, rollouts.segment_ids
    )
    metrics = token_metrics(batch, algorithm, logprobs, old, entropy, clipped)
    # Select first: what stands off the trained tokens must not reach an exp, not even times 0.
    logprobs = jnp.where(trained, logprobs, 0.0)
    if algorithm.importance_cap:
        sampler = jnp.where(trained, rollouts.sampler_logprobs, 0.0)
        importance = importance_weights(
            jnp.where(trained, old, 0.0), sampler, algorithm.importance_cap
        )
        losses = importance * losses
        metrics["importance_weight"] = weighted(importance, trained.astype(jnp.float32))
    if algorithm.kl == "loss":
        reference = present(scored.reference_logprobs, "reference_logprobs")
        reference = jnp.where(trained, reference, 0.0)
        kl = KL_ESTIMATORS[algorithm.kl_estimator](logprobs, reference)
        losses += algorithm.kl_coefficient * kl
    if algorithm.entropy_coefficient:
        losses -= algorithm.entropy_coefficient * jnp.where(trained, entropy, 0.0)
    loss = jnp.sum(weights * losses)
    if batch.nll_weights is not None:
        loss -= jnp.sum(batch.nll_weights * logprobs)
    return loss, metrics


def policy_learner(
    algorithm: Algorithm,
    compute: Compute,
    settings: Optimizer,
    config: DecoderConfig,
    mesh: jax.sharding.Mesh,
    temperature: float = 1.0,
    frozen: Any = None,
    keep_logprobs: bool = False,
) -> Learner:
    """The learner whose score is the log-prob of each token.

    Args:
        frozen: parameters that never change (see `Learner`).
        temperature: the sampler's, so that both speak of the same distribution.
        keep_logprobs: each update also returns the log-probs of the policy it differentiates.
    """

    def of_rows(params, rows: Rollouts):
        return token_logprobs(
            params,
            config,
            rows.tokens,
            rows.segment_ids,
            rows.positions,
            temperature=temperature,
            chunk_tokens=compute.logprob_chunk_tokens,
        )

    def score(params, rows: Rollouts):
        return of_rows(params, rows)[0]

    def loss(params, batch: TrainBatch):
        logprobs, entropy = of_rows(params, batch.scored.rollouts)
        value, metrics = policy_objective(algorithm, batch, logprobs, entropy)
        kept: dict[str, Any] = {TOKEN_LOGPROBS: logprobs} if keep_logprobs else {}
        return value, metrics | kept

    return Learner(score, loss, abstract_params(config), settings, mesh, frozen)
