"""Arrays of a training step, packed into rows; `types/structs.py` has the dimension letters."""

from typing import Any

import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from dapo_jax.model.logprobs import Rows

NOT_SCORED = np.inf  # in place of the old log-prob of a token; no log-prob is above 0
OBSERVED = -2  # `response_index` of observations
REFERENCE, CRITIC, TEACHER = "reference", "critic", "teacher"  # models that score tokens


class PackedRows(struct.PyTreeNode):
    """Prompts with responses, packed into rows of one length.

    `segment_ids` is 0 on padding and counts from 1 in each row; a segment is a prompt with a
    response and never crosses a row. `response_index` is the response's position in the rollout
    batch, -1 outside responses, -2 on observations between their turns. With shared prompts, a
    prompt is a segment of its own, `prompt_ids` is its number on the tokens that attend to it, and
    a response begins with the prompt's last token.
    """

    tokens: Int[Array, "*M R T"]
    segment_ids: Int[Array, "*M R T"]
    positions: Int[Array, "*M R T"]
    response_index: Int[Array, "*M R T"]
    sampler_logprobs: Float[Array, "*M R T"]
    routes: Int[Array, "*M R T L k"] | None = None  # experts to replay, -1: unknown
    edges: Float[Array, "*M R T"] | None = None  # of supports: log-probs renormalise over these
    prompt_ids: Int[Array, "*M R T"] | None = None  # None: no prompt is shared

    @property
    def inputs(self) -> Rows:
        """The arrays that a decoder reads, without routes."""
        return Rows(self.tokens, self.segment_ids, self.positions, prompt_ids=self.prompt_ids)


class ScoredBatch(struct.PyTreeNode):
    """Packed rows with the outputs of the score pass.

    `old_logprobs` is None, or NOT_SCORED in a step of several updates, if the update differentiates
    the old policy itself: the ratio is then exactly 1. `scores` are those of the other models that
    the algorithm has, by name: log-probs of the reference and the teacher, values of the critic.
    """

    rollouts: PackedRows
    old_logprobs: Float[Array, "*M R T"] | None
    scores: dict[str, Float[Array, "*M R T"]] = struct.field(default_factory=dict)
    energies: Float[Array, "*M R T"] | None = None
    entropies: Float[Array, "*M R T"] | None = None


class TrainBatch(struct.PyTreeNode):
    """Input of an optimizer update; its loss is `sum(loss_weights * token_loss)`.

    The value loss, the negative log-probs of correct responses and of observations, and an adaptive
    entropy bonus have separate weights.
    """

    scored: ScoredBatch
    advantages: Float[Array, "*M R T"]
    loss_weights: Float[Array, "*M R T"]
    nll_weights: Float[Array, "*M R T"] | None = None
    returns: Float[Array, "*M R T"] | None = None
    value_weights: Float[Array, "*M R T"] | None = None
    kl_tokens: Bool[Array, "*M R T"] | None = None  # None: all have the KL
    entropy_weights: Float[Array, "*M R T"] | None = None
    interpolation: Float[Array, "*M R T"] | None = None  # of log p_old, 0: sampler, 1: policy


class TokenScores(struct.PyTreeNode):
    """Output of a score pass: log-probs or a critic's values, and what the algorithm reads too."""

    values: Float[Array, "*M R T"]
    routes: Int[Array, "*M R T L k"] | None = None  # if the policy records them
    energies: Float[Array, "*M R T"] | None = None
    entropies: Float[Array, "*M R T"] | None = None


class TrainState(struct.PyTreeNode):
    """Parameters and optimizer state. `update_count` counts optimizer steps, not rollout steps."""

    params: Any
    opt_state: Any
    update_count: Int[Array, ""]


class Mean(struct.PyTreeNode):
    """A weighted sum and its weight; means of parts add up to the mean of the whole."""

    total: Float[Array, ""]
    weight: Float[Array, ""]

    def __add__(self, other: "Mean") -> "Mean":
        return Mean(self.total + other.total, self.weight + other.weight)

    def value(self) -> float:
        """Return the mean, 0 if the weight is 0."""
        weight = float(self.weight)
        return float(self.total) / weight if weight else 0.0
