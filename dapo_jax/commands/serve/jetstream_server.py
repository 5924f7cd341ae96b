"""JetStream's side of the server: the driver that runs the engine, and the gRPC API.

The driver is JetStream's, with a different decode loop and `stop` because of these bugs:
- JetStream's loop looks for a free slot, then for a request, then asserts that a slot is occupied.
  If the last response ends in between, the assertion ends the thread.
- JetStream's loop stops decoding for up to a second if a request that it waits for is cancelled.
- JetStream's `stop` removes the queue items that wake its threads, so it can hang.

The gRPC API is served here because JetStream's orchestrator checks no request, cuts long prompts,
decodes characters of several tokens incorrectly, and hangs if a thread fails.
"""

import asyncio
import contextlib
import dataclasses
import logging
import queue
import reprlib
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import grpc
import jax
import numpy as np
from google.protobuf.message import DecodeError
from google.protobuf.unknown_fields import UnknownFieldSet
from jetstream.core import orchestrator
from jetstream.core.metrics.prometheus import JetstreamMetricsCollector

# The module makes the classes of its .proto when it is imported.
from jetstream.core.proto.jetstream_pb2 import (
    DESCRIPTOR,
    DecodeRequest,  # pyright: ignore[reportAttributeAccessIssue]
    DecodeResponse,  # pyright: ignore[reportAttributeAccessIssue]
    HealthCheckResponse,  # pyright: ignore[reportAttributeAccessIssue]
)

from dapo_jax.commands.serve.access import Access, RequestError
from dapo_jax.commands.serve.engine import PromptWithSampling, ResponseSampling
from dapo_jax.commands.serve.generator import (
    GenerationFailed,
    Generator,
    QueueFull,
    ResponseRequest,
)
from dapo_jax.commands.serve.requests import ServedModel
from dapo_jax.config.experiment import ServeConfig
from dapo_jax.data.prompts.tokenizer import TextStream
from dapo_jax.runtime.settings import require

# JAX removed jax.tree_map in 0.4.26; JetStream calls it after every insert.
jax.tree_map = jax.tree.map  # pyright: ignore[reportAttributeAccessIssue]: the name is free
# A failing JetThread kills the process by SIGKILL; `Driver.ended_threads` reports it instead.
orchestrator.JetThread = threading.Thread
# Importing JetStream makes the process log every decode step to standard output.
logging.getLogger().removeHandler(orchestrator.handler)
logging.getLogger().setLevel(logging.WARNING)

PREFILL_WAIT_SECONDS = 0.02  # the longest that slots wait for a prefill before they decode
HANDSHAKE_MS = 5_000
IDLE_MS = 60_000
WRONG_KEY = "the key is missing or wrong: send the metadata authorization: Bearer KEY"
METADATA_FIELD = 7  # of newer clients; it has no effect


class _ReturnChannel:
    """Return channel of a request, as JetStream's threads use it."""

    def __init__(self, put: Callable[[list[int], bool], object]):
        self._put = put

    def add_result(self, samples: list[Any]) -> None:
        if samples[0].token_ids:
            self._put(samples[0].token_ids, False)

    def close(self) -> None:
        self._put([], True)


@dataclasses.dataclass
class DriverRequest(orchestrator.ActiveRequest):
    """JetStream's request, with a sampling rule and seed."""

    return_channel: Any
    sampling: ResponseSampling = dataclasses.field(kw_only=True)


