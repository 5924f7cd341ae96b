"""The policy's loss: the sum of all terms that an algorithm can have, and its metrics."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from dapo_jax.config.algorithm import Algorithm, traits
from dapo_jax.config.experiment import Compute, Optimizer
from dapo_jax.learner.batches import (
    NOT_SCORED,
    REFERENCE,
    TEACHER,
    Mean,
    PackedRows,
    TokenScores,
    TrainBatch,
)
from dapo_jax.learner.losses import (
    KL_ESTIMATORS,
    clamp_log,
    estimate_kl,
    future_weights,
    importance_weights,
    k3,
    policy_loss,
    rejections,
)
from dapo_jax.learner.update import Learner, UpdateOutputs, weighted
from dapo_jax.model.decoder import DecoderConfig, abstract_params
from dapo_jax.model.experts import BALANCE, REPLACED, ROUTES, RouterRecords
from dapo_jax.model.lm_head import Scale
from dapo_jax.model.logprobs import energies_of, hidden_states, logprobs_of
from dapo_jax.runtime.registry import feature
from dapo_jax.types.structs import present

# Metrics of an update that are no means of their own: for the quantiles of the ratios, and for the
# effective sample size.
RATIO_HISTOGRAM, IMPORTANCE_SQUARE = "ratio_histogram", "importance_square"
_SIZES = np.geomspace(1e-4, 20.0, 80)  # log-ratios in steps of 16 %
EDGES = np.concatenate([-_SIZES[::-1], _SIZES])  # of the histogram


def histogram(ratio: Float[Array, "R T"], trained: Float[Array, "R T"]) -> Mean:
    """Count the log-ratios of trained tokens between the edges: [len(EDGES) + 1]."""
    place = jnp.searchsorted(jnp.asarray(EDGES, ratio.dtype), jnp.log(ratio).ravel())
    counts = jax.ops.segment_sum(trained.ravel(), place, len(EDGES) + 1)
    return Mean(counts, trained.sum())


def token_metrics(
    batch: TrainBatch,
    algorithm: Algorithm,
    logprobs: Float[Array, "R T"],
    old_logprobs: Float[Array, "R T"],
    entropy: Float[Array, "R T"],
    info: dict[str, Float[Array, "R T"]],
) -> dict[str, Mean]:
    """Return means over trained tokens: DAPO's figures 2 and 3a, mismatch to the sampler."""
    trained = (batch.loss_weights > 0).astype(jnp.float32)
    probability = jnp.exp(old_logprobs)
    sampler = batch.scored.rollouts.sampler_logprobs
    # If the old log-probs are the sampler's, only this forward pass has the trainer's.
    trainer = old_logprobs if algorithm.old_logprobs == "recompute" else logprobs
    likelier = jnp.exp(trainer - sampler)  # MLPerf allows 0.999 to 1.002
    values = {
        "entropy": entropy,
        "mean_probability": probability,
        "clip_fraction_low": info["clipped_low"],
        "clip_fraction_high": info["clipped_high"],
        "clip_fraction_dual": info["clipped_dual"],
        "kl_sampler_trainer": sampler - trainer,
        "sampler_match_fraction": (likelier >= 0.999) & (likelier <= 1.002),
        "policy_nll": -logprobs,
    }
    scores = batch.scored.scores
    if scores.get(REFERENCE) is not None:
        values["kl_reference"] = k3(logprobs, scores[REFERENCE])
    if TEACHER in scores:
        values["teacher_kl"] = old_logprobs - scores[TEACHER]
    means = {name: weighted(value, trained) for name, value in values.items()}
    means["up_clipped_probability"] = weighted(probability, info["clipped_high"])
    has_old = batch.scored.old_logprobs is not None or batch.interpolation is not None
    if has_old and algorithm.ratio != "none":
        means[RATIO_HISTOGRAM] = histogram(info["ratio"], trained)
    return means


def _kl(
    algorithm: Algorithm, batch: TrainBatch, logprobs: Array, old: Array, sampler: Array
) -> Float[Array, "R T"]:
    """Return the KL of each token, from log-probs that are 0 on untrained tokens."""
    other = {"old": old, "sampler": sampler}.get(algorithm.kl_to)
    if other is None:
        reference = present(batch.scored.scores.get(REFERENCE), "reference log-probs")
        other = jnp.where(batch.loss_weights > 0, reference, 0.0)
    kl = estimate_kl(algorithm, logprobs, other)
    if algorithm.kl_importance:  # r k3 has the gradient r (log p - log ref) (2512.02556)
        ratio = jnp.exp(clamp_log(jax.lax.stop_gradient(logprobs) - old))
        kl = ratio * KL_ESTIMATORS["k3+"](logprobs, other)
    return kl if batch.kl_tokens is None else jnp.where(batch.kl_tokens, kl, 0.0)


