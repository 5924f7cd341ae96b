"""Serves a model folder over gRPC, by JetStream's protocol: streamed responses, many at a time.

    python -m dapo_jax.serve --model=FOLDER --port=9000

JetStream's own Driver and LLMOrchestrator run over the engine that also samples while training.
SIGTERM and Ctrl-C let running requests end and exit 0. Short flags:
"""

import asyncio
import contextlib
import logging
import socket
import sys
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from dapo_jax import cli
from dapo_jax.experiment.config import Compute, Sampler, ServeConfig
from dapo_jax.experiment.settings import ConfigError, leaves, require
from dapo_jax.signals import Signals

SHORT_NAMES = {name: name for name, _, _ in leaves(ServeConfig()) if "." not in name}
JETSTREAM_PREFILL_LENGTHS = [2**i for i in range(4, 16)]  # it knows no other ones


class ServingFailed(RuntimeError):
    """A thread of JetStream ended while it was needed."""


def import_jetstream() -> SimpleNamespace:
    """JetStream's serving modules, made to run on today's JAX and inside a program of others."""
    import jax

    jax.tree_map = jax.tree.map  # gone from JAX since 0.4.26, and called after every insert
    from jetstream.core import orchestrator
    from jetstream.core.metrics.prometheus import JetstreamMetricsCollector
    from jetstream.core.proto import jetstream_pb2_grpc

    # Its threads would end the process by SIGKILL; ours sees that one ended, and says so.
    orchestrator.JetThread = threading.Thread
    # It logs every decode step of every process that imports it to standard output.
    logging.getLogger().removeHandler(orchestrator.handler)
    logging.getLogger().setLevel(logging.WARNING)
    return SimpleNamespace(
        Driver=orchestrator.Driver,
        LLMOrchestrator=orchestrator.LLMOrchestrator,
        MetricsCollector=JetstreamMetricsCollector,
        register=jetstream_pb2_grpc.add_OrchestratorServicer_to_server,
    )


def open_engine(config: ServeConfig) -> tuple[Any, Any, Any]:
    """The engine, its parameters and the tokenizer. Raises `ConfigError` at the door."""
    from dapo_jax.assembly import check_divisible, numerics
    from dapo_jax.model import huggingface
    from dapo_jax.prompts.tokenizer import Tokenizer
    from dapo_jax.sampler.engine import PolicyEngine
    from dapo_jax.sampler.sampling import SamplingRule
    from dapo_jax.sharding import make_mesh

    sizes = config.mesh.data, config.mesh.fsdp, config.mesh.tensor
    mesh = make_mesh(*sizes, decode_tensor=config.mesh.decode_tensor)
    compute = Compute(dtype=config.dtype)
    decoder = huggingface.read_config(config.model, field="model", **numerics(compute, mesh))
    check_divisible(decoder, mesh)
    tokenizer = Tokenizer.from_folder(config.model, "model")
    tokenizer.check_fits(decoder.vocab, "model", config.model)
    # One of JetStream's lengths, with room for the token that it puts before a client's ids.
    longest = min(n for n in JETSTREAM_PREFILL_LENGTHS if n > config.max_prompt_tokens)
    engine = PolicyEngine(
        decoder,
        mesh,
        slots=config.slots,
        burst_tokens=1,  # of several, JetStream drops those beside the one that ends a response
        max_prompt_tokens=longest,
        max_response_tokens=config.max_response_tokens,
        first_window_tokens=longest + config.max_response_tokens,
        insert_width=1,
        tokenizer=tokenizer,
        seed=config.seed,
        settings=Sampler(cache=config.cache, weights_dtype=config.weights_dtype),
    )
    engine.rule = SamplingRule(config.temperature, config.top_p, config.top_k)
    params = huggingface.load_params(config.model, decoder, mesh, field="model", cast=True)
    return engine, engine.load_params(params), tokenizer


def warm_up(engine: Any, params: Any) -> None:
    """Compiles every length of a prompt, so that no request waits for that."""
    import jax
    import numpy as np

    state = engine.init_decode_state()
    for length in JETSTREAM_PREFILL_LENGTHS:
        if length <= engine.max_prefill_length:
            padded = np.zeros(length, np.int32)
            key = jax.random.key(0)
            prefix = engine.prefill(params=params, padded_tokens=padded, true_length=1, key=key)
            state = engine.insert(prefix, state, slot=0)
    jax.block_until_ready(engine.generate(params, state))