class Driver(orchestrator.Driver):
    """Threads that prefill and decode `DriverRequest`s with one `ServedEngine`."""

    def __init__(self, engine: Any, params: Any, *, metrics: bool):
        super().__init__(
            prefill_engines=[engine],
            generate_engines=[engine],
            prefill_params=[params],
            generate_params=[params],
            interleaved_mode=True,
            jax_padding=False,
            metrics_collector=JetstreamMetricsCollector() if metrics else None,
        )

    def new_request(
        self, request: ResponseRequest, put: Callable[[list[int], bool], object]
    ) -> DriverRequest:
        """Return a request that reports new tokens and its end by `put(ids, ended)`."""
        return DriverRequest(
            max_tokens=request.budget,
            return_channel=_ReturnChannel(put),
            prefill_content=list(request.ids),
            is_client_side_tokenization=True,  # JetStream only handles ids
            sampling=request.sampling,
        )

    def place(self, request: DriverRequest) -> None:
        """Append a request to the prefill queue."""
        self.place_request_on_prefill_queue(request)

    @property
    def waiting(self) -> int:
        """Number of requests in the prefill queue."""
        return self._prefill_backlog.qsize()

    @property
    def busy(self) -> int:
        """Number of occupied slots."""
        return sum(free.maxsize - free.qsize() for free in self._generate_slots)

    def forget(self, request: DriverRequest) -> None:
        """Cancel a request: free its slot, or remove it from the prefill queue."""
        request.max_tokens = 0  # JetStream ends a response without a budget
        backlog = self._prefill_backlog
        with backlog.mutex:
            others = [other for other in backlog.queue if other is not request]
            backlog.queue.clear()
            backlog.queue.extend(others)

    def ended_threads(self) -> list[str]:
        """Return the names of the threads that failed or were stopped."""
        return [thread.name for thread in self._all_threads if not thread.is_alive()]

    def stop(self) -> None:
        """End the threads and drop running requests."""
        self.live = False
        backlogs: list[Any] = [
            self._prefill_backlog,
            *self._transfer_backlogs,
            *self._generate_backlogs.values(),
            *self._detokenize_backlogs,
        ]
        for thread in self._all_threads:
            while thread.is_alive():  # it waits for an item, or for space in a full queue
                for backlog in backlogs:
                    with contextlib.suppress(queue.Empty):
                        backlog.get_nowait()
                    with contextlib.suppress(queue.Full):
                        backlog.put_nowait(None)
                thread.join(PREFILL_WAIT_SECONDS)

    def _process_prefill_content(
        self, request: DriverRequest, *args: Any
    ) -> tuple[PromptWithSampling, int]:
        tokens, length = super()._process_prefill_content(request, *args)
        return PromptWithSampling(tokens, request.sampling), length

    def _generate_thread(self, idx: int) -> None:
        engine: Any = self._generate_engines[idx]  # a `ServedEngine`
        params = self._generate_params[idx]
        free = self._generate_slots[idx]
        ready = self._generate_backlogs[idx]
        results: Any = self._detokenize_backlogs[idx]  # its declared type omits the requests
        if self._metrics_collector:
            metric = self._metrics_collector.get_slots_available_percentage_metric(idx)
            metric.set_function(lambda: free.qsize() / engine.max_concurrent_decodes)
        state = engine.init_decode_state()
        step = 0
        lengths = np.zeros(engine.max_concurrent_decodes, np.int64)  # cached tokens per slot
        while self.live:
            # Slots may become free from here on; the step below then decodes for no client.
            if not free.empty():
                is_idle = free.full()
                is_prefilling = not (
                    self._prefill_backlog.empty() and self._transfer_backlogs[idx].empty()
                )
                try:
                    timeout = None if is_idle else PREFILL_WAIT_SECONDS
                    request = ready.get(is_idle or is_prefilling, timeout)
                except queue.Empty:
                    if is_prefilling:
                        continue
                else:
                    if request is None:  # from `stop`
                        return
                    if is_idle:
                        state = engine.shrink(state)
                    slot = free.get_nowait()
                    lengths[slot] = len(request.prefill_content or ())
                    state = engine.insert(request.prefill_result, state, slot=slot)
                    orchestrator.delete_pytree(request.prefill_result)
                    request.complete = np.zeros(engine.samples_per_slot, np.bool_)
                    results.put((slot, request))
                    continue
            with free.mutex:
                lengths[list(free.queue)] = 0
            engine.fullest = int(lengths.max())
            state, tokens = engine.generate(params, state)
            lengths += 1
            tokens.copy_to_host_async()
            results.put((step, tokens))
            step += 1


# --- gRPC -----------------------------------------------------------------------------------------


