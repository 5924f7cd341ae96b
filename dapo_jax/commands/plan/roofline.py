"""Roofline: seconds of programs at best, by what they compute, move through memory and send.

Nothing here was timed. A part takes the longest of its three times, each at the share of the peak
that `Efficiency` assumes: an MFU by this roofline is that share times useful over executed
operations, wherever operations are the longest.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from dapo_jax.commands.plan.chips import Chip
from dapo_jax.model.decoder import DecoderConfig, abstract_params
from dapo_jax.model.layers import ADAPTER_NAMES
from dapo_jax.runtime import sharding

REMAT_ATTENTION = ("full", "offload")  # what recomputes attention in the backward pass
REMAT_MATRICES = (*REMAT_ATTENTION, "attention")  # ... and a layer's other products


@dataclasses.dataclass(frozen=True)
class Efficiency:
    """Shares of a peak that are assumed to be reached."""

    flops: float = 0.75
    hbm: float = 0.8
    ici: float = 0.7


@dataclasses.dataclass(frozen=True)
class Work:
    """Work of one chip: operations, and bytes through memory, over links and to other slices."""

    flops: float = 0.0
    hbm_bytes: float = 0.0
    ici_bytes: float = 0.0
    dcn_bytes: float = 0.0

    def seconds(self, chip: Chip, efficiency: Efficiency) -> dict[str, float]:
        """Seconds of each part alone."""
        return {
            "FLOP": self.flops / (chip.flops_per_second * efficiency.flops),
            "HBM": self.hbm_bytes / (chip.hbm_bytes_per_second * efficiency.hbm),
            "ICI": self.ici_bytes / (chip.ici_bytes_per_second * efficiency.ici),
            "DCN": self.dcn_bytes / (chip.dcn_bytes_per_second * efficiency.ici),
        }

    def bound(self, chip: Chip, efficiency: Efficiency) -> tuple[str, float]:
        """Part that takes longest, and its seconds."""
        seconds = self.seconds(chip, efficiency)
        name = max(seconds, key=seconds.__getitem__)
        return name, seconds[name]


def matrix_weights(config: DecoderConfig, *, head: bool = True) -> int:
    """Weights that every token is multiplied by; the embedding is looked up."""
    attention = config.embed * config.head_dim * 2 * (config.heads + config.kv_heads)
    mlp = 3 * config.embed * config.active_mlp + config.embed * config.experts
    layers = config.layers * (attention + mlp)
    return layers + (config.embed * config.vocab if head else 0)


def adapter_weights(config: DecoderConfig) -> int:
    """Weights of low-rank adapters, over all layers."""
    shapes = sharding.flatten(sharding.unbox(abstract_params(config)))
    return sum(
        math.prod(leaf.shape) for path, leaf in shapes.items() if path.endswith(ADAPTER_NAMES)
    )


def attention_flops(config: DecoderConfig, pairs: float) -> float:
    """Operations of attention over all layers, for so many pairs of a query and a key."""
    return 4.0 * config.layers * config.heads * config.head_dim * pairs


def seen_pairs(config: DecoderConfig, length: Any) -> Any:
    """Pairs of a token and one that it sees in a sequence of that length, mean over layers.

    Training attention skips what no window reaches.
    """
    sliding = sum(config.sliding) / config.layers if config.sliding else 1.0
    reach = np.minimum(length, length if config.window is None else config.window)
    return (1 - sliding) * length**2 / 2 + sliding * (length * reach - reach**2 / 2)


def row_pairs(
    config: DecoderConfig, lengths: Sequence[int], row_tokens: int, block: int = 0
) -> float:
    """Pairs of a query and a key that training computes in a packed row, mean over layers.

    Args:
        lengths: of the row's responses with their prompts, in their order.
        block: tokens of the kernel's blocks, of which it skips those of other responses; 0: it
            computes all pairs of the row, but what no window reaches.
    """
    if not block:
        return float(seen_pairs(config, row_tokens))
    ends = np.cumsum([0, *lengths])
    starts = np.arange(0, row_tokens, block)
    first = ends[np.searchsorted(ends, starts, side="right") - 1]  # of the first token's response
    first = np.where(starts >= ends[-1], starts, first)

    def computed(first: np.ndarray) -> float:
        return float(block**2 * (starts // block - first // block + 1).sum())

    sliding = sum(config.sliding) / config.layers if config.sliding else float(bool(config.window))
    near = computed(np.maximum(first, starts + 1 - (config.window or row_tokens)))
    return sliding * near + (1 - sliding) * computed(first)


def forward_flops(config: DecoderConfig, tokens: float, pairs: float) -> float:
    """Operations of a forward pass: two for each weight and token, and attention."""
    weights = matrix_weights(config) + adapter_weights(config)
    return 2.0 * weights * tokens + attention_flops(config, pairs)


def useful_flops(config: DecoderConfig, tokens: float, pairs: float) -> float:
    """Operations of forward and backward pass where each token looks at its own response only.

    Backward takes twice the forward pass: gradients of what a layer reads, and of its weights.
    The second has no part for frozen weights, and neither for layers below all that is trained.
    """
    forward, weights = forward_flops(config, tokens, pairs), matrix_weights(config)
    if config.adapters:
        return 3 * forward - 2.0 * weights * tokens
    below = (
        config.frozen_layers
        / config.layers
        * (2.0 * matrix_weights(config, head=False) * tokens + attention_flops(config, pairs))
    )
    return 3 * forward - 2 * below


def update_flops(config: DecoderConfig, tokens: float, pairs: float) -> float:
    """Operations of an update for so many places in packed rows, and pairs that it computes.

    Padding and what backward computes again count.
    """
    trained = 1 - config.frozen_layers / config.layers
    again = 2.0 * config.embed * config.vocab * tokens  # the head's logits are never kept
    if config.remat in REMAT_MATRICES:
        weights = matrix_weights(config, head=False) + adapter_weights(config)
        again += trained * 2.0 * weights * tokens
    if config.remat in REMAT_ATTENTION:
        again += trained * attention_flops(config, pairs)
    return useful_flops(config, tokens, pairs) + again
