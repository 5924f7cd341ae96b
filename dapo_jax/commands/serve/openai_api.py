"""HTTP server of OpenAI's protocol: models, completions and chat completions."""

import asyncio
import contextlib
import functools
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from dapo_jax.commands.serve.access import Access
from dapo_jax.commands.serve.generator import GenerationFailed, Generator, QueueFull
from dapo_jax.commands.serve.metrics import ServeMetrics
from dapo_jax.commands.serve.openai_answers import (
    CHAT,
    COMPLETIONS,
    Answer,
    AnswerFormat,
    error_fields,
    json_answer,
)
from dapo_jax.commands.serve.openai_requests import ServedModel, read_request
from dapo_jax.commands.serve.request_checks import BadRequest
from dapo_jax.commands.serve.scoring import Scorer

RETRY_SECONDS = 1
CLIENT_IS_GONE = 499


class HttpApi:
    """ASGI application of OpenAI's protocol.

    Args:
        access: checks requests before their bodies are read.
        most_bytes: largest size of a body; a longer one is refused unread.
    """

    def __init__(
        self,
        generator: Generator,
        scorer: Scorer,
        model: ServedModel,
        access: Access,
        most_bytes: int,
    ):
        self._generator, self._model, self._most_bytes = generator, model, most_bytes
        self._access, self._scorer, self._scored = access, scorer, 0
        self._description = {
            "id": model.name,
            "object": "model",
            "created": int(time.time()),
            "owned_by": "dapo_jax",
        }
        answers = [
            self._route(form.path, functools.partial(self._answer, form), method="POST")
            for form in (COMPLETIONS, CHAT)
        ]
        # Each handler gets errors of its own class only, which the library's type can't say.
        handlers: dict[Any, Any] = {
            BadRequest: _refused,
            QueueFull: _queue_full,
            GenerationFailed: _failed,
            HTTPException: _no_such_page,
            ClientDisconnect: _client_is_gone,
            Exception: _failed,
        }
        pages = [form.path for form in (COMPLETIONS, CHAT)] + ["/v1/models", "/metrics", "/health"]
        app = Starlette(
            routes=[
                *answers,
                self._route("/v1/models", self._models),
                self._route("/v1/models/{name:path}", self._one_model),
                self._route("/metrics", self._metrics_page),
                Route("/health", self._health),
            ],
            exception_handlers=handlers,
        )
        app.router.redirect_slashes = False  # OpenAI's protocol has no redirects
        self._metrics = ServeMetrics(generator)
        self.app = self._metrics.counted(app, set(pages))

    def _route(
        self,
        path: str,
        answer: Callable[[HttpRequest], Awaitable[Response]],
        method: str = "GET",
    ) -> Route:
        """Route whose requests are let in by `access`."""

        async def let_in(http: HttpRequest) -> Response:
            local, has_body = (http.scope.get("server") or ("", 0))[0], method == "POST"
            if refusal := self._access.refusal(http.headers, local=local, has_body=has_body):
                status, message, code = refusal
                raise BadRequest(message, status=status, code=code)
            return await answer(http)

        return Route(path, let_in, methods=[method])

    async def _models(self, _: HttpRequest) -> Response:
        return json_answer({"object": "list", "data": [self._description]})

    async def _one_model(self, http: HttpRequest) -> Response:
        if http.path_params["name"] != self._model.name:
            message = f"there is only the model {self._model.name!r}"
            raise BadRequest(message, "model", 404, "model_not_found")
        return json_answer(self._description)

    async def _metrics_page(self, _: HttpRequest) -> Response:
        page, kind = self._metrics.page()
        return Response(page, headers={"Content-Type": kind})

    async def _health(self, _: HttpRequest) -> Response:
        if self._generator.failure:
            return json_answer({"status": self._generator.failure}, 503)
        return json_answer({"status": "ok"})

    async def _answer(self, form: AnswerFormat, http: HttpRequest) -> Response:
        body, chat = await self._body(http), form is CHAT
        # In a thread: a large text would delay the tokens of other clients.
        request = await asyncio.to_thread(read_request, body, self._model, chat=chat)
        to_score = len(request.prompts) * request.n * (request.likeliest is not None)
        if self._scored + to_score > self._model.limits.waiting:
            raise QueueFull
        responses = self._generator.submit(request.responses())
        self._metrics.prompt_tokens.inc(sum(map(len, request.prompts)))
        drawn = self._metrics.response_tokens
        answer = Answer(form, request, responses, self._model, self._scorer, drawn.inc)
        if not request.stream:
            with self._scoring(to_score):
                return await _unless_gone(http, answer.whole())

        async def events() -> AsyncIterator[str]:
            with self._scoring(to_score):
                async for event in answer.events():
                    yield event

        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        return StreamingResponse(events(), media_type="text/event-stream", headers=headers)

    @contextlib.contextmanager
    def _scoring(self, sequences: int) -> Iterator[None]:
        self._scored += sequences
        try:
            yield
        finally:
            self._scored -= sequences

    async def _body(self, http: HttpRequest) -> bytes:
        body, limit = bytearray(), self._most_bytes
        announced = http.headers.get("content-length", "")
        if announced.isdecimal() and int(announced) > limit:
            raise _too_large(limit)
        async for part in http.stream():
            body += part
            if len(body) > limit:
                raise _too_large(limit)
        return bytes(body)


async def _unless_gone(http: HttpRequest, work: Coroutine[Any, Any, Response]) -> Response:
    """Response that `work` makes; `work` is cancelled when the client disconnects."""

    async def disconnect() -> None:
        while (await http.receive())["type"] != "http.disconnect":
            pass

    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(disconnect())
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else Response(status_code=CLIENT_IS_GONE)
    finally:
        working.cancel()
        leaving.cancel()


# --- errors, in OpenAI's form ---------------------------------------------------------------------


def _too_large(limit: int) -> BadRequest:
    return BadRequest(f"the body is too large: at most {limit} bytes are read", status=413)


async def _refused(_: HttpRequest, error: BadRequest) -> Response:
    fields = error_fields(str(error), "invalid_request_error", error.param, error.code)
    headers = {"WWW-Authenticate": "Bearer"} if error.status == 401 else None
    return json_answer(fields, error.status, headers)


async def _queue_full(_: HttpRequest, error: QueueFull) -> Response:
    message = "as many requests wait as may wait; this one may be tried again"
    fields = error_fields(message, "rate_limit_error", code="rate_limit_exceeded")
    return json_answer(fields, 429, {"Retry-After": str(RETRY_SECONDS)})


async def _client_is_gone(*_: Any) -> Response:
    return Response(status_code=CLIENT_IS_GONE)  # nobody reads it


async def _failed(_: HttpRequest, error: Exception) -> Response:
    known = isinstance(error, GenerationFailed)
    return json_answer(
        error_fields(str(error) if known else "the server has failed", "server_error"), 500
    )


async def _no_such_page(http: HttpRequest, error: HTTPException) -> Response:
    message = f"{http.method} {http.url.path}: {error.detail}"
    return json_answer(
        error_fields(message, "invalid_request_error"), error.status_code, error.headers
    )
