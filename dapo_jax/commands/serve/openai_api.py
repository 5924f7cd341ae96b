"""HTTP server of OpenAI's protocol: models, completions and chat completions."""

import asyncio
import contextlib
import functools
import json
import socket
import time
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from typing import Any, NamedTuple

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from dapo_jax.commands.serve.generator import (
    GenerationFailed,
    Generator,
    QueueFull,
    Responses,
    TokenChunk,
)
from dapo_jax.commands.serve.openai_requests import (
    BadRequest,
    CompletionRequest,
    ServedModel,
    read_request,
)
from dapo_jax.data.prompts.tokenizer import TextStream, Tokenizer, UntilStop

RETRY_SECONDS = 1
CLIENT_IS_GONE = 499


class AnswerFormat(NamedTuple):
    """Differences between the answers of completions and of chat completions.

    Attributes:
        path: path of the URL.
        prefix: prefix of an answer's id.
        whole, chunk: value of `object` in an answer, and in a chunk of a stream.
        message, piece: fields of a choice that hold its text, whole or in pieces.
        begin: fields of a choice in a chunk before its first text.
    """

    path: str
    prefix: str
    whole: str
    chunk: str
    message: Callable[[str], dict[str, Any]]
    piece: Callable[[str], dict[str, Any]]
    begin: dict[str, Any] | None


COMPLETIONS = AnswerFormat(
    "/v1/completions",
    "cmpl",
    "text_completion",
    "text_completion",
    message=lambda text: {"text": text},
    piece=lambda text: {"text": text},
    begin=None,
)
CHAT = AnswerFormat(
    "/v1/chat/completions",
    "chatcmpl",
    "chat.completion",
    "chat.completion.chunk",
    message=lambda text: {"message": {"role": "assistant", "content": text, "refusal": None}},
    piece=lambda text: {"delta": {"content": text} if text else {}},
    begin={"delta": {"role": "assistant", "content": ""}},
)


class _Choice:
    """Text of one response.

    Attributes:
        tokens: number of tokens.
        finish_reason: 'stop' or 'length', once the response has ended.
    """

    def __init__(self, tokenizer: Tokenizer, request: CompletionRequest):
        self._stream, self._until = TextStream(tokenizer), UntilStop(request.stop)
        self._budget, self.tokens = request.budget, 0
        self.finish_reason: str | None = None

    def add(self, chunk: TokenChunk) -> str:
        """Text that may be sent after these tokens."""
        self.tokens += len(chunk.ids)
        text = self._until.add(self._stream.add(chunk.ids))
        ended = chunk.ended or self.tokens == self._budget
        if ended:
            text += self._until.add(self._stream.rest(), last=True)
        if self._until.stopped or (ended and self.tokens < self._budget):
            self.finish_reason = "stop"
        elif ended:
            self.finish_reason = "length"
        return text


class _Answer:
    """Answer to a request, whole or as events, made from its responses."""

    def __init__(
        self,
        form: AnswerFormat,
        request: CompletionRequest,
        responses: Responses,
        model: ServedModel,
    ):
        self._form, self._request, self._responses = form, request, responses
        count = len(request.prompts) * request.n
        self._choices = [_Choice(model.tokenizer, request) for _ in range(count)]
        self._named = {
            "id": f"{form.prefix}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": model.name,
        }

    async def _texts(self) -> AsyncIterator[tuple[int, str]]:
        """Pieces of the choices' texts; the last piece of a choice comes with a finish_reason."""
        async for chunk in self._responses:
            choice = self._choices[chunk.response]
            text = choice.add(chunk)
            if choice.finish_reason:
                self._responses.cancel(chunk.response)
            if text or choice.finish_reason:
                yield chunk.response, text

    def _usage(self) -> dict[str, int]:
        prompt = sum(map(len, self._request.prompts))
        completion = sum(choice.tokens for choice in self._choices)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
        }

    def _choice(self, index: int, fields: dict[str, Any], reason: str | None) -> dict[str, Any]:
        return {"index": index, **fields, "logprobs": None, "finish_reason": reason}

    async def whole(self) -> Response:
        """Whole answer, once every choice has ended."""
        texts = [""] * len(self._choices)
        async for index, text in self._texts():
            texts[index] += text
        choices = [
            self._choice(index, self._form.message(text), choice.finish_reason)
            for index, (text, choice) in enumerate(zip(texts, self._choices, strict=True))
        ]
        fields = {"object": self._form.whole, "choices": choices, "usage": self._usage()}
        return _json(self._named | fields)

    async def events(self) -> AsyncIterator[str]:
        """Server-sent events with the answer's chunks."""

        def chunk(choices: list[dict[str, Any]], **usage: Any) -> str:
            return _event(self._named | {"object": self._form.chunk, "choices": choices} | usage)

        usage = {"usage": None} if self._request.include_usage else {}
        try:
            if self._form.begin:
                for index in range(len(self._choices)):
                    yield chunk([self._choice(index, self._form.begin, None)], **usage)
            async for index, text in self._texts():
                reason = self._choices[index].finish_reason
                yield chunk([self._choice(index, self._form.piece(text), reason)], **usage)
            if usage:
                yield chunk([], usage=self._usage())
            yield "data: [DONE]\n\n"
        except GenerationFailed as error:
            yield _event(_error(str(error), "server_error"))