@contextlib.contextmanager
def metrics_server(config: ServeConfig):
    """An HTTP server of JetStream's Prometheus metrics, where the config asks for one."""
    if not config.metrics_port:
        yield
        return
    from prometheus_client import start_http_server

    try:
        server, thread = start_http_server(config.metrics_port, addr=config.host)
    except OSError:
        server = None
    require(server is not None, "metrics_port", config.metrics_port, "a port that is free")
    try:
        yield
    finally:
        server.shutdown()
        thread.join()


@contextlib.contextmanager
def running_driver(config: ServeConfig, engine: Any, params: Any, jetstream: SimpleNamespace):
    """JetStream's threads over the engine, which prefills and generates."""
    driver = jetstream.Driver(
        prefill_engines=[engine],
        generate_engines=[engine],
        prefill_params=[params],
        generate_params=[params],
        interleaved_mode=True,
        jax_padding=False,
        metrics_collector=jetstream.MetricsCollector() if config.metrics_port else None,
    )
    # JetStream answers RESOURCE_EXHAUSTED where this queue is full; its own is endless.
    backlog, place = driver._prefill_backlog, driver.place_request_on_prefill_queue
    backlog.maxsize = config.waiting

    def forget(request: Any) -> None:
        # JetStream serves clients that are gone, too: without a budget the slot is freed, and
        # what still waits must not keep others out.
        request.max_tokens = 0
        with backlog.mutex:
            waiting = [other for other in backlog.queue if other is not request]
            backlog.queue.clear()
            backlog.queue.extend(waiting)

    def place_until_the_call_ends(request: Any) -> None:
        place(request)
        asyncio.current_task().add_done_callback(lambda _: forget(request))

    driver.place_request_on_prefill_queue = place_until_the_call_ends
    try:
        yield driver
    finally:
        driver.stop()


async def answer(
    config: ServeConfig,
    driver: Any,
    tokenizer: Any,
    jetstream: SimpleNamespace,
    *,
    leave: Callable[[], bool],
    ready: Callable[[int], None],
) -> str:
    """Answers requests until `leave()`; returns what has failed, or an empty string.

    Args:
        ready: is told the port once requests are answered.
    """
    from dapo_jax.serving import Servicer, run_server

    def failure() -> str:
        ended = [thread.name for thread in driver._all_threads if not thread.is_alive()]
        return f"JetStream's thread {ended[0]} has failed" if ended else ""

    servicer = Servicer(
        jetstream.LLMOrchestrator(driver),
        tokenizer,
        max_prompt_tokens=config.max_prompt_tokens,
        max_response_tokens=config.max_response_tokens,
    )
    broken = await run_server(
        servicer,
        jetstream.register,
        f"{config.host}:{config.port}",
        failure=failure,
        leave=leave,
        ready=ready,
        shutdown_seconds=config.shutdown_seconds,
    )
    await asyncio.to_thread(driver.stop)  # while the loop that it answers into still runs
    return broken


def check_address(config: ServeConfig) -> None:
    """Raises `ConfigError` where nothing can listen there; found before a model is loaded."""
    host = config.host.strip("[]")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for field in ("port", "metrics_port"):
        port = getattr(config, field)
        try:
            socket.create_server((host, port), family=family).close()
        except OSError as error:
            raise ConfigError(f"config.{field} = {port}: on {config.host}: {error}") from None


def serve(config: ServeConfig, *, leave: Callable[[], bool], ready: Callable[[int], None]) -> None:
    """Serves until `leave()`. Raises `ServingFailed` where a thread of JetStream ended.

    Args:
        ready: is told the port once requests are answered.
    """
    check_address(config)
    engine, params, tokenizer = open_engine(config)
    warm_up(engine, params)
    jetstream = import_jetstream()  # after the engine, which keeps TensorFlow quiet
    with (
        metrics_server(config),
        running_driver(config, engine, params, jetstream) as driver,
    ):
        broken = asyncio.run(answer(config, driver, tokenizer, jetstream, leave=leave, ready=ready))
    if broken:
        raise ServingFailed(broken)


def main() -> int:
    """The exit code: 0 stopped by a signal; 1 a thread failed; 2 wrong settings."""
    config, started = cli.load(ServeConfig, __doc__, SHORT_NAMES, needs_file=False), time.time()

    def ready(port: int) -> None:
        seconds = time.time() - started
        print(f"serving {config.model} on {config.host}:{port} ({seconds:.0f} s)", flush=True)

    try:
        with Signals() as signals:
            return cli.guarded(lambda: serve(config, leave=signals, ready=ready))
    except ServingFailed as error:
        print(f"stopped: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
