"""HTTP server of leases: samplers of other processes fetch groups here and return them.

A message to `/v1/exchange` holds who sends it, the leases that it works on, its answers, the number
of responses that it has room for, and whether it asks for them. The reply holds new leases, those
that have ended, and the next version of the policy, if it is there.
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

from dapo_jax.config.experiment import Sampler
from dapo_jax.extras.samplers.leases import Leases, WrongAnswer, counts_from
from dapo_jax.rollout import group_format
from dapo_jax.runtime.keys import has_key
from dapo_jax.types.errors import ConfigError

EXCHANGE = "/v1/exchange"
MAX_BYTES = 1 << 28  # of a message, also decompressed
MAX_NAME = 200  # characters of a sampler's name
LOOK_SECONDS = 0.02  # between looks at new groups while a sampler waits
WAIT_SECONDS = 1.0  # that a sampler without work is kept waiting
MAX_CONNECTIONS = 1000


def describe_differences(sent: Any, own: dict[str, Any]) -> str:
    """Return what makes a sampler's identity another one; empty if it is the same."""
    sent = sent if isinstance(sent, dict) else {}
    named = [
        f"{name} = {sent.get(name)!r}, but the trainer has {value!r}"
        for name, value in own.items()
        if sent.get(name) != value
    ]
    return "; ".join(named)


class LeaseServer:
    """Server in a thread; `close` stops it."""

    def __init__(
        self,
        leases: Leases,
        identity: dict[str, Any],  # what a sampler must have in common with the trainer, by name
        settings: Sampler,
        key: str,  # that messages must hold; empty: none
        warn: Callable[[str], None],  # receives a line for each refused message
    ):
        self._leases, self._identity, self._key, self._warn = leases, identity, key, warn
        host, port = settings.host.strip("[]"), settings.port
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            listening = socket.create_server((host, port), family=family)
        except OSError as error:
            text = f"config.sampler.port = {port}: on {host}: {error}"
            raise ConfigError(text, "sampler.port") from None
        self.port = listening.getsockname()[1]
        app = Starlette(routes=[Route(EXCHANGE, self._answer, methods=["POST"])])
        options: dict[str, Any] = {"limit_concurrency": MAX_CONNECTIONS, "log_config": None}
        options |= {"lifespan": "off", "ws": "none", "log_level": "critical"}
        config = uvicorn.Config(app, ssl_certfile=settings.tls_file or None, **options)
        try:
            config.load()
        except OSError as error:  # also what `ssl` raises
            listening.close()
            text = f"config.sampler.tls_file = {settings.tls_file!r}: can't be used: {error}"
            raise ConfigError(text, "sampler.tls_file") from None
        self._server = uvicorn.Server(config)
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
            name, held, room = str(message["sampler"])[:MAX_NAME], message["held"], message["room"]
            if not isinstance(room, int) or not all(isinstance(key, str) for key in held):
                raise ValueError("'room' must be a number, 'held' a list of keys")
            answers = dict(message["answers"])
        except (KeyError, TypeError, ValueError) as error:
            self._warn(f"a message to {EXCHANGE} is refused: {error!r}")
            return PlainTextResponse(f"no message: {error!r}", 400)
        if differences := describe_differences(message.get("identity"), self._identity):
            self._warn(f"sampler {name} is refused: {differences}")
            return PlainTextResponse(differences, 409)
        if message.get("unreadable") and self._leases.session:
            self._leases.unreadable |= message["unreadable"] == self._leases.session.weights
        ended = self._leases.hear(name, held, counts_from(message.get("counts")), room)
        asks = room > 0 and bool(message.get("asks"))
        for key, answer in answers.items():
            try:
                self._leases.answer(name, key, answer)
            except WrongAnswer as error:
                self._warn(f"an answer of sampler {name} is refused: {error}")
        tasks = self._leases.lease(name, room * asks)
        for _ in range(int(WAIT_SECONDS / LOOK_SECONDS) * (asks and not held)):
            if tasks:
                break
            await asyncio.sleep(LOOK_SECONDS)
            tasks = self._leases.lease(name, room)
        fields = [task.fields() for task in tasks]
        reply = {"leases": fields, "ended": ended, "following": self._leases.following}
        return Response(await asyncio.to_thread(group_format.dump, reply))
