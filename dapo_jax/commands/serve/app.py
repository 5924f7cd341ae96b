"""HTTP application of OpenAI's API, and its uvicorn server."""

import asyncio
import contextlib
import functools
import socket
import time
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from typing import Any

import uvicorn
from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from dapo_jax.commands.serve.access import Access, RequestError
from dapo_jax.commands.serve.generator import GenerationFailed, Generator, QueueFull
from dapo_jax.commands.serve.logprobs import Scorer
from dapo_jax.commands.serve.requests import ServedModel, read_request
from dapo_jax.commands.serve.responses import (
    CHAT,
    COMPLETIONS,
    CompletionResponse,
    ResponseFormat,
    error_fields,
    json_response,
)
from dapo_jax.config.experiment import ServeConfig

RETRY_SECONDS = 1
CLIENT_CLOSED_REQUEST = 499
MAX_HEADER_BYTES = 64 << 10
LATENCY_BUCKETS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300)
PATHS = (COMPLETIONS.path, CHAT.path, "/v1/models", "/metrics", "/health")


class _Metrics:
    """Prometheus metrics of one server."""

    def __init__(self, generator: Generator):
        self.registry = CollectorRegistry()
        options: dict[str, Any] = {"registry": self.registry}
        self.answers = Counter(
            "dapo_http_answers", "HTTP responses.", ["path", "status"], **options
        )
        self.seconds = Histogram(
            "dapo_http_seconds",
            "Seconds from a request to the end of its response.",
            ["path"],
            buckets=LATENCY_BUCKETS,
            **options,
        )
        self.prompt_tokens = Counter("dapo_prompt_tokens", "Prompt tokens.", **options)
        self.response_tokens = Counter("dapo_response_tokens", "Sampled tokens.", **options)
        waiting = Gauge("dapo_waiting_responses", "Responses that wait for a slot.", **options)
        waiting.set_function(lambda: generator.waiting)
        slots = Gauge("dapo_busy_slots", "Occupied slots.", **options)
        slots.set_function(lambda: generator.busy)


