"""gRPC server of JetStream's protocol, with checked requests and whole characters.

JetStream's own orchestrator checks no request, cuts long prompts, decodes tokens one by one though
characters span several, and leaves clients waiting where one of its threads dies.
"""

import asyncio
import reprlib
from collections.abc import AsyncIterable, AsyncIterator, Sequence
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from google.protobuf.unknown_fields import UnknownFieldSet

# The module makes the classes of its .proto when it is imported.
from jetstream.core.proto.jetstream_pb2 import (
    DESCRIPTOR,
    DecodeRequest,  # pyright: ignore[reportAttributeAccessIssue]
    DecodeResponse,  # pyright: ignore[reportAttributeAccessIssue]
    HealthCheckResponse,  # pyright: ignore[reportAttributeAccessIssue]
)

from dapo_jax.commands.serve.access import Access
from dapo_jax.commands.serve.engine import Draws
from dapo_jax.commands.serve.generator import (
    GenerationFailed,
    Generator,
    Limits,
    QueueFull,
    ResponseRequest,
)
from dapo_jax.data.prompts.tokenizer import TextStream, Tokenizer
from dapo_jax.runtime.settings import require
from dapo_jax.structs import SamplingRule

# Fields of JetStream's newer clients by number: name, and the values that ask for nothing (None:
# all values).
NEWER_FIELDS = {7: ("metadata", None), 8: ("num_samples", (0, 1)), 9: ("lora_adapter_id", (b"",))}

HANDSHAKE_MS = 5_000  # for a connection to begin; stopping the server waits for it too
IDLE_MS = 60_000  # without a call; a client that comes back connects again by itself


def _response(text: str = "", ids: Sequence[int] = ()) -> DecodeResponse:
    response = DecodeResponse()
    response.stream_content.samples.add(text=text, token_ids=ids)
    return response


def _unserved(request: DecodeRequest) -> str:
    """Message against a field that is not served. Empty if there is none."""
    if request.session_cache:
        return f"session_cache = {reprlib.repr(request.session_cache)}: must be empty; none is kept"
    if request.priority:
        return f"priority = {request.priority}: must be 0; requests are served as they come"
    for field in UnknownFieldSet(request):
        name, served = NEWER_FIELDS.get(field.field_number, (f"field {field.field_number}", ()))
        if served is not None and field.data not in served:
            return f"{name} = {reprlib.repr(field.data)}: is not served"
    return ""


