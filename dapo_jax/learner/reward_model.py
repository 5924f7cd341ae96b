"""Learned reward model: a decoder with a scalar head, read at the last token of a response."""

from typing import Any

import jax
import numpy as np

from dapo_jax.learner.packing import Segment, pack
from dapo_jax.model.decoder import DecoderConfig
from dapo_jax.model.logprobs import scalars_after
from dapo_jax.runtime import sharding
from dapo_jax.structs import Completion, Prompt, Rollouts

NO_TOKENS = np.zeros(0, np.int32)


class RewardModel:
    """Reward model on devices, sharded as the policy is, in the compute dtype.

    Args:
        params: parameters of a `scalar_head` decoder, in their forward dtype.
        row_tokens, rows: shape of the one batch that is compiled.
    """

    def __init__(
        self,
        params: Any,
        config: DecoderConfig,
        mesh: jax.sharding.Mesh,
        row_tokens: int,
        rows: int,
    ):
        self._mesh, self._shape = mesh, (row_tokens, rows)
        self._params = params
        self._read_rows = jax.jit(
            lambda params, r: scalars_after(params, config, r.tokens, r.segment_ids, r.positions)
        )

    def score(self, responses: list[tuple[Prompt, Completion]]) -> np.ndarray:
        """[len(responses)] float32 scores, in their order."""
        texts = [np.concatenate([prompt.tokens, done.tokens]) for prompt, done in responses]
        no_prompt = Prompt(0, "", "", NO_TOKENS, "", "")
        segments = [
            Segment(no_prompt, Completion(text, np.zeros(len(text)), False, 0, ""), i)
            for i, text in enumerate(texts)
        ]
        packed, used = pack(segments, *self._shape)
        scores = np.zeros(len(segments), np.float32)
        for i in range(used):
            self._read_last_tokens(jax.tree.map(lambda array, i=i: array[i], packed), scores)
        return scores

    def _read_last_tokens(self, rollouts: Rollouts, scores: np.ndarray) -> None:
        index = rollouts.response_index
        following = np.pad(index[:, 1:], ((0, 0), (0, 1)), constant_values=-1)
        last = (index >= 0) & (following != index)
        with sharding.activate(self._mesh):
            values = self._read_rows(self._params, sharding.put(self._mesh, rollouts, "batch"))
        scores[index[last]] = sharding.to_host(values)[last]
