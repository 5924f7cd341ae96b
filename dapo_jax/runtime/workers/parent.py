"""A worker process spoken to in JSON lines; one that is late or broken is killed."""

import json
import os
import select
import subprocess
import sys
import time

LONGEST_WAIT_SECONDS = 3600.0  # more than this is a deadline that was never set
START_SECONDS = 60.0  # for an interpreter to come up on a busy machine
LONGEST_REPLY = 1 << 20  # bytes; a worker that writes on and on is broken


class WorkerProcess:
    """One process running `python -m MODULE ARGUMENTS`, which serves as `worker.serve` does.

    Args:
        environment: its variables; None for those of this process.
        longest_reply: in bytes.
    """

    def __init__(
        self,
        module: str,
        *arguments: str,
        environment: dict[str, str] | None = None,
        longest_reply: int = LONGEST_REPLY,
    ):
        self._longest = longest_reply
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            env=environment,
            start_new_session=True,
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._to, self._from = self._process.stdin, self._process.stdout
        os.set_blocking(self._to.fileno(), False)
        try:
            self._read_line(time.monotonic() + START_SECONDS)
        except BaseException:
            self.kill()
            raise

    def ask(self, job: dict, deadline: float) -> dict:
        """The reply, by `deadline` of time.monotonic().

        Raises TimeoutError, OSError or ValueError; the process is then of no more use.
        """
        message, pipe = json.dumps(job).encode() + b"\n", self._to.fileno()
        while message:
            self._wait([], [pipe], deadline)
            message = message[os.write(pipe, message[:65_536]) :]
        return json.loads(self._read_line(deadline))

    def _read_line(self, deadline: float) -> bytes:
        reply, pipe = b"", self._from.fileno()
        while not reply.endswith(b"\n"):
            self._wait([pipe], [], deadline)
            piece = os.read(pipe, 65_536)
            if not piece:
                raise OSError("the worker died")
            reply += piece
            if len(reply) > self._longest:
                raise ValueError("no reply is that long")
        return reply

    @staticmethod
    def _wait(readable: list[int], writable: list[int], deadline: float) -> None:
        waiting = select.poll()  # unlike select(), for any number of open files
        for pipe in readable:
            waiting.register(pipe, select.POLLIN)
        for pipe in writable:
            waiting.register(pipe, select.POLLOUT)
        if not waiting.poll(
            1000 * min(max(0.0, deadline - time.monotonic()), LONGEST_WAIT_SECONDS)
        ):
            raise TimeoutError("no answer in time")

    def kill(self) -> int:
        """Ends it; its exit code, that of its own end where it had ended."""
        self._process.kill()
        code = self._process.wait()
        self._to.close()
        self._from.close()
        return code
