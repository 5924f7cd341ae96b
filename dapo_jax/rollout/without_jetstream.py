"""What `jetstream_api` takes from JetStream, where that is not installed."""

from typing import Any

from flax import struct


class Engine:
    """Base class of the engine."""


class TokenizerParameters:
    """Parameters of a tokenizer; there are none."""


@struct.dataclass
class ResultTokens:
    """Tokens of a burst in one array, and which of its columns hold what."""

    data: Any
    tokens_idx: tuple[int, int] = struct.field(pytree_node=False)
    valid_idx: tuple[int, int] = struct.field(pytree_node=False)
    length_idx: tuple[int, int] = struct.field(pytree_node=False)
    samples_per_slot: int = struct.field(pytree_node=False)
