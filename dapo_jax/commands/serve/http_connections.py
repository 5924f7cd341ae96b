"""HTTP connections: how many are held at once, and how long one may wait for its client.

uvicorn closes a connection that is idle after an answer. It waits for ever for the rest of a
request and for a client that does not read, and asyncio's accept loop spins where no file can be
opened.
"""

import asyncio
import contextlib
import math
import socket
import time
from collections.abc import Iterator
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

SWEEP_SECONDS = 0.25
RETRY_SECONDS = 0.1  # until the next try to accept where no file could be opened
UNFINISHED_BODIES = 64  # so many bodies of the largest size: the most bytes of unfinished requests


class Waiting:
    """Connections that wait for their client, the one that has waited longest first.

    That one is closed where too many connections or too many bytes of unfinished requests are held:
    a request that is meant to be answered arrives within milliseconds.

    Args:
        most_bytes: bytes of unfinished requests held at once.
        seconds: for a request to arrive whole, and for a client to read what is sent to it.
    """

    def __init__(self, most_bytes: float, seconds: float):
        self._most_bytes, self._seconds = most_bytes, seconds
        self._until: dict[Connection, float] = {}
        self._bytes = 0

    def add(self, connection: "Connection", *, idle: bool = False) -> None:
        """Starts the time of a connection, unless it runs; none for an `idle` one (uvicorn's)."""
        if idle:
            self.remove(connection)
            self._until[connection] = math.inf
        elif math.isinf(self._until.get(connection, math.inf)):
            self._until.pop(connection, None)  # it is the last one now
            self._until[connection] = time.monotonic() + self._seconds

    def count(self, connection: "Connection", size: int) -> None:
        """Counts bytes of a request; while it is unfinished they are held."""
        connection.unfinished_bytes += size
        self._bytes += size

    def remove(self, connection: "Connection") -> None:
        """Ends the waiting of a connection."""
        self._until.pop(connection, None)
        self._bytes -= connection.unfinished_bytes
        connection.unfinished_bytes = 0

    def close_longest(self) -> bool:
        """Closes the connection that has waited longest; False: none waits."""
        for connection in self._until:
            connection.give_up()
            return True
        return False

    def bound_bytes(self) -> None:
        """Closes those that have waited longest until no more bytes are held than may be."""
        while self._bytes > self._most_bytes and self.close_longest():
            pass

    def close_late(self, now: float) -> None:
        """Closes the connections whose time is up."""
        for connection in [late for late, until in self._until.items() if until <= now]:
            connection.give_up()

    def close_unread(self) -> None:
        """Closes the connections that wait for a request or for the rest of one."""
        for connection in [one for one in self._until if not one.flow.write_paused]:
            connection.give_up()


class Connection(H11Protocol):
    """uvicorn's connection, which waits for its client only so long.

    Attributes:
        unfinished_bytes: bytes of a request that has not arrived whole.
    """

    def __init__(self, waiting: Waiting, **options: Any):
        super().__init__(**options)
        self._waiting, self.unfinished_bytes = waiting, 0

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._waiting.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._waiting.remove(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._waiting.count(self, len(data))
        try:
            super().data_received(data)
        except h11.LocalProtocolError:  # it answers 400 also where an answer has begun
            self.transport.abort()
        self._look()
        self._waiting.bound_bytes()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._look()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._look()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._look()

    def _look(self) -> None:
        """Notes whether the client is waited for now."""
        unsent = self.transport.get_write_buffer_size() > 0
        if self.transport.is_closing() and not unsent:
            self._waiting.remove(self)
        elif self.transport.is_closing() or self.flow.write_paused or self._has_half():
            self._waiting.add(self)
        elif self.conn.their_state is h11.IDLE:
            self._waiting.add(self, idle=True)
        else:
            self._waiting.remove(self)

    def _has_half(self) -> bool:
        """True where a part of a request has arrived, and no other is being answered."""
        state = self.conn.their_state
        return state is h11.SEND_BODY or state is h11.IDLE and self.conn.trailing_data[0] != b""

    def give_up(self) -> None:
        """Closes the connection at once; half a request is answered by status 408."""
        self._waiting.remove(self)
        unanswered = self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE)
        if unanswered and self._has_half():
            headers = [("connection", "close"), ("content-length", "0")]
            answer = h11.Response(status_code=408, headers=headers, reason="Request Timeout")
            for event in answer, h11.EndOfMessage():
                self.transport.write(self.conn.send(event) or b"")
        if self.cycle is not None:
            self.cycle.disconnected = True
        self.transport.abort()


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leaves signals to the command."""
        yield


class HttpServer:
    """HTTP server on a bound socket, which runs until `stop`.

    Args:
        app: ASGI application.
        connections: number of connections held at once.
        request_seconds: for a request to arrive whole, and for a client to read its answer.
        idle_seconds: for the next request on a connection.
        most_bytes: size of the largest body.
        shutdown_seconds: for running requests to end, once the server stops.
    """

    def __init__(
        self,
        app: Any,
        listening: socket.socket,
        *,
        connections: int,
        request_seconds: float,
        idle_seconds: float,
        most_bytes: int,
        shutdown_seconds: float,
    ):
        self._listening, self._limit, self._seconds = listening, connections, shutdown_seconds
        self._waiting = Waiting(UNFINISHED_BODIES * most_bytes, request_seconds)
        self._config = uvicorn.Config(
            app,
            http="h11",
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="error",  # a warning for each wrong request would fill the disk
            access_log=False,
            timeout_keep_alive=idle_seconds,  # pyright: ignore[reportArgumentType]: declared as whole seconds
        )
        self._server = _Server(self._config)
        listening.setblocking(False)
        self._running = asyncio.create_task(self._server.serve(sockets=[]))
        self._beside = [asyncio.create_task(work) for work in (self._accept(), self._sweep())]

    def _connection(self) -> Connection:
        state = self._server.server_state
        return Connection(self._waiting, config=self._config, server_state=state, app_state={})

    async def _accept(self) -> None:
        """Accepts connections; at the limit one that waits is closed for each."""
        loop, held = asyncio.get_running_loop(), self._server.server_state.connections
        while True:
            try:
                accepted, _ = await loop.sock_accept(self._listening)
                while len(held) >= self._limit:  # where all are at work the new one waits
                    closed = self._waiting.close_longest()
                    await asyncio.sleep(0 if closed else RETRY_SECONDS)
                await loop.connect_accepted_socket(self._connection, accepted)
            except OSError:  # no more files can be opened, or the client has left already
                self._waiting.close_longest()
                await asyncio.sleep(RETRY_SECONDS)

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            self._waiting.close_late(time.monotonic())

    async def stop(self) -> None:
        """Stops the server: half requests are dropped at once, running ones after their time."""
        accepting, sweeping = self._beside
        accepting.cancel()
        self._listening.close()
        self._waiting.close_unread()
        self._server.should_exit = True
        await asyncio.wait({self._running}, timeout=self._seconds)
        for connection in list[Any](self._server.server_state.connections):  # `Connection`s
            connection.give_up()
        await self._running
        sweeping.cancel()