class Servicer:
    """Handlers of JetStream's two calls, Decode and HealthCheck.

    Args:
        rule: sampling rule of all responses; requests of this protocol have none.
        access: knows the key of clients.
        request_seconds: for a message to arrive whole.
    """

    def __init__(
        self,
        generator: Generator,
        tokenizer: Tokenizer,
        *,
        limits: Limits,
        rule: SamplingRule,
        access: Access,
        request_seconds: float,
    ):
        self._generator, self._tokenizer = generator, tokenizer
        self._limits, self._rule, self._access = limits, rule, access
        self._seconds, self._receiving = request_seconds, set[asyncio.Task]()
        self._leaving = False

    async def _receive(self, messages: AsyncIterable[bytes], context: Any) -> bytes:
        """First message of a call. The library itself would wait for it without end."""
        task = asyncio.current_task()
        assert task is not None  # each call has one
        self._receiving.add(task)
        try:
            async with asyncio.timeout(self._seconds):
                async for message in messages:
                    return message
        except TimeoutError:
            late = f"the message has not arrived within {self._seconds:g} s"
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, late)
        except asyncio.CancelledError:
            if not self._leaving:
                raise
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the server is leaving")
        finally:
            self._receiving.discard(task)
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "there is no message")
        raise AssertionError  # `abort` has raised

    def drop_unread(self) -> None:
        """Ends the calls whose message has not arrived: the server is leaving."""
        self._leaving = True
        for task in list(self._receiving):
            task.cancel()

    def _read(self, message: bytes) -> tuple[DecodeRequest, list[int], str]:
        """Request, ids of its prompt, and the message against it; empty if the request is fine."""
        request = DecodeRequest()
        try:
            request.ParseFromString(message)
        except DecodeError:
            return request, [], "the message is no DecodeRequest"
        return request, *self._read_prompt(request)

    def _read_prompt(self, request: DecodeRequest) -> tuple[list[int], str]:
        """Ids of the prompt, and the message against the request; empty if it is fine."""
        content = request.WhichOneof("content")
        if problem := _unserved(request):
            return [], problem
        if problem := self._limits.budget_problem("max_tokens", request.max_tokens):
            return [], problem
        if content is None:
            return [], "content is missing: must be text_content or token_content"
        if content == "text_content":
            field, text = "text_content.text", request.text_content.text
            if problem := self._limits.text_problem(field, text):
                return [], problem
            ids = self._tokenizer.encode_prompt(text)
        else:
            field, ids = "token_content.token_ids", list(request.token_content.token_ids)
        problem = self._limits.ids_problem(field, ids)
        return ids, problem or self._limits.context_problem("max_tokens", request.max_tokens, ids)

    async def Decode(
        self, messages: AsyncIterable[bytes], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[DecodeResponse]:
        """Streams a response: text and token ids where text was sent, ids where ids were."""
        sent = dict(context.invocation_metadata() or ()).get("authorization", "")
        if not self._access.has_key(str(sent)):
            message = "the key is missing or wrong: send the metadatum authorization: Bearer KEY"
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, message)
        message = await self._receive(messages, context)
        request, ids, problem = await asyncio.to_thread(self._read, message)
        if problem:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, problem)
        try:
            wanted = ResponseRequest(ids, request.max_tokens, Draws(self._rule))
            responses = self._generator.submit([wanted])
        except QueueFull:
            full = "as many requests wait as may wait; this one may be tried again"
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, full)
        except GenerationFailed as error:
            await context.abort(grpc.StatusCode.UNAVAILABLE, str(error))
        text, wants_text = TextStream(self._tokenizer), request.HasField("text_content")
        try:
            async for chunk in responses:
                if chunk.ids:
                    yield _response(text.add(chunk.ids) if wants_text else "", chunk.ids)
        except GenerationFailed as error:
            await context.abort(grpc.StatusCode.INTERNAL, str(error))
        if rest := text.rest():
            yield _response(rest)

    async def HealthCheck(self, _: bytes, context: grpc.aio.ServicerContext) -> HealthCheckResponse:
        """Answers `is_live`: False once a thread of the generator has failed."""
        return HealthCheckResponse(is_live=not self._generator.failure)


async def start_grpc(
    servicer: Servicer, address: str, most_bytes: int, connections: int
) -> tuple[Any, int]:
    """Starts a gRPC server; returns the server and its port.

    Args:
        most_bytes: largest size of a message.
        connections: number of connections held at once.

    Raises:
        ConfigError: the address can't be listened on.
    """
    options = [
        # With so_reuseport a second server would quietly take part of this one's requests.
        ("grpc.so_reuseport", 0),
        ("grpc.max_receive_message_length", most_bytes),
        ("grpc.max_allowed_incoming_connections", connections),
        ("grpc.server_handshake_timeout_ms", HANDSHAKE_MS),
        ("grpc.max_connection_idle_ms", IDLE_MS),
        ("grpc.keepalive_time_ms", IDLE_MS),
    ]
    server = grpc.aio.server(options=options)
    # Messages come as bytes: the library would log a traceback for one that it can't parse. As
    # one of a stream, since for the one of a unary call it waits without end.
    handlers = {
        "Decode": grpc.stream_stream_rpc_method_handler(
            servicer.Decode, response_serializer=DecodeResponse.SerializeToString
        ),
        "HealthCheck": grpc.unary_unary_rpc_method_handler(
            servicer.HealthCheck, response_serializer=HealthCheckResponse.SerializeToString
        ),
    }
    name = DESCRIPTOR.services_by_name["Orchestrator"].full_name
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(name, handlers),))
    try:
        port = server.add_insecure_port(address)
    except RuntimeError:
        port = 0
    require(port != 0, "host and port", address, "an address of this machine that is free")
    await server.start()
    return server, port