def _old_logprobs(batch: TrainBatch, logprobs: Float[Array, "R T"]) -> Float[Array, "R T"]:
    """Return log p_old; where none was scored, the ratio to the policy itself is 1."""
    scored = batch.scored
    if batch.interpolation is not None:
        sampler = scored.rollouts.sampler_logprobs
        return sampler + batch.interpolation * (logprobs - sampler)
    if scored.old_logprobs is None:
        return logprobs
    return jnp.where(scored.old_logprobs == NOT_SCORED, logprobs, scored.old_logprobs)


def _surrogate(
    algorithm: Algorithm, batch: TrainBatch, logprobs: Float[Array, "R T"], old: Float[Array, "R T"]
) -> tuple[Float[Array, "R T"], dict[str, Float[Array, "R T"]]]:
    """Return each token's policy loss, before KL and entropy, and its masks and ratio."""
    segments, weights = batch.scored.rollouts.segment_ids, batch.loss_weights
    advantages = batch.advantages
    fixed = jax.lax.stop_gradient(logprobs)
    if algorithm.future_kl_clip:
        moved = jnp.where(weights > 0, fixed - old, 0.0)
        advantages = advantages * future_weights(algorithm, moved, segments)
    losses, info = policy_loss(algorithm, logprobs, old, advantages, weights, segments)
    if algorithm.probability_power:  # DFT, 2508.05629, equation 9: a constant times the loss
        losses *= jnp.exp(algorithm.probability_power * jnp.where(weights > 0, fixed, 0.0))
    return losses, info


def policy_objective(
    algorithm: Algorithm,
    batch: TrainBatch,
    logprobs: Float[Array, "R T"],
    entropy: Float[Array, "R T"],
    divergence: Float[Array, "R T"] | None = None,
) -> tuple[Array, dict[str, Mean]]:
    """Return the loss of a microbatch and its metrics.

    loss = sum(loss_weights * token_loss) + the NLL of correct responses and observations - an
    adaptive entropy bonus; token_loss = importance weight * surrogate (0 if rejected) + KL +
    divergence from the teacher - entropy bonus.
    """
    scored = batch.scored
    weights = batch.loss_weights
    segments = scored.rollouts.segment_ids
    trained = weights > 0
    counted = trained.astype(jnp.float32)
    old = _old_logprobs(batch, jax.lax.stop_gradient(logprobs))
    losses, info = _surrogate(algorithm, batch, logprobs, old)
    metrics = token_metrics(batch, algorithm, logprobs, old, entropy, info)
    nll = 0.0
    if batch.nll_weights is not None:
        nll = jnp.sum(batch.nll_weights * jnp.where(batch.nll_weights > 0, -logprobs, 0.0))
    # Mask before exp: 0 * inf is NaN.
    logprobs = jnp.where(trained, logprobs, 0.0)
    old = jnp.where(trained, old, 0.0)
    sampler = jnp.where(trained, scored.rollouts.sampler_logprobs, 0.0)
    if algorithm.importance_cap:
        importance = importance_weights(algorithm, old, sampler, segments, trained)
        losses = importance * losses
        metrics["importance_weight"] = weighted(importance, counted)
        metrics[IMPORTANCE_SQUARE] = weighted(jnp.square(importance), counted)
    if algorithm.rejection != "none":
        learner = old if algorithm.rejection_of == "old" else jax.lax.stop_gradient(logprobs)
        counts = trained
        if algorithm.rejection_sign == "negative":
            counts = trained & (batch.advantages < 0)
        below, above = rejections(algorithm, learner - sampler, segments, trained, counts)
        losses = jnp.where(below | above, 0.0, losses)
        metrics["rejected_fraction_low"] = weighted(below.astype(jnp.float32), counted)
        metrics["rejected_fraction_high"] = weighted(above.astype(jnp.float32), counted)
    if algorithm.kl == "loss":
        losses += algorithm.kl_coefficient * _kl(algorithm, batch, logprobs, old, sampler)
    if divergence is not None:
        divergence = jnp.where(trained, divergence, 0.0)
        losses += algorithm.distillation_coefficient * divergence
        metrics["teacher_kl"] = weighted(divergence, counted)
    if algorithm.entropy_coefficient:
        losses -= algorithm.entropy_coefficient * jnp.where(trained, entropy, 0.0)
    loss = jnp.sum(weights * losses) + nll
    if batch.entropy_weights is not None:
        loss -= jnp.sum(batch.entropy_weights * jnp.where(trained, entropy, 0.0))
    return loss, metrics


