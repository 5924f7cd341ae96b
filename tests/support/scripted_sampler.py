"""A sampler without a model: a script says when each response ends."""

from collections.abc import Callable

from dapo_jax.extras.exact import ExactSampler
from dapo_jax.types.structs import RolloutKey, SamplingRule


class ScriptedSampler(ExactSampler):
    """Ends the responses to prompt `index` after `bursts(index)` bursts in a slot.

    `submitted` has the indices of the submitted prompts, in order.
    """

    def __init__(self, bursts: Callable[[int], int], slots: int = 128):
        rows = {"chunk_tokens": 1, "end_ids": (1,), "limit": 10_000, "seed": 0}
        super().__init__(None, None, (slots, 1), slots=slots, **rows)
        self._bursts = bursts
        self.submitted: list[int] = []
        self.begin(None, RolloutKey(0), SamplingRule())

    def submit(self, prompt, *options, **named):
        self.submitted.append(prompt.index)
        return super().submit(prompt, *options, **named)

    def _extend(self, keys):
        for request, sample in keys:
            bursts = len(self._running[request, sample]) + 1
            ends = bursts == self._bursts(request.prompt.index)
            yield ([5, 1], [0.0, 0.0]) if ends else ([5], [0.0])
