"""A limit on the number of programs that are queued on CPU devices."""

import itertools
from typing import Any

import jax
from jax.sharding import Mesh


class Pace:
    """Waits for a result after every few calls, on meshes of several CPU devices.

    XLA's CPU client queues 32 programs per device. One more blocks a thread of a pool with one
    thread per core; with a device per core the queued programs then get no thread, and the process
    aborts after a minute (jaxlib 0.10.2).
    """

    MAX_CALLS = 4  # each queues several programs

    def __init__(self, mesh: Mesh):
        self._waits = mesh.size > 1 and mesh.devices.flat[0].platform == "cpu"
        self._calls = itertools.count(1)

    def __call__(self, result: Any) -> Any:
        """Return the result of a call, sometimes after waiting for it."""
        if self._waits and next(self._calls) % self.MAX_CALLS == 0:
            jax.block_until_ready(result)
        return result
