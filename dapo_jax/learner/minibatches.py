"""Optimizer minibatches of a rollout batch: splitting, packing and loss weights."""

import dataclasses
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float

from dapo_jax.config.algorithm import Algorithm
from dapo_jax.config.experiment import Config, Packing
from dapo_jax.learner.advantages import Estimates, Feedback, broadcast_to_tokens
from dapo_jax.learner.batches import OBSERVED, PackedRows, ScoredBatch, TrainBatch
from dapo_jax.learner.losses import (
    choose_by_covariance,
    drop_far_tokens,
    drop_low_entropies,
    response_weights,
)
from dapo_jax.learner.packing import (
    RowShape,
    Segment,
    choose_rows,
    pack_updates,
    place_tokens,
    row_shapes,
    tree_index,
)
from dapo_jax.model.decoder import DecoderConfig
from dapo_jax.model.splash_attention import shared_cost
from dapo_jax.model.training_attention import SHORT_ROW_TOKENS, shares_prompts
from dapo_jax.runtime import processes
from dapo_jax.runtime.clock import timed
from dapo_jax.runtime.sharding import to_host
from dapo_jax.runtime.user_code import describe_error
from dapo_jax.types.errors import ConfigError
from dapo_jax.types.structs import Group, mean_or_zero, present

TokenWeights = Callable[[Group, int], Sequence[float]]  # user function: group, sample -> [n]


@dataclasses.dataclass(frozen=True)
class Minibatches:
    """The responses of a rollout batch by optimizer minibatch, and their packed rows."""

    segments: list[list[Segment]]  # the responses of each minibatch with their prompts
    rollouts: PackedRows  # arrays [U, M, R, T]
    microbatches: list[int]  # number of microbatches of each minibatch that are not empty
    shapes: tuple[RowShape, ...] = ()  # of the rows of this and of earlier steps, one per packing

    def __len__(self) -> int:
        return len(self.segments)

    def responses(self) -> list[Segment]:
        """Return all segments, ordered by index."""
        return sum(self.segments, [])


def prompts_per_update(config: Config) -> int:
    """Return the number of groups in an optimizer minibatch."""
    return config.rollout.prompts_per_step // config.rollout.updates_per_rollout


class RowChoice(NamedTuple):
    """Row shapes to choose from, and the costs that decide: see `choose_rows`."""

    shapes: Sequence[Packing]
    attention_tokens: float
    shared_cost: float


def row_choice(config: Config, decoder: DecoderConfig, row_shards: int) -> RowChoice:
    """Return the choice of rows of a run: those of the configured shape if there is one."""
    windows = any(reach is not None for reach in decoder.reaches)
    single = config.packing.single_responses
    shared = config.packing.share_prompts and shares_prompts(decoder.attention, windows)
    shared = shared and not any(decoder.recurrent)  # a state does not branch
    shapes = [dataclasses.replace(config.rows(), share_prompts=shared and not single)]
    if config.packing.row_tokens < 0 and not single:
        longest = SHORT_ROW_TOKENS if decoder.attention == "plain" else sys.maxsize
        shapes = row_shapes(shapes[0], row_shards, longest)
    width = decoder.heads * decoder.head_dim
    matrices = 2 * decoder.embed * (width + decoder.kv_heads * decoder.head_dim)
    attention_tokens = (matrices + 3 * decoder.embed * decoder.active_mlp) / width
    attention_tokens *= decoder.layers / (decoder.layers - sum(decoder.recurrent))
    factor = shared_cost(decoder.head_dim) if decoder.attention == "splash" else 1.0
    return RowChoice(shapes, attention_tokens, factor)


@timed("score")
def make_minibatches(
    config: Config,
    groups: Sequence[Group],
    rows: RowChoice,
    token_weights: TokenWeights | None = None,
    compiled: Sequence[RowShape] = (),
) -> Minibatches:
    """Split groups, in order, into minibatches of equally many prompts, and pack them.

    The last minibatch is smaller if the step was starved. Shapes of earlier steps, which are
    compiled, are preferred. Raises `ConfigError` if the user's
    `token_weights` returned no valid weights.
    """
    segments = split_groups(config, groups, token_weights)
    packing = choose_rows(segments, *rows, [shape.packing for shape in compiled])
    others = tuple(shape for shape in compiled if shape.packing != packing)
    least = max((shape.microbatches for shape in compiled if shape not in others), default=1)
    rollouts, used = pack_updates(segments, packing, least)
    shape = RowShape(packing, rollouts.tokens.shape[1])
    return Minibatches(segments, rollouts, used, (*others, shape))