def router_terms(batch: TrainBatch, records: RouterRecords) -> tuple[Array, dict[str, Mean]]:
    """Return the load-balance loss of a microbatch and the means of its router records.

    A token belongs to the router decisions of the token before it, from which it was sampled. Loads
    are counted per microbatch, and the loss weights apply.
    """
    trained = (batch.loss_weights > 0).astype(jnp.float32)
    by_layer = {BALANCE: records.balance, REPLACED: records.replaced}
    shifted = {
        name: jnp.roll(layers.mean(axis=0), 1, axis=1)
        for name, layers in by_layer.items()
        if layers is not None
    }
    means = {name: weighted(value, trained) for name, value in shifted.items()}
    return jnp.sum(batch.loss_weights * shifted[BALANCE]), means


@dataclasses.dataclass(frozen=True)
class PolicySettings:
    """Settings of the policy's score and loss."""

    algorithm: Algorithm
    compute: Compute
    temperature: float = 1.0  # that of the sampler, so that log-probs are of the same distribution
    keep_logprobs: bool = False  # whether updates return the log-probs that they differentiate
    teacher: DecoderConfig | None = None  # the loss diverges from; parameters: `frozen[TEACHER]`


def policy_learner(
    settings: PolicySettings,
    optimizer: Optimizer,
    config: DecoderConfig,
    mesh: jax.sharding.Mesh,
    frozen: Any = None,  # parameters that never change (see `Learner`)
) -> Learner:
    """Return the learner of the policy; it scores tokens with their log-probs."""
    algorithm = settings.algorithm
    chunk_tokens = settings.compute.logprob_chunk_tokens
    scale = Scale(settings.temperature, config.logit_cap)
    distilled = feature("divergence") if settings.teacher else None
    recorded: list[str] = []  # names of the `experts.RECORDS` that an update reads
    if config.experts:
        recorded = [BALANCE] if algorithm.router_replay == "none" else [BALANCE, REPLACED]

    def run(params, rows: PackedRows, needed: Array, record: Sequence[str] = ()):
        routed = rows.inputs._replace(routes=rows.routes)
        hidden, records = hidden_states(params, config, routed, record)
        head = params, hidden, rows.tokens, needed
        logprobs, entropy = logprobs_of(*head, scale, chunk_tokens, rows.edges)
        return hidden, logprobs, entropy, records

    def score(params, rows: PackedRows) -> TokenScores:
        record = [ROUTES] if algorithm.router_replay == "old" and rows.routes is None else []
        needed = rows.response_index >= 0
        hidden, logprobs, entropy, records = run(params, rows, needed, record)
        energies = None
        if "energies" in traits(algorithm.advantage):
            arrays = params, hidden, rows.tokens, needed, logprobs
            energies = energies_of(*arrays, scale, chunk_tokens, rows.edges)
        entropies = entropy if algorithm.reads_entropies else None
        return TokenScores(logprobs, records.routes, energies, entropies)

    def loss(params, batch: TrainBatch) -> tuple[Array, UpdateOutputs]:
        rows = batch.scored.rollouts
        # Traces show the ratios of untrained tokens too.
        needed = rows.response_index >= 0 if settings.keep_logprobs else batch.loss_weights > 0
        if batch.nll_weights is not None:
            needed |= batch.nll_weights > 0
        hidden, logprobs, entropy, records = run(params, rows, needed, recorded)
        divergence = None
        if distilled and settings.teacher:
            teacher = params[TEACHER]
            teacher_hidden, _ = hidden_states(teacher, settings.teacher, rows.inputs)
            both = (params, teacher), (hidden, teacher_hidden)
            divergence = distilled.divergences_of(algorithm, *both, needed, chunk_tokens)
        value, metrics = policy_objective(algorithm, batch, logprobs, entropy, divergence)
        if recorded:
            balance, router_means = router_terms(batch, records)
            value += algorithm.router_balance_coefficient * balance
            metrics |= router_means
        return value, UpdateOutputs(metrics, logprobs if settings.keep_logprobs else None)

    # Router loads are those of a whole microbatch, so they are no sum over rows.
    sums_rows = not recorded
    return Learner(score, loss, abstract_params(config), optimizer, mesh, frozen, sums_rows)
