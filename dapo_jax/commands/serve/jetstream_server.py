"""gRPC API of the server: JetStream's calls Decode and HealthCheck.

JetStream's own orchestrator is not used: it checks no request, cuts long prompts, decodes
characters of several tokens incorrectly, and hangs if a thread fails.
"""

import asyncio
import functools
import reprlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
from google.protobuf.unknown_fields import UnknownFieldSet
from jetstream.core.proto import jetstream_pb2, jetstream_pb2_grpc

from dapo_jax.commands.serve.access import Access
from dapo_jax.commands.serve.errors import RequestError
from dapo_jax.commands.serve.generator import Generator, ResponseRequest, ResponseSampling
from dapo_jax.commands.serve.requests import ServedModel
from dapo_jax.config.experiment import ServeConfig
from dapo_jax.data.prompts.tokenizer import TextStream
from dapo_jax.runtime.settings import require

HANDSHAKE_MS = 5_000
IDLE_MS = 60_000
WRONG_KEY = "the key is missing or wrong: send the metadata authorization: Bearer KEY"
METADATA_FIELD = 7  # of newer clients; it has no effect
STATUS_CODES = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    500: grpc.StatusCode.INTERNAL,
}
messages: Any = jetstream_pb2  # its classes are made when it is imported


class Servicer(jetstream_pb2_grpc.OrchestratorServicer):
    """Handlers of JetStream's calls."""

    def __init__(self, generator: Generator, model: ServedModel, access: Access):
        self._generator = generator
        self._model = model
        self._access = access

    async def Decode(self, request: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
        """Stream a response: text and ids for a text prompt, only ids for a prompt of ids."""
        metadata = dict(context.invocation_metadata() or ())
        if not self._access.has_key(str(metadata.get("authorization", ""))):
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, WRONG_KEY)
        start = time.monotonic()
        try:
            ids = await asyncio.to_thread(self._prompt_ids, request)
            sampling = ResponseSampling(self._model.rule)
            wanted = ResponseRequest(ids, request.max_tokens, sampling)
            text = TextStream(self._model.tokenizer)
            tokens = 0
            async for chunk in self._generator.submit([wanted]):
                tokens += len(chunk.ids)
                response = messages.DecodeResponse()
                sample = response.stream_content.samples.add(token_ids=chunk.ids)
                if request.HasField("text_content"):
                    sample.text = text.add(chunk.ids) + (text.rest() if chunk.ended else "")
                if chunk.ids or sample.text:
                    yield response
            self._model.log("gRPC", len(ids), tokens, start)
        except RequestError as error:
            await context.abort(STATUS_CODES[error.status], str(error))

    async def HealthCheck(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        """Report whether the generator works."""
        return messages.HealthCheckResponse(is_live=not self._generator.failure)

    def _prompt_ids(self, request: Any) -> list[int]:
        """Return the ids of the prompt. Raise `RequestError` if a field is wrong or not served."""
        for field, value in request.ListFields():  # those that are not empty
            if field.name in ("session_cache", "priority"):
                raise RequestError(f"{field.name} = {reprlib.repr(value)}: is not served")
        for field in UnknownFieldSet(request):  # such as num_samples of newer clients
            if field.field_number != METADATA_FIELD and field.data not in (0, 1, b""):
                value = reprlib.repr(field.data)
                raise RequestError(f"field {field.field_number} = {value}: is not served")
        if request.HasField("text_content"):
            ids = self._model.prompt_ids("text_content.text", request.text_content.text)
        elif request.HasField("token_content"):
            tokens = list(request.token_content.token_ids)
            ids = self._model.prompt_ids("token_content.token_ids", tokens)
        else:
            raise RequestError("content is missing: must be text_content or token_content")
        self._model.budget("max_tokens", request.max_tokens, len(ids))
        return ids


async def start_grpc(
    servicer: Servicer, config: ServeConfig
) -> tuple[Callable[[], Awaitable[None]], int]:
    """Start a gRPC server; return a function that stops it, and its port."""
    options = [
        # With so_reuseport a second server would silently take some of this one's requests.
        ("grpc.so_reuseport", 0),
        ("grpc.max_receive_message_length", int(config.max_body_mb * 1e6)),
        ("grpc.max_allowed_incoming_connections", config.max_connections),
        ("grpc.server_handshake_timeout_ms", HANDSHAKE_MS),
        ("grpc.max_connection_idle_ms", IDLE_MS),
        ("grpc.keepalive_time_ms", IDLE_MS),
    ]
    server = grpc.aio.server(options=options)
    jetstream_pb2_grpc.add_OrchestratorServicer_to_server(servicer, server)
    address = f"{config.host}:{config.port}"
    try:
        port = server.add_insecure_port(address)
    except RuntimeError:
        port = 0
    require(port != 0, "host and port", address, "an address of this machine that is free")
    await server.start()
    return functools.partial(server.stop, config.shutdown_seconds), port
