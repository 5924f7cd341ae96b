"""Between gRPC and JetStream's orchestrator: what is wrong is refused, text is put together.

JetStream checks nothing, cuts what is too long, decodes tokens one by one though characters span
several, and leaves clients waiting where one of its threads dies. None of that reaches a client.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc

from dapo_jax.experiment.settings import require
from dapo_jax.prompts.tokenizer import TextStream, Tokenizer

CHECK_SECONDS = 0.1


class Servicer:
    """JetStream's two calls, Decode and HealthCheck, for requests that it can answer.

    Args:
        orchestrator: JetStream's `LLMOrchestrator`.
        tokenizer: of the model folder.
        max_prompt_tokens, max_response_tokens: what a request may ask for.
    """

    def __init__(
        self,
        orchestrator: Any,
        tokenizer: Tokenizer,
        *,
        max_prompt_tokens: int,
        max_response_tokens: int,
    ):
        self._orchestrator, self._tokenizer = orchestrator, tokenizer
        self._max_prompt_tokens = max_prompt_tokens
        self._max_response_tokens = max_response_tokens
        self._calls: set[asyncio.Task] = set()
        self._failure = ""

    def problem(self, request: Any) -> str:
        """What is wrong with a DecodeRequest: field, value, what is allowed. Empty: nothing."""
        limit, content = self._max_response_tokens, request.WhichOneof("content")
        if not 0 < request.max_tokens <= limit:
            return f"max_tokens = {request.max_tokens}: must be from 1 to {limit}"
        if request.session_cache:
            return f"session_cache = {request.session_cache!r}: must be empty; none is kept"
        if content is None:
            return "content is missing: must be text_content or token_content"
        if content == "text_content":
            field = "text_content.text"
            ids = self._tokenizer.encode_prompt(request.text_content.text)
        else:
            field, ids = "token_content.token_ids", request.token_content.token_ids
        if not 0 < len(ids) <= self._max_prompt_tokens:
            allowed = f"must have from 1 to {self._max_prompt_tokens}"
            return f"{field} has {len(ids)} tokens: {allowed}"
        last = self._tokenizer.backend.get_vocab_size() - 1
        for place, token in enumerate(ids):
            if not 0 <= token <= last:
                return f"{field}[{place}] = {token}: must be from 0 to {last}"
        return ""

    async def Decode(self, request: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
        """Streams a response: text and token ids where text was sent, ids where ids were."""
        if self._failure:
            await context.abort(grpc.StatusCode.UNAVAILABLE, self._failure)
        if problem := self.problem(request):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, problem)
        call = asyncio.current_task()
        self._calls.add(call)
        try:
            async for response in self._stream(request, context):
                yield response
        except asyncio.CancelledError:
            if self._failure:
                await context.abort(grpc.StatusCode.INTERNAL, self._failure)
            raise
        finally:
            self._calls.discard(call)

    async def _stream(self, request: Any, context: Any) -> AsyncIterator[Any]:
        text, kind = TextStream(self._tokenizer), None
        async for response in self._orchestrator.Decode(request, context):
            (sample,) = response.stream_content.samples
            kind = type(response)
            if request.HasField("text_content"):
                sample.text = text.add(list(sample.token_ids))
            yield response
        if kind and (rest := text.rest()):
            last = kind()
            last.stream_content.samples.add(text=rest)
            yield last

    async def HealthCheck(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        """Whether requests are answered."""
        response = await self._orchestrator.HealthCheck(request, context)
        response.is_live = response.is_live and not self._failure
        return response

    def fail(self, failure: str) -> None:
        """Ends every running call with INTERNAL and `failure`, and refuses new ones."""
        self._failure = failure
        for call in self._calls:
            call.cancel()


async def run_server(
    servicer: Servicer,
    register: Callable[[Any, Any], None],
    address: str,
    *,
    failure: Callable[[], str],
    leave: Callable[[], bool],
    ready: Callable[[int], None],
    shutdown_seconds: float,
) -> str:
    """Serves until `leave()` or `failure()`, lets running calls end, and returns the failure.

    Args:
        register: puts the servicer into a gRPC server (a function that protoc generates).
        failure: what has broken; empty while nothing has.
        ready: is told the port.
        shutdown_seconds: what running calls are given to end; then they are cancelled.

    Raises `ConfigError` where the address can't be listened on.
    """
    # Without the option a second server would quietly take part of the first one's requests.
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    register(servicer, server)
    try:
        port = server.add_insecure_port(address)
    except RuntimeError:
        port = 0
    require(port != 0, "host and port", address, "an address of this machine that is free")
    await server.start()
    ready(port)
    while not leave() and not failure():
        await asyncio.sleep(CHECK_SECONDS)
    if broken := failure():
        servicer.fail(broken)
    await server.stop(shutdown_seconds)
    return broken
