"""HTTP application of OpenAI's API, and its uvicorn server."""

import asyncio
import contextlib
import json
import time
import traceback
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from typing import Any

import uvicorn
from prometheus_client import REGISTRY, Counter, Histogram
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from dapo_jax.extras.serve.access import Access, bind
from dapo_jax.extras.serve.errors import RequestError
from dapo_jax.extras.serve.generator import Generator
from dapo_jax.extras.serve.logprobs import Scorer
from dapo_jax.extras.serve.requests import ServedModel, read_request
from dapo_jax.extras.serve.responses import CompletionResponse
from dapo_jax.extras.serve.settings import ServeConfig

CLIENT_CLOSED_REQUEST = 499
ERROR_HEADERS = {
    401: {"WWW-Authenticate": "Bearer"},
    408: {"Connection": "close"},
    429: {"Retry-After": "1"},
}
MAX_HEADER_BYTES = 64 << 10
POLL_SECONDS = 0.1
LATENCY_BUCKETS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300)
COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
ERRORS = (RequestError, HTTPException, ClientDisconnect, Exception)  # that `answer_error` takes
PATHS = (COMPLETIONS, CHAT, "/v1/models", "/metrics", "/health")


class HttpApi:
    """ASGI application of OpenAI's API."""

    def __init__(self, generator: Generator, scorer: Scorer, model: ServedModel, access: Access):
        self._generator = generator
        self._scorer = scorer
        self._model = model
        self._access = access
        self._config = model.config
        self._created = int(time.time())
        options: dict[str, Any] = {"registry": generator.metrics}
        self._answers = Counter(
            "dapo_http_answers", "HTTP responses.", ["path", "status"], **options
        )
        self._seconds = Histogram(
            "dapo_http_seconds",
            "Seconds from a request to the end of its response.",
            ["path"],
            buckets=LATENCY_BUCKETS,
            **options,
        )
        self._prompt_tokens = Counter("dapo_prompt_tokens", "Prompt tokens.", **options)
        routes = [
            self._route(COMPLETIONS, self._complete, method="POST"),
            self._route(CHAT, self._complete, method="POST"),
            self._route("/v1/models", self._describe_models),
            self._route("/v1/models/{name:path}", self._describe_models),
            self._route("/metrics", self._show_metrics),
            Route("/health", self._check_health),
        ]
        self._app = Starlette(routes=routes, exception_handlers=dict.fromkeys(ERRORS, answer_error))
        self._app.router.redirect_slashes = False  # OpenAI's API has no redirects

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer a request, and count the response."""
        start = time.monotonic()
        path = scope["path"] if scope["path"] in PATHS else "other"

        async def counted_send(message: Any) -> None:
            if message["type"] == "http.response.start":
                self._answers.labels(path, message["status"]).inc()
            await send(message)

        try:
            await self._app(scope, receive, counted_send)
        finally:
            self._seconds.labels(path).observe(time.monotonic() - start)

    def _route(
        self, path: str, handler: Callable[[HttpRequest], Awaitable[Response]], method: str = "GET"
    ) -> Route:
        """Return a route that checks access before it calls the handler."""

        async def checked(http: HttpRequest) -> Response:
            address = (http.scope.get("server") or ("", 0))[0]
            self._access.check(http.headers, local_address=address, has_body=method == "POST")
            return await handler(http)

        return Route(path, checked, methods=[method])

    async def _describe_models(self, http: HttpRequest) -> Response:
        """Describe the named model, or list all, if the path has no name."""
        name = self._model.name
        if http.path_params.get("name", name) != name:
            message = f"there is only the model {name!r}"
            raise RequestError(message, "model", 404, "model_not_found")
        fields = {"id": name, "object": "model", "created": self._created, "owned_by": "dapo_jax"}
        if not http.path_params:
            fields = {"object": "list", "data": [fields]}
        return _json_response(fields)

    async def _show_metrics(self, _: HttpRequest) -> Response:
        page = generate_latest(self._generator.metrics) + generate_latest(REGISTRY)
        return Response(page, headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def _check_health(self, _: HttpRequest) -> Response:
        failure = self._generator.failure
        return _json_response({"status": failure or "ok"}, 503 if failure else 200)

    async def _complete(self, http: HttpRequest) -> Response:
        chat = http.url.path == CHAT
        body = await read_body(http, self._config)
        # In a thread: tokenizing a large text would delay the tokens of other clients.
        request = await asyncio.to_thread(read_request, body, self._model, chat=chat)
        responses = self._generator.submit(request)
        self._prompt_tokens.inc(sum(map(len, request.prompts)))
        answer = CompletionResponse(responses, self._model, self._scorer, chat=chat)
        if not request.stream:
            return _json_response(await _unless_disconnected(http, answer.complete()))
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        return StreamingResponse(answer.events(), media_type="text/event-stream", headers=headers)


async def read_body(http: HttpRequest, config: ServeConfig) -> bytes:
    """Return the body of a request. Raise `RequestError` if it is too large or slow."""
    limit = int(config.max_body_mb * 1e6)
    too_large = RequestError(f"the body is too large: at most {limit} bytes", status=413)
    announced = http.headers.get("content-length", "0")
    if announced.isdigit() and int(announced) > limit:
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(config.request_seconds):
            async for part in http.stream():
                body += part
                if len(body) > limit:
                    raise too_large
    except TimeoutError:
        late = f"the body has not arrived within {config.request_seconds:g} s"
        raise RequestError(late, status=408) from None
    return bytes(body)


async def _unless_disconnected(http: HttpRequest, work: Coroutine[Any, Any, Any]) -> Any:
    """Return the result of `work`; if the client disconnects, cancel `work` and raise."""

    async def wait_for_disconnect() -> None:
        while (await http.receive())["type"] != "http.disconnect":
            pass

    working = asyncio.ensure_future(work)
    disconnecting = asyncio.ensure_future(wait_for_disconnect())
    try:
        await asyncio.wait({working, disconnecting}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        working.cancel()
        disconnecting.cancel()


def _json_response(fields: dict[str, Any], status: int = 200, headers: Any = None) -> Response:
    # Escaped to ASCII: an error may quote a client's text, perhaps with invalid Unicode.
    return Response(json.dumps(fields), status, headers, "application/json")


async def answer_error(http: HttpRequest, error: Exception) -> Response:
    """Return the response to a request that raised an error."""
    headers = None
    if isinstance(error, HTTPException):
        headers = error.headers
        message = f"{http.method} {http.url.path}: {error.detail}"
        error = RequestError(message, status=error.status_code)
    elif isinstance(error, ClientDisconnect):  # for the metrics; nobody reads it
        error = RequestError("the client has disconnected", status=CLIENT_CLOSED_REQUEST)
    elif not isinstance(error, RequestError):
        traceback.print_exception(error)  # uvicorn's log is off: see `run_app`
        error = RequestError("internal server error", status=500)
    return _json_response(error.fields(), error.status, headers or ERROR_HEADERS.get(error.status))


# --- the server -----------------------------------------------------------------------------------


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to the command."""
        yield


