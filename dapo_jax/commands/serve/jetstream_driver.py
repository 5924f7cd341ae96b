"""JetStream's Driver, made to last: its loop of decode steps is written anew.

JetStream's own looks for a free slot, then for a request, then asserts that some slot is taken; the
last response may end in between, and the thread with it. It stops all decoding for up to a second
where a request that it waits for is given up. And its `stop` takes back again what is to wake the
threads, until one happens to be quicker.
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

# JetStream's modules are made to run on today's JAX and inside a program of others.
# Gone from JAX since 0.4.26, and called after every insert.
jax.tree_map = jax.tree.map  # pyright: ignore[reportAttributeAccessIssue]: it is new here
# Its threads would end the process by SIGKILL; ours sees that one ended, and says so.
orchestrator.JetThread = threading.Thread
# It logs every decode step of every process that imports it to standard output.
logging.getLogger().removeHandler(orchestrator.handler)
logging.getLogger().setLevel(logging.WARNING)

WAIT_SECONDS = 0.02  # for a request that is being prefilled, before slots decode on without it


@dataclasses.dataclass
class Request(orchestrator.ActiveRequest):
    """JetStream's, with how its response is drawn."""

    return_channel: Any  # what has its `add_result` and `close`
    draws: Draws = dataclasses.field(kw_only=True)


class Driver(orchestrator.Driver):
    """Prefills and decodes `Request`s by one `ServedEngine`, each in threads of its own."""

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

    def place(self, request: Request) -> None:
        """Puts it behind those that wait."""
        self.place_request_on_prefill_queue(request)

    @property
    def waiting(self) -> int:
        """How many requests nothing was done for yet."""
        return self._prefill_backlog.qsize()

    def forget(self, request: Request) -> None:
        """Frees its slot, or its place among those that wait."""
        # JetStream serves clients that are gone, too; without a budget a response ends.
        request.max_tokens, backlog = 0, self._prefill_backlog
        with backlog.mutex:
            others = [other for other in backlog.queue if other is not request]
            backlog.queue.clear()
            backlog.queue.extend(others)

    def ended(self) -> list[str]:
        """Names of the threads that have ended, of an error or of `stop`."""
        return [thread.name for thread in self._all_threads if not thread.is_alive()]

    def stop(self) -> None:
        """Ends the threads; what they work at is dropped."""
        self.live = False
        backlogs: list[Any] = [
            self._prefill_backlog,
            *self._transfer_backlogs,
            *self._generate_backlogs.values(),
            *self._detokenize_backlogs,
        ]
        for thread in self._all_threads:
            while thread.is_alive():  # it waits for something to come, or for room
                for backlog in backlogs:
                    with contextlib.suppress(queue.Empty):
                        backlog.get_nowait()
                    with contextlib.suppress(queue.Full):
                        backlog.put_nowait(None)
                thread.join(WAIT_SECONDS)

    def _process_prefill_content(self, request: Request, *args: Any) -> tuple[DrawnPrompt, int]:
        tokens, length = super()._process_prefill_content(request, *args)
        return DrawnPrompt(tokens, request.draws), length

    def _generate_thread(self, idx: int) -> None:
        engine, params = self._generate_engines[idx], self._generate_params[idx]
        free, ready = self._generate_slots[idx], self._generate_backlogs[idx]
        drawn: Any = self._detokenize_backlogs[idx]  # declared by half of what JetStream puts there
        if self._metrics_collector:
            share = self._metrics_collector.get_slots_available_percentage_metric(idx)
            share.set_function(lambda: free.qsize() / engine.max_concurrent_decodes)
        state, step = engine.init_decode_state(), 0
        while self.live:
            # Slots only become more meanwhile: the step below may be one for nobody, which is fine.
            if not free.empty():
                idle, coming = free.full(), self._coming(idx)
                try:
                    request = ready.get(idle or coming, None if idle else WAIT_SECONDS)
                except queue.Empty:
                    if coming:
                        continue
                else:
                    if request is None:  # it is told to stop
                        return
                    slot = free.get_nowait()
                    state = engine.insert(request.prefill_result, state, slot=slot)
                    orchestrator.delete_pytree(request.prefill_result)
                    request.complete = np.zeros(engine.samples_per_slot, np.bool_)
                    drawn.put((slot, request))
                    continue
            state, tokens = engine.generate(params, state)
            tokens.copy_to_host_async()
            drawn.put((step, tokens))
            step += 1

    def _coming(self, idx: int) -> bool:
        """Whether a request is on its way to a slot; the step waits, and then decodes it too."""
        return not (self._prefill_backlog.empty() and self._transfer_backlogs[idx].empty())
