"""HTTP application of OpenAI's API, who may reach it, and the uvicorn server of an application."""

import asyncio
import contextlib
import functools
import socket
import time
import traceback
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import urlsplit

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from dapo_jax.extras.serve.fields import RequestError
from dapo_jax.extras.serve.generator import Generator
from dapo_jax.extras.serve.logprobs import Scorer
from dapo_jax.extras.serve.policy import ServedPolicy
from dapo_jax.extras.serve.requests import Chat, Completion, read_request
from dapo_jax.extras.serve.responses import CompletionResponse
from dapo_jax.extras.serve.settings import ServeConfig
from dapo_jax.runtime.keys import LOOPBACK, has_key
from dapo_jax.types.errors import ConfigError, require

ERROR_HEADERS = {
    401: {"WWW-Authenticate": "Bearer"},
    408: {"Connection": "close"},
    429: {"Retry-After": "1"},
}
BACKLOG = 2048
POLL_SECONDS = 0.1
STREAM_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
Handler = Callable[[HttpRequest], Awaitable[Response]]


class OpenaiApi:
    """OpenAI's API."""

    def __init__(self, policy: ServedPolicy):
        self._model = policy.model
        self._score = functools.partial(Scorer(policy.engine.config).score, policy.params)
        choices = policy.engine.max_concurrent_decodes + policy.model.config.waiting
        self._generator = Generator(policy.scheduler(), choices)
        self._created = int(time.time())
        self.thread = self._generator.thread
        self.handlers: dict[str, Handler] = {
            "POST /v1/completions": functools.partial(self._complete, Completion),
            "POST /v1/chat/completions": functools.partial(self._complete, Chat),
            "GET /v1/models": self._describe_models,
            "GET /v1/models/{name:path}": self._describe_models,
        }

    async def _describe_models(self, http: HttpRequest) -> Response:
        """Describe the named model, or list all, if the path has no name."""
        name = self._model.config.served_name
        self._model.check_name(http.path_params.get("name", name))
        fields = {"id": name, "object": "model", "created": self._created, "owned_by": "dapo_jax"}
        return JSONResponse(fields if http.path_params else {"object": "list", "data": [fields]})

    async def _complete(self, kind: type[Completion | Chat], http: HttpRequest) -> Response:
        body = await read_body(http, self._model.config)
        # In a thread: tokenizing a large text would delay the tokens of other clients.
        request = await asyncio.to_thread(read_request, kind, body, self._model)
        answer = CompletionResponse(request, self._model, self._generator, self._score)
        if request.fields.stream:
            return StreamingResponse(answer.events(), 200, STREAM_HEADERS, "text/event-stream")
        return JSONResponse(await answer.complete(http))


async def read_body(http: HttpRequest, config: ServeConfig) -> bytes:
    """Return the body of a request. Raise `RequestError` if it is too large or slow."""
    limit, body = int(config.max_body_mb * 1e6), bytearray()
    announced = int(http.headers.get("content-length", 0))  # h11 rejects what is no number
    try:
        async with asyncio.timeout(config.request_seconds):
            async for part in http.stream():
                body += part
                if max(announced, len(body)) > limit:
                    raise RequestError(f"the body is too large: at most {limit} bytes", status=413)
    except TimeoutError:
        late = f"the body has not arrived within {config.request_seconds:g} s"
        raise RequestError(late, status=408) from None
    return bytes(body)


async def answer_error(http: HttpRequest, error: Exception) -> Response:
    """Return the response to a request that raised an error."""
    headers = None
    if isinstance(error, HTTPException):
        headers = error.headers
        message = f"{http.method} {http.url.path}: {error.detail}"
        error = RequestError(message, status=error.status_code)
    elif isinstance(error, ClientDisconnect):  # nobody reads it
        return Response(status_code=499)
    elif not isinstance(error, RequestError):
        traceback.print_exception(error)  # uvicorn's log is off: see `serve_api`
        error = RequestError("internal server error", status=500)
    return JSONResponse(error.fields(), error.status, headers or ERROR_HEADERS.get(error.status))


# --- who may reach the server ---------------------------------------------------------------------


