"""Pallas' TPU interpreter, mended where that of jax 0.10.2 can not run the project's kernels.

It simulates a TPU's memories: what nothing has written holds NaN, a copy is made when it is waited
for and not before, parallel dimensions of a grid come in a random order, and accesses that nothing
orders are races. The kernels' own source runs as it is; two functions of the interpreter do not:

- `get` of `jax._src.pallas.mosaic.interpret.interpret_pallas_call` understands indices of a ref,
  but no reshape or bitcast of one (`to_range` in `interpret.utils`). The ragged kernel reads heads
  of packed dtypes as 32-bit words.
- `SharedMemory.swap_buffer_content` of `interpret.shared_memory`: the check of a masked store
  excludes what is out of bounds on each axis along axis 0 instead, so it refuses stores of arrays
  whose first axis is longer than another. The ragged kernel stores its running sums so.
"""

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import jax
import numpy as np
from jax._src.pallas.mosaic.interpret import interpret_pallas_call as interpreter
from jax._src.pallas.mosaic.interpret import utils
from jax._src.pallas.mosaic.interpret.race_detection_state import RaceDetectionState
from jax._src.pallas.mosaic.interpret.shared_memory import SharedMemory
from jax._src.state.indexing import NDIndexer
from jax._src.state.types import BitcastTransform, ReshapeTransform
from jax.experimental.pallas import tpu as pltpu

_get = interpreter.get.__wrapped__
_swap = SharedMemory.swap_buffer_content


def _view(value: np.ndarray, transform) -> np.ndarray:
    """Value of a ref through one more of its transforms."""
    match transform:
        case ReshapeTransform():
            return value.reshape(transform.shape)
        case BitcastTransform():  # a wider word holds rows that follow each other, the first lowest
            *outer, rows, lanes = value.shape
            held = np.dtype(transform.dtype).itemsize // value.dtype.itemsize
            words = value.reshape(*outer, rows // held, held, lanes).swapaxes(-1, -2)
            return np.ascontiguousarray(words).view(transform.dtype)[..., 0]
        case NDIndexer():
            return value[utils.to_range((jax.tree.map(int, transform),))]
    raise NotImplementedError(transform)


@interpreter.fail_on_exception
def _get_of_views(token, device, core, space, buffer, transforms, *rest, **options):
    """Read of what the indices before the first reshape or bitcast name, then of its view."""
    indices = tuple(itertools.takewhile(lambda t: isinstance(t, NDIndexer), transforms))
    read = _get(token, device, core, space, buffer, indices, *rest, **options)
    return token, functools.reduce(_view, transforms[len(indices) :], read[1])


def _swap_by_mask(self, key, place, value, mask, core: int, **options):
    """Masked store as a store of old and new values mixed: for one core, wholly inside."""
    if mask is None:
        return _swap(self, key, place, value, mask, core, **options)
    old = self.get_buffer_content(key, place, core, increment_clock=False)[0]
    assert old is not None and old.shape == value.shape, "partly out of bounds"
    _, kind, clock = _swap(self, key, place, np.where(mask, value, old), None, core, **options)
    return np.where(mask, old, value), kind, clock


@contextlib.contextmanager
def interpreted(**params: Any) -> Iterator[list[RaceDetectionState]]:
    """Interpret TPU kernels that are traced and run inside; yield a record of each that ran.

    `params` are fields of `pltpu.InterpretParams`.
    """
    kernels: list[RaceDetectionState] = []

    def recorded(*args, **options) -> RaceDetectionState:
        kernels.append(RaceDetectionState(*args, **options))
        return kernels[-1]

    with (
        mock.patch.object(interpreter, "RaceDetectionState", recorded),
        mock.patch.object(interpreter, "get", _get_of_views),
        mock.patch.object(SharedMemory, "swap_buffer_content", _swap_by_mask),
        pltpu.force_tpu_interpret_mode(pltpu.InterpretParams(**params)),
    ):
        try:
            yield kernels
        finally:  # a kernel that failed leaves its memory behind
            pltpu.reset_tpu_interpret_mode_state()


def interpret(function: Callable, *args: Any, **params: Any) -> tuple[Any, list[bool]]:
    """Return the result of a new function whose TPU kernels are interpreted, and flags of kernels.

    With `detect_races` a flag says that its kernel has a race; `params` are as for `interpreted`.
    """
    with interpreted(**params) as kernels:
        result = jax.block_until_ready(jax.jit(function)(*args))
    return result, [kernel.races_found for kernel in kernels]
