"""gRPC server of JetStream's protocol, with checked requests and whole characters.

JetStream's own orchestrator checks no request, cuts long prompts, decodes tokens one by one though
characters span several, and leaves clients waiting where one of its threads dies.
"""

import asyncio
import reprlib
from collections.abc import AsyncIterator, Sequence
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

from dapo_jax.commands.serve.engine import Draws
from dapo_jax.commands.serve.generator import (
    GenerationFailed,
    Generator,
    Limits,
    QueueFull,
    ResponseRequest,
)
from dapo_jax.data.prompts.tokenizer import TextStream, Tokenizer
from dapo_jax.rollout.sampling import SamplingRule
from dapo_jax.runtime.settings import require

# Fields of JetStream's newer clients by number: name, and the values that ask for nothing (None:
# all values).
NEWER_FIELDS = {7: ("metadata", None), 8: ("num_samples", (0, 1)), 9: ("lora_adapter_id", (b"",))}


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
    """

    def __init__(
        self, generator: Generator, tokenizer: Tokenizer, *, limits: Limits, rule: SamplingRule
    ):
        self._generator, self._tokenizer = generator, tokenizer
        self._limits, self._rule = limits, rule

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
        return ids, self._limits.ids_problem(field, ids)

    async def Decode(
        self, message: bytes, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[DecodeResponse]:
        """Streams a response: text and token ids where text was sent, ids where ids were."""
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


async def start_grpc(servicer: Servicer, address: str, most_bytes: int) -> tuple[Any, int]:
    """Starts a gRPC server; returns the server and its port.

    Args:
        most_bytes: largest size of a message.

    Raises:
        ConfigError: the address can't be listened on.
    """
    # With so_reuseport a second server would quietly take part of this one's requests.
    options = [("grpc.so_reuseport", 0), ("grpc.max_receive_message_length", most_bytes)]
    server = grpc.aio.server(options=options)
    # Messages come as bytes: the library would log a traceback for one that it can't parse.
    handlers = {
        "Decode": grpc.unary_stream_rpc_method_handler(
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