def split_groups(
    config: Config, groups: Sequence[Group], token_weights: TokenWeights | None = None
) -> list[list[Segment]]:
    """Split groups, in order, into the segments of each minibatch."""
    share = prompts_per_update(config)
    weights = _compute_token_weights(config, groups, token_weights)
    numbers = {n: i for i, n in enumerate(dict.fromkeys(g.prompt.index for g in groups))}
    parts: list[list[Segment]] = [[] for _ in range(-(-len(numbers) // share))]
    index = itertools.count()  # groups differ in size if rewards failed
    for group, own in zip(groups, weights, strict=True):
        parts[numbers[group.prompt.index] // share] += [
            Segment(group.prompt, response, next(index), bool(correct), weight)
            for response, correct, weight in zip(group.completions, group.correct, own, strict=True)
        ]
    return parts


def _compute_token_weights(
    config: Config, groups: Sequence[Group], token_weights: TokenWeights | None
) -> Sequence[Sequence[Float[np.ndarray, "n"] | None]]:
    """Return token weights by group and response; each group is computed on one host."""
    if token_weights is None:
        return [[None] * len(group.completions) for group in groups]

    def compute(group: Group, sample: int) -> list[float]:
        tokens = len(group.completions[sample])
        try:
            weights = np.asarray(token_weights(group, sample), np.float64)
            if weights.shape != (tokens,) or not np.isfinite(weights).all() or (weights < 0).any():
                raise ValueError(f"got shape {weights.shape}")
        except Exception as error:  # a user function may raise anything
            raise ConfigError(
                f"config.algorithm.token_weights = {config.algorithm.token_weights!r}: must "
                f"return {tokens} finite numbers, none below 0, for response {sample} to prompt "
                f"{group.prompt.id}; {describe_error(error)}"
            ) from error
        return weights.tolist()

    weights = processes.map_over_hosts(
        [group.prompt.index for group in groups],
        lambda i: [compute(groups[i], j) for j in range(len(groups[i].completions))],
        "token weights",
    )
    return [[np.asarray(response, np.float64) for response in group] for group in weights]


def trained_tokens(
    segments: Sequence[Segment], algorithm: Algorithm
) -> list[Bool[np.ndarray, "n"]]:
    """Return for each response a mask of the tokens that can have a loss."""
    masks = []
    for segment in segments:
        filtered = segment.completion.truncated and algorithm.overlong_filtering
        mask = np.full(len(segment.completion), not filtered)
        if segment.token_weights is not None:
            mask &= np.asarray(segment.token_weights) > 0
        masks.append(mask)
    return masks


def entropy_bonus(
    algorithm: Algorithm, weight: float, scored: ScoredBatch, feedback: Feedback
) -> tuple[float, float]:
    """Return the weight of the adaptive entropy bonus in this step, and that of the next step.

    Skywork-OR1 (2505.22312): it grows by `entropy_step` if the mean entropy of the policy before
    the step is below the target and falls above it, to 0 at least. Above the target it is not used.
    """
    if not algorithm.entropy_target:
        return 0.0, weight
    entropies = to_host(present(scored.entropies, "entropies"))[feedback.trained]
    gap = algorithm.entropy_target - mean_or_zero(entropies)
    following = max(0.0, weight + float(np.sign(gap)) * algorithm.entropy_step)
    return weight if gap >= 0 else 0.0, following


def _choose_tokens(
    algorithm: Algorithm,
    scored: ScoredBatch,
    advantages: Float[np.ndarray, "*M R T"],
    weights: Float[np.ndarray, "*M R T"],  # set to 0 on tokens that are dropped
    random: np.random.Generator,
) -> dict[str, Any]:
    """Apply the choices of a minibatch's trained tokens; return the fields that they change."""
    places = np.flatnonzero(weights > 0)  # in the order of responses, whatever the packing
    index = np.asarray(scored.rollouts.response_index).ravel()
    places = places[np.argsort(index[places], kind="stable")]
    if algorithm.top_entropy_fraction < 1:
        entropies = to_host(present(scored.entropies, "entropies"))
        weights.ravel()[drop_low_entropies(algorithm, places, entropies)] = 0.0
    if algorithm.second_moment_limit:
        old = present(scored.old_logprobs, "old_logprobs")
        ratios = to_host(old - scored.rollouts.sampler_logprobs)
        weights.ravel()[drop_far_tokens(algorithm, places, ratios, advantages)] = 0.0
    if algorithm.covariance == "none":
        return {}
    old = to_host(present(scored.old_logprobs, "old_logprobs"))
    chosen = choose_by_covariance(algorithm, old, advantages, places, random)
    if algorithm.covariance == "kl":
        return {"kl_tokens": chosen}
    return {"advantages": np.where(chosen, np.float32(0.0), advantages)}


def make_batch(
    scored: ScoredBatch,
    segments: Sequence[Segment],
    estimates: Estimates,
    algorithm: Algorithm,
    budget: int,  # maximum number of sampled tokens of a response
    planned_groups: int | None = None,  # of a full minibatch; default: as many as there are
    seed: int = 0,
    step: int = 0,  # finished rollout steps
    entropy_weight: float = 0.0,  # of `entropy_bonus`
) -> TrainBatch:
    """Add loss weights, computed from the counts of this minibatch; arrays are [M, R, T].

    If a starved step left fewer groups than planned, each keeps the weight that it would have in a
    full minibatch: all weights are multiplied by groups / planned groups.
    """
    index = np.asarray(scored.rollouts.response_index)
    correct = np.array([segment.correct for segment in segments], bool)
    groups = np.array([segment.prompt.index for segment in segments])
    tokens = np.array([mask.sum() for mask in trained_tokens(segments, algorithm)], int)
    per_response = response_weights(algorithm, tokens, groups, correct, budget)

    def to_tokens(values: np.ndarray) -> np.ndarray:
        by_index = np.zeros(1 + max((segment.index for segment in segments), default=0))
        by_index[[segment.index for segment in segments]] = values
        return broadcast_to_tokens(by_index, index)

    group_count = len(np.unique(groups))
    fraction = group_count / (planned_groups or group_count)
    weights = fraction * to_tokens(per_response)
    token_weights = [s.token_weights for s in segments if s.token_weights is not None]
    if token_weights:  # then all responses have them
        weights *= place_tokens(token_weights, index)
    trained = weights > 0
    arrays: dict[str, Any] = {"advantages": estimates.advantages}
    if trained.any():
        random = np.random.default_rng([seed, *groups])
        arrays |= _choose_tokens(algorithm, scored, estimates.advantages, weights, random)
    arrays["loss_weights"] = weights.astype(np.float32)
    if entropy_weight:
        arrays["entropy_weights"] = (entropy_weight * weights).astype(np.float32)
    if algorithm.old_logprobs == "interpolate":
        ages = [np.repeat(*np.array(s.completion.sampled_by or [(step, 0)]).T) for s in segments]
        shares = [(step - made) / (step + 1.0 - made) for made in ages]
        arrays["interpolation"] = place_tokens(shares, index).astype(np.float32)
    # ECHO's cross-entropy is a mean over the observed tokens.
    means = {"positive": trained & (to_tokens(correct) > 0), "observation": index == OBSERVED}
    for name, chosen in means.items():
        if coefficient := fraction * getattr(algorithm, f"{name}_nll_coefficient"):
            nll = np.float32(coefficient * chosen / max(1, chosen.sum()))
            arrays["nll_weights"] = arrays.get("nll_weights", 0.0) + nll
    if estimates.returns is not None:
        arrays["returns"] = estimates.returns
        arrays["value_weights"] = (fraction * trained / max(1, trained.sum())).astype(np.float32)
    return TrainBatch(scored, **arrays)


def make_train_batches(
    config: Config,
    minibatches: Minibatches,
    scored: ScoredBatch,
    estimates: Estimates,
    step: int = 0,
    entropy_weight: float = 0.0,
) -> Iterator[TrainBatch]:
    """Yield the batch of each update; the next one is made while the devices compute."""
    budget = config.sampled_budget()
    planned = prompts_per_update(config), config.seed, step, entropy_weight
    for u, segments in enumerate(minibatches.segments):
        part, targets = tree_index((scored, estimates), u)
        yield make_batch(part, segments, targets, config.algorithm, budget, *planned)
