"""Pace of calls: how many programs may be under way on devices of a CPU."""

import itertools
from typing import Any

import jax
from jax.sharding import Mesh


class Pace:
    """Limit on the programs under way.

    XLA's client of CPUs takes 32 programs for each device. One more waits on a thread, of which
    there is one for each core: with a device for each core, those under way get none, and the
    process aborts after a minute (jaxlib 0.10.2). Elsewhere nothing is waited for.
    """

    MOST = 4  # calls of some programs each

    def __init__(self, mesh: Mesh):
        self._waits = mesh.size > 1 and mesh.devices.flat[0].platform == "cpu"
        self._calls = itertools.count(1)

    def __call__(self, made: Any) -> Any:
        """The result `made` of a call, perhaps once it is computed."""
        if self._waits and next(self._calls) % self.MOST == 0:
            jax.block_until_ready(made)
        return made