class HttpApi:
    """ASGI application of OpenAI's protocol.

    Args:
        most_bytes: largest size of a body; a longer one is refused unread.
    """

    def __init__(self, generator: Generator, model: ServedModel, most_bytes: int):
        self._generator, self._model, self._most_bytes = generator, model, most_bytes
        self._description = {
            "id": model.name,
            "object": "model",
            "created": int(time.time()),
            "owned_by": "dapo_jax",
        }
        answers = [
            Route(form.path, functools.partial(self._answer, form), methods=["POST"])
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
        self.app = Starlette(
            routes=[
                *answers,
                Route("/v1/models", self._models),
                Route("/v1/models/{name:path}", self._one_model),
                Route("/health", self._health),
            ],
            exception_handlers=handlers,
        )
        self.app.router.redirect_slashes = False  # OpenAI's protocol has no redirects

    async def _models(self, _: HttpRequest) -> Response:
        return _json({"object": "list", "data": [self._description]})

    async def _one_model(self, http: HttpRequest) -> Response:
        if http.path_params["name"] != self._model.name:
            message = f"there is only the model {self._model.name!r}"
            raise BadRequest(message, "model", 404, "model_not_found")
        return _json(self._description)

    async def _health(self, _: HttpRequest) -> Response:
        if self._generator.failure:
            return _json({"status": self._generator.failure}, 503)
        return _json({"status": "ok"})

    async def _answer(self, form: AnswerFormat, http: HttpRequest) -> Response:
        body, chat = await self._body(http), form is CHAT
        # In a thread: a large text would delay the tokens of other clients.
        request = await asyncio.to_thread(read_request, body, self._model, chat=chat)
        responses = self._generator.submit(request.responses())
        answer = _Answer(form, request, responses, self._model)
        if not request.stream:
            return await _unless_gone(http, answer.whole())
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        return StreamingResponse(answer.events(), media_type="text/event-stream", headers=headers)

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


def _error(message: str, kind: str, param: str | None = None, code: str | None = None) -> dict:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def _json(
    fields: dict[str, Any], status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    # Escaped to ASCII: an error may quote a client's text, which may be invalid Unicode.
    return Response(json.dumps(fields), status, headers, "application/json")


def _event(fields: dict[str, Any]) -> str:
    return f"data: {json.dumps(fields)}\n\n"


def _too_large(limit: int) -> BadRequest:
    return BadRequest(f"the body is too large: at most {limit} bytes are read", status=413)


async def _refused(_: HttpRequest, error: BadRequest) -> Response:
    fields = _error(str(error), "invalid_request_error", error.param, error.code)
    return _json(fields, error.status)


async def _queue_full(_: HttpRequest, error: QueueFull) -> Response:
    message = "as many requests wait as may wait; this one may be tried again"
    fields = _error(message, "rate_limit_error", code="rate_limit_exceeded")
    return _json(fields, 429, {"Retry-After": str(RETRY_SECONDS)})


async def _client_is_gone(*_: Any) -> Response:
    return Response(status_code=CLIENT_IS_GONE)  # nobody reads it


async def _failed(_: HttpRequest, error: Exception) -> Response:
    known = isinstance(error, GenerationFailed)
    return _json(_error(str(error) if known else "the server has failed", "server_error"), 500)


async def _no_such_page(http: HttpRequest, error: HTTPException) -> Response:
    message = f"{http.method} {http.url.path}: {error.detail}"
    return _json(_error(message, "invalid_request_error"), error.status_code, error.headers)


# --- the web server -------------------------------------------------------------------------------


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leaves signals to the command."""
        yield


class HttpServer:
    """HTTP server on a bound socket, which runs until `stop`."""

    def __init__(self, api: HttpApi, listening: socket.socket, shutdown_seconds: float):
        self._server = _Server(
            uvicorn.Config(
                api.app,
                http="h11",
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                timeout_graceful_shutdown=shutdown_seconds,  # pyright: ignore[reportArgumentType]: declared as whole seconds
            )
        )
        self._running = asyncio.create_task(self._server.serve(sockets=[listening]))

    async def stop(self) -> None:
        """Stops the server; requests still running after `shutdown_seconds` are cancelled."""
        self._server.should_exit = True
        await self._running
