"""JetStream's Driver with a decode loop and a `stop` of our own, since JetStream's have bugs.

JetStream's decode loop looks for a free slot, then for a request, then asserts that some slot is
taken. The last response may end in between, and the thread ends with it. The loop stops all
decoding for up to a second where a request that it waits for is cancelled. JetStream's `stop`
takes the items that wake its threads out of the queues again, and so repeats itself.
"""

import contextlib
import dataclasses
import logging
import queue
import threading
from typing import Any

import jax
import numpy as np
from jetstream.core import orchestrator
from jetstream.core.metrics.prometheus import JetstreamMetricsCollector

from dapo_jax.commands.serve.engine import DrawnPrompt, Draws

# Changes without which JetStream does not run on today's JAX and inside another program.
# JAX removed jax.tree_map in 0.4.26; JetStream calls it after every insert.
jax.tree_map = jax.tree.map  # pyright: ignore[reportAttributeAccessIssue]: it is new here
# A failing JetThread kills the process by SIGKILL; `Driver.ended` reports it instead.
orchestrator.JetThread = threading.Thread
# JetStream's import makes the process log every decode step to standard output.
logging.getLogger().removeHandler(orchestrator.handler)
logging.getLogger().setLevel(logging.WARNING)

WAIT_SECONDS = 0.02  # for a request that is being prefilled, before slots decode without it


@dataclasses.dataclass
class DriverRequest(orchestrator.ActiveRequest):
    """JetStream's request, with a sampling rule and seed."""

    return_channel: Any  # an object with `add_result` and `close`
    draws: Draws = dataclasses.field(kw_only=True)


class Driver(orchestrator.Driver):
    """Threads that prefill and decode `DriverRequest`s by one `ServedEngine`."""

    def __init__(self, engine: Any, params: Any, *, metrics: bool):
        super().__init__(
            prefill_engines=[engine],
            generate_engines=[engine],
            prefill_params=[params],
            generate_params=[params],
            interleaved_mode=True,
            jax_padding=False,
            metrics_collector=JetstreamMetricsCollector() if metrics else None,
        )

    def place(self, request: DriverRequest) -> None:
        """Puts a request at the end of the prefill queue."""
        self.place_request_on_prefill_queue(request)

    @property
    def waiting(self) -> int:
        """Number of requests in the prefill queue."""
        return self._prefill_backlog.qsize()

    @property
    def busy(self) -> int:
        """Number of slots that are taken."""
        return sum(free.maxsize - free.qsize() for free in self._generate_slots)

    def forget(self, request: DriverRequest) -> None:
        """Cancels a request: frees its slot, or takes it out of the prefill queue."""
        # JetStream also serves clients that are gone; a response without a budget ends.
        request.max_tokens, backlog = 0, self._prefill_backlog
        with backlog.mutex:
            others = [other for other in backlog.queue if other is not request]
            backlog.queue.clear()
            backlog.queue.extend(others)

    def ended(self) -> list[str]:
        """Names of the threads that have ended, by an error or by `stop`."""
        return [thread.name for thread in self._all_threads if not thread.is_alive()]

    def stop(self) -> None:
        """Ends the threads; requests under way are dropped."""
        self.live = False
        backlogs: list[Any] = [
            self._prefill_backlog,
            *self._transfer_backlogs,
            *self._generate_backlogs.values(),
            *self._detokenize_backlogs,
        ]
        for thread in self._all_threads:
            while thread.is_alive():  # it waits for an item, or for room in a full queue
                for backlog in backlogs:
                    with contextlib.suppress(queue.Empty):
                        backlog.get_nowait()
                    with contextlib.suppress(queue.Full):
                        backlog.put_nowait(None)
                thread.join(WAIT_SECONDS)

    def _process_prefill_content(
        self, request: DriverRequest, *args: Any
    ) -> tuple[DrawnPrompt, int]:
        tokens, length = super()._process_prefill_content(request, *args)
        return DrawnPrompt(tokens, request.draws), length

    def _generate_thread(self, idx: int) -> None:
        engine: Any = self._generate_engines[idx]  # a `ServedEngine`
        params = self._generate_params[idx]
        free, ready = self._generate_slots[idx], self._generate_backlogs[idx]
        results: Any = self._detokenize_backlogs[idx]  # its type names half of what it holds
        if self._metrics_collector:
            share = self._metrics_collector.get_slots_available_percentage_metric(idx)
            share.set_function(lambda: free.qsize() / engine.max_concurrent_decodes)
        state, step = engine.init_decode_state(), 0
        fill = np.zeros(engine.max_concurrent_decodes, np.int64)  # tokens in the cache of a slot
        while self.live:
            # Slots may become free here: then the step below decodes for nobody, which is fine.
            if not free.empty():
                idle, coming = free.full(), self._coming(idx)
                try:
                    request = ready.get(idle or coming, None if idle else WAIT_SECONDS)
                except queue.Empty:
                    if coming:
                        continue
                else:
                    if request is None:  # from `stop`
                        return
                    if idle:
                        state = engine.shrink(state)
                    slot = free.get_nowait()
                    fill[slot] = len(request.prefill_content or ())
                    state = engine.insert(request.prefill_result, state, slot=slot)
                    orchestrator.delete_pytree(request.prefill_result)
                    request.complete = np.zeros(engine.samples_per_slot, np.bool_)
                    results.put((slot, request))
                    continue
            with free.mutex:
                fill[list(free.queue)] = 0
            engine.fullest = int(fill.max())
            state, tokens = engine.generate(params, state)
            fill += 1
            tokens.copy_to_host_async()
            results.put((step, tokens))
            step += 1

    def _coming(self, idx: int) -> bool:
        """True while a request is on its way to a slot: the next step waits, to decode it too."""
        return not (self._prefill_backlog.empty() and self._transfer_backlogs[idx].empty())
