"""HTTP application of OpenAI's API, and the uvicorn server of an application."""

import asyncio
import contextlib
import functools
import time
import traceback
from collections.abc import Awaitable, Callable
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from dapo_jax.extras.serve.access import bind, check_access
from dapo_jax.extras.serve.fields import RequestError
from dapo_jax.extras.serve.generator import Generator
from dapo_jax.extras.serve.logprobs import Scorer
from dapo_jax.extras.serve.policy import ServedPolicy
from dapo_jax.extras.serve.requests import Chat, Completion, read_request
from dapo_jax.extras.serve.responses import CompletionResponse
from dapo_jax.extras.serve.settings import ServeConfig

CLIENT_CLOSED_REQUEST = 499
ERROR_HEADERS = {
    401: {"WWW-Authenticate": "Bearer"},
    408: {"Connection": "close"},
    429: {"Retry-After": "1"},
}
POLL_SECONDS = 0.1
CHAT = "/v1/chat/completions"
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
            "POST /v1/completions": self._complete,
            f"POST {CHAT}": self._complete,
            "GET /v1/models": self._describe_models,
            "GET /v1/models/{name:path}": self._describe_models,
        }

    async def _describe_models(self, http: HttpRequest) -> Response:
        """Describe the named model, or list all, if the path has no name."""
        name = self._model.config.served_name
        if http.path_params.get("name", name) != name:
            message = f"there is only the model {name!r}"
            raise RequestError(message, "model", 404, "model_not_found")
        fields = {"id": name, "object": "model", "created": self._created, "owned_by": "dapo_jax"}
        return JSONResponse(fields if http.path_params else {"object": "list", "data": [fields]})

    async def _complete(self, http: HttpRequest) -> Response:
        kind = Chat if http.url.path == CHAT else Completion
        body = await read_body(http, self._model.config)
        # In a thread: tokenizing a large text would delay the tokens of other clients.
        request = await asyncio.to_thread(read_request, kind, body, self._model)
        answer = CompletionResponse(request, self._model, self._generator, self._score)
        if request.fields.stream:
            return StreamingResponse(answer.events(), 200, STREAM_HEADERS, "text/event-stream")
        return JSONResponse(await answer.complete(http))


async def read_body(http: HttpRequest, config: ServeConfig) -> bytes:
    """Return the body of a request. Raise `RequestError` if it is too large or slow."""
    limit = int(config.max_body_mb * 1e6)
    announced = http.headers.get("content-length", "0")
    size, body = int(announced) if announced.isdigit() else 0, bytearray()
    try:
        async with asyncio.timeout(config.request_seconds):
            async for part in http.stream():
                body += part
                if max(size, len(body)) > limit:
                    message = f"the body is too large: at most {limit} bytes"
                    raise RequestError(message, status=413)
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
        error = RequestError("the client has disconnected", status=CLIENT_CLOSED_REQUEST)
    elif not isinstance(error, RequestError):
        traceback.print_exception(error)  # uvicorn's log is off: see `serve_api`
        error = RequestError("internal server error", status=500)
    return JSONResponse(error.fields(), error.status, headers or ERROR_HEADERS.get(error.status))


# --- the server -----------------------------------------------------------------------------------


def guard(config: ServeConfig, key: str, route: str, handler: Handler) -> Route:
    """Return the route of `METHOD path` for those who may reach it."""
    method, path = route.split()

    async def answer(http: HttpRequest) -> Response:
        check_access(http, config, key)
        return await handler(http)

    return Route(path, answer, methods=[method])


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

    routes = [*(guard(config, key, *item) for item in api.handlers.items())]
    errors = RequestError, HTTPException, ClientDisconnect, Exception
    app = Starlette(
        routes=[*routes, Route("/health", check_health)],
        exception_handlers=dict.fromkeys(errors, answer_error),
    )
    app.router.redirect_slashes = False  # OpenAI's API has no redirects
    options: dict[str, Any] = {
        "ws": "none",
        "log_config": None,
        "log_level": "critical",  # clients could fill the disk with a warning per bad request
        "access_log": False,
        "limit_concurrency": config.max_connections + 1,  # uvicorn rejects at the limit
        "timeout_keep_alive": config.idle_seconds,  # it declares whole seconds
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