def bind(config: ServeConfig) -> socket.socket:
    """Return a socket that listens on the port. Raise `ConfigError`."""
    host = config.host.strip("[]")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, config.http_port), family=family, backlog=BACKLOG)
    except OSError as error:
        allowed = "a name or an address of this machine, such as 127.0.0.1, or 0.0.0.0 for all"
        is_resolved = (error.errno or 0) >= 0  # errors of getaddrinfo have negative numbers
        require(is_resolved, "host", config.host, allowed)
        place = f"config.http_port = {config.http_port}: on {config.host}"
        raise ConfigError(f"{place}: {error}") from None


def check_access(http: HttpRequest, config: ServeConfig, key: str) -> None:
    """Raise `RequestError` unless a request may be served; an empty key lets all in.

    A page of another site can make a browser send a request, but can't choose these headers.
    """
    allowed_hosts = {name.strip().lower() for name in config.allowed_hosts.split(",")} - {""}
    hosts = {*LOOPBACK, config.host.strip("[]").lower()} | allowed_hosts
    headers, (address, *_) = http.headers, http.scope.get("server") or ("",)
    for field in ["host", "origin"] if "origin" in headers else ["host"]:
        value = headers.get(field, "")
        if not {"*", _host(value)} & (hosts | {address}):
            allowed = f"one of {', '.join(sorted(hosts))}"
            message = f"{field} = {value[:200]!r}: must be {allowed}"
            raise RequestError(f"{message}; the setting allowed_hosts adds others", status=403)
    bare = headers.get("x-api-key", "")  # where Tinker's SDK sends it
    if not has_key(f"Bearer {bare}" if bare else headers.get("authorization", ""), key):
        message = "the key is missing or wrong: send the header Authorization: Bearer KEY"
        raise RequestError(message, status=401, code="invalid_api_key")
    kind = headers.get("content-type", "")
    is_json = kind.partition(";")[0].strip().lower() == "application/json"
    if http.method == "POST" and not is_json and not config.tinker:  # whose bodies are binary, too
        message = f"content-type = {kind[:200]!r}: must be application/json"
        raise RequestError(message, status=415)


def _host(value: str) -> str | None:
    """Return the host of `HOST:PORT` or an origin; None if there is none."""
    try:
        return urlsplit(value if "//" in value else f"//{value}").hostname
    except ValueError:
        return None


# --- the server -----------------------------------------------------------------------------------


async def serve_api(
    open_api: Callable[[], Any],
    config: ServeConfig,
    key: str,
    should_stop: Callable[[], bool],
    ready: Callable[[int], None],
) -> str:
    """Serve an API until `should_stop()` or a failure of its thread; return it, or empty.

    An API has `handlers` by `METHOD path`, and the `thread` that works for them. Running requests
    have `shutdown_seconds`.
    """
    api = open_api()

    async def check_health(_: HttpRequest) -> Response:
        failure = api.thread.failure
        return JSONResponse({"status": failure or "ok"}, 503 if failure else 200)

    async def answer(handler: Handler, http: HttpRequest) -> Response:
        check_access(http, config, key)
        return await handler(http)

    routes = [Route("/health", check_health)]
    for name, handler in api.handlers.items():
        method, path = name.split()
        routes.append(Route(path, functools.partial(answer, handler), methods=[method]))
    errors = RequestError, HTTPException, ClientDisconnect, Exception
    app = Starlette(routes=routes, exception_handlers=dict.fromkeys(errors, answer_error))
    app.router.redirect_slashes = False  # OpenAI's API has no redirects
    options: dict[str, Any] = {
        "ws": "none",
        "log_config": None,
        "log_level": "critical",  # clients could fill the disk with a warning per bad request
        "access_log": False,
        "limit_concurrency": config.max_connections + 1,  # uvicorn rejects at the limit
        "timeout_graceful_shutdown": config.shutdown_seconds,
    }
    server: Any = uvicorn.Server(uvicorn.Config(app, lifespan="off", http="h11", **options))
    server.capture_signals = contextlib.nullcontext  # they are the command's
    api.thread.start()
    try:
        listening = bind(config)
        serving = asyncio.create_task(server.serve(sockets=[listening]))
        ready(listening.getsockname()[1])
        while not should_stop() and not api.thread.failure:
            await asyncio.sleep(POLL_SECONDS)
        server.should_exit = True
        await serving
    finally:
        await api.thread.close()
    return api.thread.failure
