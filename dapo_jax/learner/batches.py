"""Device arrays of a training step, packed into rows.

`structs.py` explains the dimension letters and how per-token arrays are aligned.
"""

from typing import Any

from flax import struct
from jaxtyping import Array, Float, Int


class PackedRows(struct.PyTreeNode):
    """Responses packed into rows of one length, before anything was computed on them.

    `segment_ids` is 0 on padding and counts from 1 inside a row; a segment is one prompt with
    one response and never crosses a row. `response_index` is the response's place in the rollout
    batch, -1 off the response. `routes` is None unless the algorithm replays them.
    """

    tokens: Int[Array, "*M R T"]
    segment_ids: Int[Array, "*M R T"]
    positions: Int[Array, "*M R T"]
    response_index: Int[Array, "*M R T"]
    sampler_logprobs: Float[Array, "*M R T"]
    routes: Int[Array, "*M R T L k"] | None = None  # experts to replay, -1 where not known


class ScoredBatch(struct.PyTreeNode):
    """Rollouts with the log-probs of the models that score them, and the values, before the update.

    `old_logprobs` is None where the policy is still the one that will be differentiated (a single
    update per rollout batch): the ratio is then exactly 1 and no score pass is needed. The others
    are None where the algorithm has no reference, no critic or no teacher of drawn tokens.
    """

    rollouts: PackedRows
    old_logprobs: Float[Array, "*M R T"] | None
    reference_logprobs: Float[Array, "*M R T"] | None = None
    values: Float[Array, "*M R T"] | None = None
    teacher_logprobs: Float[Array, "*M R T"] | None = None


class TrainBatch(struct.PyTreeNode):
    """Input of one optimizer update. Its loss is `sum(loss_weights * token_loss)`.

    The value loss and the negative log-prob of right responses have weights of their own; what an
    algorithm has not is None.
    """

    scored: ScoredBatch
    advantages: Float[Array, "*M R T"]
    loss_weights: Float[Array, "*M R T"]
    nll_weights: Float[Array, "*M R T"] | None = None
    returns: Float[Array, "*M R T"] | None = None
    value_weights: Float[Array, "*M R T"] | None = None


class TrainState(struct.PyTreeNode):
    """Parameters and optimizer state. `update_count` counts optimizer steps, not rollout steps."""

    params: Any
    opt_state: Any
    update_count: Int[Array, ""]


class Mean(struct.PyTreeNode):
    """A sum with its weight, so that means of parts add up to the mean of the whole."""

    total: Float[Array, ""]
    weight: Float[Array, ""]

    def __add__(self, other: "Mean") -> "Mean":
        return Mean(self.total + other.total, self.weight + other.weight)

    def value(self) -> float:
        """The mean; 0 where nothing was counted."""
        weight = float(self.weight)
        return float(self.total) / weight if weight else 0.0
