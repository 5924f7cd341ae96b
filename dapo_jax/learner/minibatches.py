"""Optimizer minibatches of a rollout batch: split, packed, weighed."""

import dataclasses
import sys
from collections.abc import Callable, Iterator, Sequence

import jax
import numpy as np
from jaxtyping import Float

from dapo_jax.config.experiment import Config, Packing
from dapo_jax.config.user_code import describe_error
from dapo_jax.learner.batches import PackedRows, ScoredBatch, TrainBatch
from dapo_jax.learner.packing import Segment, choose_rows, make_batch, pack_updates, tree_index
from dapo_jax.model.decoder import DecoderConfig
from dapo_jax.model.training_attention import SHORT_ROW_TOKENS
from dapo_jax.runtime import processes
from dapo_jax.runtime.clock import timed
from dapo_jax.runtime.settings import ConfigError
from dapo_jax.runtime.sharding import shards
from dapo_jax.structs import Group

TokenWeights = Callable[[Group, int], Sequence[float]]  # a user's function


@dataclasses.dataclass(frozen=True)
class Minibatches:
    """The responses of a rollout batch by optimizer minibatch, and their packed rows.

    Attributes:
        segments: of each minibatch, its prompts with one response each.
        rollouts: arrays [U, M, R, T].
        microbatches: of each minibatch, how many of the M hold anything.
    """

    segments: list[list[Segment]]
    rollouts: PackedRows
    microbatches: list[int]

    def __len__(self) -> int:
        return len(self.segments)

    def responses(self) -> list[Segment]:
        """All segments, in the order of their index."""
        return sum(self.segments, [])


def prompts_per_update(config: Config) -> int:
    """Groups of one optimizer minibatch."""
    return config.rollout.prompts_per_step // config.rollout.updates_per_rollout


@timed("score")
def make_minibatches(
    config: Config,
    groups: Sequence[Group],
    decoder: DecoderConfig,
    mesh: jax.sharding.Mesh,
    token_weights: TokenWeights | None = None,
) -> Minibatches:
    """Splits groups in order into minibatches of as many prompts each, and packs them.

    The last minibatch has fewer where the step was starved. Raises `ConfigError` where the user's
    `token_weights` gives no weights.
    """
    segments = split_groups(config, groups, token_weights)
    packing = choose_packing(config, decoder, mesh, segments)
    return Minibatches(segments, *pack_updates(segments, packing))


def split_groups(
    config: Config, groups: Sequence[Group], token_weights: TokenWeights | None = None
) -> list[list[Segment]]:
    """Segments of each optimizer minibatch: as many prompts each, in order."""
    size, share = config.rollout.samples_per_prompt, prompts_per_update(config)
    weights = _ask_token_weights(config, groups, token_weights)
    segments = [
        [
            Segment(g.prompt, response, i * size + j, bool(g.correct[j]), weights[i][j])
            for j, response in enumerate(g.completions)
        ]
        for i, g in enumerate(groups)
    ]
    return [sum(segments[i : i + share], []) for i in range(0, len(groups), share)]


def _ask_token_weights(
    config: Config, groups: Sequence[Group], token_weights: TokenWeights | None
) -> Sequence[Sequence[Float[np.ndarray, "n"] | None]]:
    """Weights of the tokens of each response of each group, asked on one process each."""
    if token_weights is None:
        return [[None] * len(group.completions) for group in groups]
    weights = processes.map_over_hosts(
        [group.prompt.index for group in groups],
        lambda i: [
            _check_token_weights(config, token_weights, groups[i], j).tolist()
            for j in range(len(groups[i].completions))
        ],
        "token weights",
    )
    return [[np.asarray(response, np.float64) for response in group] for group in weights]


def _check_token_weights(
    config: Config, token_weights: TokenWeights, group: Group, sample: int
) -> Float[np.ndarray, "n"]:
    tokens = len(group.completions[sample])
    try:
        weights = np.asarray(token_weights(group, sample), np.float64)
        if weights.shape != (tokens,) or not np.isfinite(weights).all() or (weights < 0).any():
            raise ValueError(f"got shape {weights.shape}")
    except Exception as error:  # whatever a user's function may raise
        raise ConfigError(
            f"config.algorithm.token_weights = {config.algorithm.token_weights!r}: must "
            f"return {tokens} finite numbers, none below 0, for response {sample} to prompt "
            f"{group.prompt.id}; {describe_error(error)}"
        ) from error
    return weights


def choose_packing(
    config: Config,
    decoder: DecoderConfig,
    mesh: jax.sharding.Mesh,
    segments: Sequence[Sequence[Segment]],
) -> Packing:
    """The shape of the rows: as configured, or the one in which these segments cost least."""
    if config.packing.row_tokens > 0:
        return config.packing
    width = decoder.heads * decoder.head_dim
    matrices = 2 * decoder.embed * (width + decoder.kv_heads * decoder.head_dim)
    return choose_rows(
        segments,
        config.rows(),
        shards(mesh, "batch"),
        longest=SHORT_ROW_TOKENS if decoder.attention == "plain" else sys.maxsize,
        attention_tokens=(matrices + 3 * decoder.embed * decoder.active_mlp) / width,
    )


def make_train_batches(
    config: Config,
    minibatches: Minibatches,
    scored: ScoredBatch,
    advantages: Float[np.ndarray, "U M R T"],
    returns: Float[np.ndarray, "U M R T"] | None,
) -> Iterator[TrainBatch]:
    """The batch of each update with its loss weights, made while the one before is computed."""
    budget, planned = config.drawn_budget(), prompts_per_update(config)
    for u, segments in enumerate(minibatches.segments):
        part, gains, targets = tree_index((scored, advantages, returns), u)
        yield make_batch(part, segments, gains, targets, config.algorithm, budget, planned)
