"""HTTP server of leases: samplers of other processes fetch groups here and return them.

A message to `/v1/exchange` holds who sends it, the leases that it works on, its answers, and the
number of responses that it has room for. The reply holds new leases, and those that have ended.
"""

import asyncio
import socket
import threading
from collections.abc import Callable
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from dapo_jax.extras.samplers.leases import Leases, WrongAnswer
from dapo_jax.extras.samplers.settings import SamplersSettings
from dapo_jax.rollout import group_format
from dapo_jax.runtime.keys import has_key
from dapo_jax.types.errors import ConfigError
from dapo_jax.types.structs import SamplerCounts, TurnCounts

EXCHANGE = "/v1/exchange"
MAX_BYTES = 1 << 28  # of a message, also decompressed
POLL_SECONDS = 0.02  # between looks at new groups while a sampler waits
WAIT_SECONDS = 1.0  # that a sampler without work is kept waiting


class LeaseServer:
    """Server in a thread; `close` stops it."""

    def __init__(
        self,
        leases: Leases,
        identity: dict[str, Any],  # what a sampler must have in common with the trainer, by name
        settings: SamplersSettings,
        key: str,  # that messages must hold; empty: none
        warn: Callable[[str], None],  # receives a line for each refused message
    ):
        self._leases, self._identity, self._key, self._warn = leases, identity, key, warn
        host, port = settings.host.strip("[]"), settings.port
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        app = Starlette(routes=[Route(EXCHANGE, self._answer, methods=["POST"])])
        options: dict[str, Any] = {"limit_concurrency": 1000, "log_config": None}
        options |= {"lifespan": "off", "ws": "none", "log_level": "critical"}
        try:
            listening = socket.create_server((host, port), family=family)
        except OSError as error:
            text = f"config.extras.samplers.port = {port}: on {host}: {error}"
            raise ConfigError(text, "extras.samplers.port") from None
        self.port = listening.getsockname()[1]
        self._server = uvicorn.Server(uvicorn.Config(app, **options))
        self._thread = threading.Thread(target=self._server.run, args=([listening],), daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop answering."""
        self._server.should_exit = True
        self._thread.join()

    async def _answer(self, http: Request) -> Response:
        if not has_key(http.headers.get("authorization", ""), self._key):
            return PlainTextResponse("the key is missing or wrong: --key_file", 401)
        body = bytearray()
        try:
            async for part in http.stream():
                body += part
                if len(body) > MAX_BYTES:
                    return PlainTextResponse("the message is too large", 413)
        except ClientDisconnect:
            return Response()
        try:
            message = await asyncio.to_thread(group_format.load, bytes(body), MAX_BYTES)
            name, held, room = str(message["sampler"])[:200], message["held"], message["room"]
            if not isinstance(room, int) or not all(isinstance(key, str) for key in held):
                raise ValueError("'room' must be a number, 'held' a list of keys")
            answers, identity = dict(message["answers"]), dict(message["identity"])
            counts = message["counts"] and group_format.read_counts(message["counts"])
            counts = SamplerCounts(turns=counts and counts.turns and TurnCounts()) + counts
        except (KeyError, TypeError, ValueError) as error:
            self._warn(f"a message to {EXCHANGE} is refused: {error!r}")
            return PlainTextResponse(f"no message: {error!r}", 400)
        differences = "; ".join(
            f"{field} = {identity.get(field)!r}, but the trainer has {value!r}"
            for field, value in self._identity.items()
            if identity.get(field) != value
        )
        if differences:
            return self._refuse(name, differences)
        if message.get("unreadable") and self._leases.session:
            self._leases.unreadable |= message["unreadable"] == self._leases.session.weights
        ended = self._leases.hear(name, held, counts, room)
        try:
            for key, answer in answers.items():
                self._leases.answer(name, key, answer)
        except WrongAnswer as error:
            return self._refuse(name, f"an answer is none: {error}")
        looks = int(WAIT_SECONDS / POLL_SECONDS) * (room > 0 and not held)
        while not (tasks := self._leases.lease(name, room)) and looks:
            looks -= 1
            await asyncio.sleep(POLL_SECONDS)
        reply = {"leases": tasks, "ended": ended}
        return Response(await asyncio.to_thread(group_format.dump, reply))

    def _refuse(self, name: str, text: str) -> Response:
        self._warn(f"sampler {name} is refused: {text}")
        return PlainTextResponse(text, 409)