def _check_fields(request: DecodeRequest) -> None:
    """Raise `RequestError` for a field that is not served and has an effect."""
    if request.session_cache:
        raise RequestError(f"session_cache = {reprlib.repr(request.session_cache)}: must be empty")
    if request.priority:
        raise RequestError(f"priority = {request.priority}: must be 0")
    for field in UnknownFieldSet(request):  # such as num_samples of newer clients
        if field.field_number != METADATA_FIELD and field.data not in (0, 1, b""):
            value = reprlib.repr(field.data)
            raise RequestError(f"field {field.field_number} = {value}: is not served")


def _response(text: str = "", ids: Sequence[int] = ()) -> DecodeResponse:
    response = DecodeResponse()
    response.stream_content.samples.add(text=text, token_ids=ids)
    return response


class Servicer:
    """Handlers of JetStream's calls Decode and HealthCheck."""

    def __init__(self, generator: Generator, model: ServedModel, access: Access):
        self._generator = generator
        self._model = model
        self._access = access

    def _read(self, message: bytes) -> tuple[DecodeRequest, list[int]]:
        """Return a request and the ids of its prompt. Raise `RequestError` if it is wrong."""
        request = DecodeRequest()
        try:
            request.ParseFromString(message)
        except DecodeError:
            raise RequestError("the message is not a DecodeRequest") from None
        _check_fields(request)
        content = request.WhichOneof("content")
        if content == "text_content":
            ids = self._model.prompt_ids("text_content.text", request.text_content.text)
        elif content == "token_content":
            ids = list(request.token_content.token_ids)
            self._model.limits.check_ids("token_content.token_ids", ids)
        else:
            raise RequestError("content is missing: must be text_content or token_content")
        self._model.limits.check_budget("max_tokens", request.max_tokens, len(ids))
        return request, ids

    async def Decode(
        self, message: bytes, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[DecodeResponse]:
        """Stream a response: text and ids for a text prompt, only ids for a prompt of ids."""
        metadata = dict(context.invocation_metadata() or ())
        if not self._access.has_key(str(metadata.get("authorization", ""))):
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, WRONG_KEY)
        try:
            request, ids = await asyncio.to_thread(self._read, message)
            sampling = ResponseSampling(self._model.rule)
            wanted = ResponseRequest(ids, request.max_tokens, sampling)
            responses = self._generator.submit([wanted])
            text = TextStream(self._model.tokenizer)
            has_text = request.HasField("text_content")
            async for chunk in responses:
                if chunk.ids:
                    yield _response(text.add(chunk.ids) if has_text else "", chunk.ids)
            if rest := text.rest():
                yield _response(rest)
        except RequestError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        except QueueFull as error:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error))
        except GenerationFailed as error:
            await context.abort(grpc.StatusCode.INTERNAL, str(error))

    async def HealthCheck(self, _: bytes, context: grpc.aio.ServicerContext) -> HealthCheckResponse:
        """Report whether the generator's threads run."""
        return HealthCheckResponse(is_live=not self._generator.failure)


async def start_grpc(
    servicer: Servicer, config: ServeConfig, connections: int
) -> tuple[Callable[[], Awaitable[None]], int]:
    """Start a gRPC server; return a function that stops it, and its port.

    Raises:
        ConfigError: the address can't be listened on.
    """
    options = [
        # With so_reuseport a second server would silently take some of this one's requests.
        ("grpc.so_reuseport", 0),
        ("grpc.max_receive_message_length", int(config.max_body_mb * 1e6)),
        ("grpc.max_allowed_incoming_connections", connections),
        ("grpc.server_handshake_timeout_ms", HANDSHAKE_MS),
        ("grpc.max_connection_idle_ms", IDLE_MS),
        ("grpc.keepalive_time_ms", IDLE_MS),
    ]
    server = grpc.aio.server(options=options)
    # Messages arrive as bytes: gRPC would log a traceback for a message that it can't parse.
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
    address = f"{config.host}:{config.port}"
    try:
        port = server.add_insecure_port(address)
    except RuntimeError:
        port = 0
    require(port != 0, "host and port", address, "an address of this machine that is free")
    await server.start()

    async def stop() -> None:
        await server.stop(config.shutdown_seconds)

    return stop, port
