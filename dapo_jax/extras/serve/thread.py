"""The thread that owns the device, beside the event loop that answers clients."""

import asyncio
import threading
import traceback
from collections.abc import Callable

from dapo_jax.types.contracts import do_nothing

FAILURE = "the device thread has failed"
IDLE_SECONDS = 1.0


class DeviceThread(threading.Thread):
    """Thread for a server's device work, made in the event loop; `serve_api` starts it.

    It calls `turn` in a loop, pauses if that returns False, and calls `finish` once closed. If one
    of them raises, it sets the message `failure`, and the event loop calls `fail`.
    """

    def __init__(
        self,
        turn: Callable[[], bool],
        finish: Callable[[], None] = do_nothing,
        fail: Callable[[], None] = do_nothing,
    ):
        super().__init__(name="device")
        self._turn, self._finish, self._fail = turn, finish, fail
        self._has_work = threading.Event()
        self._is_closed = False
        self.failure = ""
        self.loop = asyncio.get_running_loop()

    def wake(self) -> None:
        """Tell the thread that there is new work."""
        self._has_work.set()

    async def close(self) -> None:
        """End the thread after its current turn."""
        self._is_closed = True
        self.wake()
        await asyncio.to_thread(self.join)

    def run(self) -> None:
        try:
            while not self._is_closed:
                self._has_work.clear()
                if not self._turn():
                    self._has_work.wait(IDLE_SECONDS)
            self._finish()
        except Exception as error:
            traceback.print_exception(error)
            self.failure = FAILURE
            self.loop.call_soon_threadsafe(self._fail)
