"""Roofline: the shortest time for what a program computes, moves through memory and sends.

Nothing is timed. A program takes the longest of its times, each at the fraction of the peak that
`Efficiency` assumes. If operations take longest, the MFU is that fraction times useful over
executed operations.
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

REMAT_ATTENTION = ("full", "offload")  # recompute attention in the backward pass
REMAT_MATRICES = (*REMAT_ATTENTION, "attention")  # recompute a layer's other products


@dataclasses.dataclass(frozen=True)
class Efficiency:
    """Assumed fractions of the peaks."""

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
        """Return the seconds of each part alone."""
        return {
            "FLOP": self.flops / (chip.flops_per_second * efficiency.flops),
            "HBM": self.hbm_bytes / (chip.hbm_bytes_per_second * efficiency.hbm),
            "ICI": self.ici_bytes / (chip.ici_bytes_per_second * efficiency.ici),
            "DCN": self.dcn_bytes / (chip.dcn_bytes_per_second * efficiency.ici),
        }

    def bound(self, chip: Chip, efficiency: Efficiency) -> tuple[str, float]:
        """Return the part that takes longest, and its seconds."""
        seconds = self.seconds(chip, efficiency)
        name = max(seconds, key=seconds.__getitem__)
        return name, seconds[name]


def matrix_weights(config: DecoderConfig, *, head: bool = True) -> int:
    """Return the number of weights that multiply every token; the embedding is a lookup."""
    attention = config.embed * config.head_dim * 2 * (config.heads + config.kv_heads)
    mlp = 3 * config.embed * config.active_mlp + config.embed * config.experts
    return config.layers * (attention + mlp) + (config.embed * config.vocab if head else 0)


def adapter_weights(config: DecoderConfig) -> int:
    """Return the number of weights of all low-rank adapters."""
    shapes = sharding.flatten(sharding.unbox(abstract_params(config)))
    return sum(
        math.prod(leaf.shape) for path, leaf in shapes.items() if path.endswith(ADAPTER_NAMES)
    )


def attention_flops(config: DecoderConfig, pairs: float) -> float:
    """Return the operations of attention in all layers, for a number of query-key pairs."""
    return 4.0 * config.layers * config.heads * config.head_dim * pairs


def seen_pairs(config: DecoderConfig, length: Any) -> Any:
    """Return the query-key pairs of a sequence within the layers' windows, mean over layers."""
    sliding = sum(config.sliding) / config.layers if config.sliding else 1.0
    reach = np.minimum(length, length if config.window is None else config.window)
    return (1 - sliding) * length**2 / 2 + sliding * (length * reach - reach**2 / 2)


def row_pairs(
    config: DecoderConfig, lengths: Sequence[int], row_tokens: int, block: int = 0
) -> float:
    """Return the query-key pairs that training computes in a packed row, mean over layers.

    Args:
        lengths: of the row's responses with their prompts, in order.
        block: size of the kernel's blocks; it skips blocks that lie in other responses only. 0:
            all pairs within the windows are computed.
    """
    if not block:
        return float(seen_pairs(config, row_tokens))
    ends = np.cumsum([0, *lengths])
    starts = np.arange(0, row_tokens, block)
    # The first token of the response to which the block's first token belongs; padding: itself.
    first = ends[np.searchsorted(ends, starts, side="right") - 1]
    first = np.where(starts >= ends[-1], starts, first)

    def computed(first: np.ndarray) -> float:
        return float(block**2 * (starts // block - first // block + 1).sum())

    sliding = sum(config.sliding) / config.layers if config.sliding else float(bool(config.window))
    near = computed(np.maximum(first, starts + 1 - (config.window or row_tokens)))
    return sliding * near + (1 - sliding) * computed(first)


def forward_flops(config: DecoderConfig, tokens: float, pairs: float) -> float:
    """Return the operations of a forward pass: two per weight and token, plus attention."""
    weights = matrix_weights(config) + adapter_weights(config)
    return 2.0 * weights * tokens + attention_flops(config, pairs)


def useful_flops(config: DecoderConfig, tokens: float, pairs: float) -> float:
    """Return the operations of a forward and backward pass without recomputation.

    The backward pass takes twice the forward pass: gradients of each layer's inputs and of its
    weights. Frozen weights have no gradients, and layers below all trained ones have neither.
    """
    forward, weights = forward_flops(config, tokens, pairs), matrix_weights(config)
    if config.adapters:
        return 3 * forward - 2.0 * weights * tokens
    layers = 2.0 * matrix_weights(config, head=False) * tokens + attention_flops(config, pairs)
    below = config.frozen_layers / config.layers * layers
    return 3 * forward - 2 * below


def update_flops(config: DecoderConfig, tokens: float, pairs: float) -> float:
    """Return the operations of an update, including padding and recomputation."""
    trained = 1 - config.frozen_layers / config.layers
    again = 2.0 * config.embed * config.vocab * tokens  # the head's logits are always recomputed
    if config.remat in REMAT_MATRICES:
        weights = matrix_weights(config, head=False) + adapter_weights(config)
        again += trained * 2.0 * weights * tokens
    if config.remat in REMAT_ATTENTION:
        again += trained * attention_flops(config, pairs)
    return useful_flops(config, tokens, pairs) + again