class HttpApi:
    """ASGI application of OpenAI's API.

    Args:
        access: checks requests before their bodies are read.
    """

    def __init__(
        self,
        generator: Generator,
        scorer: Scorer,
        model: ServedModel,
        access: Access,
        config: ServeConfig,
    ):
        self._generator = generator
        self._scorer = scorer
        self._model = model
        self._access = access
        self._max_body_bytes = int(config.max_body_mb * 1e6)
        self._body_seconds = config.request_seconds
        self._metrics = _Metrics(generator)
        self._to_score = 0  # sequences of accepted requests that ask for log-probs
        self._model_fields = {
            "id": model.name,
            "object": "model",
            "created": int(time.time()),
            "owned_by": "dapo_jax",
        }
        # Starlette's type can't say that each handler gets only its class of errors.
        handlers: dict[Any, Any] = {
            RequestError: _answer_request_error,
            QueueFull: _answer_queue_full,
            GenerationFailed: _answer_failure,
            HTTPException: _answer_http_error,
            ClientDisconnect: _answer_disconnect,
            Exception: _answer_failure,
        }
        routes = [
            self._route(kind.path, functools.partial(self._complete, kind), method="POST")
            for kind in (COMPLETIONS, CHAT)
        ]
        routes += [
            self._route("/v1/models", self._list_models),
            self._route("/v1/models/{name:path}", self._describe_model),
            self._route("/metrics", self._show_metrics),
            Route("/health", self._check_health),
        ]
        self._app = Starlette(routes=routes, exception_handlers=handlers)
        self._app.router.redirect_slashes = False  # OpenAI's API has no redirects

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer a request with a bounded body, and count the response."""
        start = time.monotonic()
        path = scope["path"] if scope["path"] in PATHS else "other"

        async def counted_send(message: Any) -> None:
            if message["type"] == "http.response.start":
                self._metrics.answers.labels(path, message["status"]).inc()
            await send(message)

        try:
            await self._app(scope, self._bounded(scope, receive), counted_send)
        finally:
            self._metrics.seconds.labels(path).observe(time.monotonic() - start)

    def _bounded(self, scope: Any, receive: Any) -> Callable[[], Awaitable[Any]]:
        """Return a `receive` that raises `RequestError` for a body that is too large or slow."""
        limit = self._max_body_bytes
        too_large = RequestError(f"the body is too large: at most {limit} bytes", status=413)
        announced = dict(scope["headers"]).get(b"content-length", b"0")
        deadline = asyncio.get_running_loop().time() + self._body_seconds
        size = 0
        is_complete = False

        async def bounded_receive() -> Any:
            nonlocal size, is_complete
            if is_complete:
                return await receive()
            if announced.isdigit() and int(announced) > limit:
                raise too_large
            try:
                async with asyncio.timeout_at(deadline):
                    message = await receive()
            except TimeoutError:
                late = f"the body has not arrived within {self._body_seconds:g} s"
                raise RequestError(late, status=408) from None
            size += len(message.get("body", b""))
            if size > limit:
                raise too_large
            is_complete = not message.get("more_body", False)
            return message

        return bounded_receive

    def _route(
        self, path: str, handler: Callable[[HttpRequest], Awaitable[Response]], method: str = "GET"
    ) -> Route:
        """Return a route that checks access before it calls the handler."""

        async def checked(http: HttpRequest) -> Response:
            address = (http.scope.get("server") or ("", 0))[0]
            self._access.check(http.headers, local_address=address, has_body=method == "POST")
            return await handler(http)

        return Route(path, checked, methods=[method])

    async def _list_models(self, _: HttpRequest) -> Response:
        return json_response({"object": "list", "data": [self._model_fields]})

    async def _describe_model(self, http: HttpRequest) -> Response:
        if http.path_params["name"] != self._model.name:
            message = f"there is only the model {self._model.name!r}"
            raise RequestError(message, "model", 404, "model_not_found")
        return json_response(self._model_fields)

    async def _show_metrics(self, _: HttpRequest) -> Response:
        page = generate_latest(self._metrics.registry) + generate_latest(REGISTRY)
        return Response(page, headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def _check_health(self, _: HttpRequest) -> Response:
        failure = self._generator.failure
        return json_response({"status": failure or "ok"}, 503 if failure else 200)

    async def _complete(self, kind: ResponseFormat, http: HttpRequest) -> Response:
        body = await http.body()
        # In a thread: tokenizing a large text would delay the tokens of other clients.
        request = await asyncio.to_thread(read_request, body, self._model, chat=kind is CHAT)
        to_score = len(request.prompts) * request.n * (request.likeliest is not None)
        if self._to_score + to_score > self._model.limits.waiting:
            raise QueueFull
        responses = self._generator.submit(request.responses())
        self._metrics.prompt_tokens.inc(sum(map(len, request.prompts)))
        count_tokens = self._metrics.response_tokens.inc
        completion = CompletionResponse(
            kind, request, responses, self._model, self._scorer, count_tokens
        )
        if not request.stream:
            with self._scoring(to_score):
                return await _unless_disconnected(http, completion.complete())

        async def events() -> AsyncIterator[str]:
            with self._scoring(to_score):
                async for event in completion.events():
                    yield event

        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        return StreamingResponse(events(), media_type="text/event-stream", headers=headers)

    @contextlib.contextmanager
    def _scoring(self, sequences: int) -> Iterator[None]:
        self._to_score += sequences
        try:
            yield
        finally:
            self._to_score -= sequences


async def _unless_disconnected(http: HttpRequest, work: Coroutine[Any, Any, Response]) -> Response:
    """Return the result of `work`; cancel `work` if the client disconnects."""

    async def wait_for_disconnect() -> None:
        while (await http.receive())["type"] != "http.disconnect":
            pass

    working = asyncio.ensure_future(work)
    disconnecting = asyncio.ensure_future(wait_for_disconnect())
    try:
        await asyncio.wait({working, disconnecting}, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else await _answer_disconnect()
    finally:
        working.cancel()
        disconnecting.cancel()


# --- errors, in OpenAI's form ---------------------------------------------------------------------


async def _answer_request_error(_: HttpRequest, error: RequestError) -> Response:
    headers = {401: {"WWW-Authenticate": "Bearer"}, 408: {"Connection": "close"}}
    fields = error_fields(str(error), "invalid_request_error", error.param, error.code)
    return json_response(fields, error.status, headers.get(error.status))


async def _answer_queue_full(_: HttpRequest, error: QueueFull) -> Response:
    fields = error_fields(str(error), "rate_limit_error", code="rate_limit_exceeded")
    return json_response(fields, 429, {"Retry-After": str(RETRY_SECONDS)})


async def _answer_disconnect(*_: Any) -> Response:
    return Response(status_code=CLIENT_CLOSED_REQUEST)  # for the metrics; nobody reads it


async def _answer_failure(_: HttpRequest, error: Exception) -> Response:
    message = "internal server error"
    if isinstance(error, GenerationFailed):
        message = str(error)
    else:
        traceback.print_exception(error)  # uvicorn's log is off: see `start_http`
    return json_response(error_fields(message, "server_error"), 500)


async def _answer_http_error(http: HttpRequest, error: HTTPException) -> Response:
    message = f"{http.method} {http.url.path}: {error.detail}"
    fields = error_fields(message, "invalid_request_error")
    return json_response(fields, error.status_code, error.headers)


# --- the server -----------------------------------------------------------------------------------


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to the command."""
        yield


def start_http(
    app: Any, listening: socket.socket, config: ServeConfig, connections: int
) -> Callable[[], Awaitable[None]]:
    """Start uvicorn on a listening socket; return a function that stops it.

    Stopping waits `shutdown_seconds` for running requests, then cancels them.

    Args:
        connections: maximum number of connections; requests on further ones get status 503.
    """
    options: dict[str, Any] = {  # uvicorn declares some times as whole seconds
        "timeout_keep_alive": config.idle_seconds,
        "timeout_graceful_shutdown": config.shutdown_seconds,
    }
    server = _Server(
        uvicorn.Config(
            app,
            http="h11",
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="critical",  # clients could fill the disk with a warning per bad request
            access_log=False,
            limit_concurrency=connections + 1,  # uvicorn rejects at the limit, not above it
            h11_max_incomplete_event_size=MAX_HEADER_BYTES,
            **options,
        )
    )
    serving = asyncio.create_task(server.serve(sockets=[listening]))

    async def stop() -> None:
        server.should_exit = True
        await serving

    return stop