async def run_app(
    app: Any,
    worker: Any,
    config: ServeConfig,
    should_stop: Callable[[], bool],
    ready: Callable[[int], None],
) -> str:
    """Run an application until `should_stop()` or a failure; return it, or empty.

    `worker` is the thread that it uses; it is closed. Running requests have `shutdown_seconds`.
    """
    # uvicorn declares some times as whole seconds, and rejects at the limit, not above it.
    idle_seconds: Any = config.idle_seconds
    shutdown_seconds: Any = config.shutdown_seconds
    server = _Server(
        uvicorn.Config(
            app,
            http="h11",
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="critical",  # clients could fill the disk with a warning per bad request
            access_log=False,
            limit_concurrency=config.max_connections + 1,
            h11_max_incomplete_event_size=MAX_HEADER_BYTES,
            timeout_keep_alive=idle_seconds,
            timeout_graceful_shutdown=shutdown_seconds,
        )
    )
    try:
        listening = bind(config)
        serving = asyncio.create_task(server.serve(sockets=[listening]))
        ready(listening.getsockname()[1])
        while not should_stop() and not worker.failure:
            await asyncio.sleep(POLL_SECONDS)
        server.should_exit = True
        await serving
    finally:
        await asyncio.to_thread(worker.close)  # its thread writes to the event loop
    return worker.failure
