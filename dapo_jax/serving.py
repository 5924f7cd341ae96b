"""JetStream's gRPC protocol: what is wrong is refused, text is put together.

JetStream's own orchestrator checks nothing, cuts what is too long, decodes tokens one by one though
characters span several, and leaves clients waiting where one of its threads dies.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc
from jetstream.core.proto import jetstream_pb2_grpc

# The classes of a .proto are made when its module is imported.
from jetstream.core.proto.jetstream_pb2 import (
    DecodeRequest,  # pyright: ignore[reportAttributeAccessIssue]
    DecodeResponse,  # pyright: ignore[reportAttributeAccessIssue]
    HealthCheckRequest,  # pyright: ignore[reportAttributeAccessIssue]
    HealthCheckResponse,  # pyright: ignore[reportAttributeAccessIssue]
)

from dapo_jax.experiment.settings import require
from dapo_jax.generation import Asked, Busy, GenerationFailed, Generator, Limits
from dapo_jax.prompts.tokenizer import TextStream, Tokenizer
from dapo_jax.sampler.sampling import SamplingRule
from dapo_jax.sampler.served import Draws


def _response(text: str = "", ids: Sequence[int] = ()) -> DecodeResponse:
    response = DecodeResponse()
    response.stream_content.samples.add(text=text, token_ids=ids)
    return response


class Servicer(jetstream_pb2_grpc.OrchestratorServicer):
    """JetStream's two calls, Decode and HealthCheck.

    Args:
        tokenizer: of the model folder.
        limits: what a request may ask for.
        rule: how responses are drawn; requests of this protocol can't say.
    """

    def __init__(
        self, generator: Generator, tokenizer: Tokenizer, *, limits: Limits, rule: SamplingRule
    ):
        self._generator, self._tokenizer = generator, tokenizer
        self._limits, self._rule = limits, rule

    def _read(self, request: DecodeRequest) -> tuple[list[int], str]:
        """Ids of the prompt, and what is wrong: field, value, what is allowed. Empty: nothing."""
        content = request.WhichOneof("content")
        if problem := self._limits.budget_problem("max_tokens", request.max_tokens):
            return [], problem
        if request.session_cache:
            return [], f"session_cache = {request.session_cache!r}: must be empty; none is kept"
        if content is None:
            return [], "content is missing: must be text_content or token_content"
        if content == "text_content":
            field = "text_content.text"
            ids = self._tokenizer.encode_prompt(request.text_content.text)
        else:
            field, ids = "token_content.token_ids", list(request.token_content.token_ids)
        return ids, self._limits.ids_problem(field, ids)

    async def Decode(
        self, request: DecodeRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[DecodeResponse]:
        """Streams a response: text and token ids where text was sent, ids where ids were."""
        ids, problem = await asyncio.to_thread(self._read, request)
        if problem:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, problem)
        try:
            responses = self._generator.submit([Asked(ids, request.max_tokens, Draws(self._rule))])
        except Busy:
            full = "as many requests wait as may wait; this one may be tried again"
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, full)
        except GenerationFailed as error:
            await context.abort(grpc.StatusCode.UNAVAILABLE, str(error))
        text, wants_text = TextStream(self._tokenizer), request.HasField("text_content")
        try:
            async for drawn in responses:
                if drawn.ids:
                    yield _response(text.add(drawn.ids) if wants_text else "", drawn.ids)
        except GenerationFailed as error:
            await context.abort(grpc.StatusCode.INTERNAL, str(error))
        if rest := text.rest():
            yield _response(rest)

    async def HealthCheck(
        self, request: HealthCheckRequest, context: grpc.aio.ServicerContext
    ) -> HealthCheckResponse:
        """Whether requests are answered."""
        return HealthCheckResponse(is_live=not self._generator.failure)


async def start_grpc(servicer: Servicer, address: str) -> tuple[Any, int]:
    """A gRPC server that answers, and its port.

    Raises `ConfigError` where the address can't be listened on.
    """
    # Without the option a second server would quietly take part of the first one's requests.
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    jetstream_pb2_grpc.add_OrchestratorServicer_to_server(servicer, server)
    try:
        port = server.add_insecure_port(address)
    except RuntimeError:
        port = 0
    require(port != 0, "host and port", address, "an address of this machine that is free")
    await server.start()
    return server, port
