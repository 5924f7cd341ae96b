"""A sampler with responses of scripted lengths, for tests of dynamic sampling."""

from collections.abc import Callable

from toy_sampler import ToySampler

END = 1


class ScriptedSampler(ToySampler):
    """Ends the responses to prompt `index` after `bursts(index)` bursts in a slot.

    Attributes:
        submitted: indices of the submitted prompts, in order.
    """

    def __init__(self, bursts: Callable[[int], int], slots: int = 128):
        super().__init__(None, (END,), 0, limit=10_000, rows=slots)
        self._bursts = bursts
        self.submitted: list[int] = []
        self.begin(None, purpose=0, step=0, rule=None)

    def add(self, prompt, samples, carried):
        super().add(prompt, samples, carried)
        self.submitted.append(prompt.index)

    def extend(self, running):
        for request, i in running:
            bursts = len(request.responses[i]) + 1
            ends = bursts == self._bursts(request.prompt.index)
            yield ([5, END], [0.0, 0.0]) if ends else ([5], [0.0])
