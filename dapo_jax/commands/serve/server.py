"""Serves a model folder: OpenAI's protocol over HTTP, JetStream's over gRPC.

    dapo-jax serve --model=FOLDER --http_port=8000 --port=9000

The engine is the one that samples in training. SIGTERM and Ctrl-C let running requests end, and
the exit code is 0. Short flags:
"""

import asyncio
import contextlib
import os
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

from dapo_jax.commands import checks, command_line
from dapo_jax.config.experiment import Compute, Sampler, ServeConfig
from dapo_jax.runtime import processes
from dapo_jax.runtime.settings import ConfigError, leaves
from dapo_jax.runtime.signals import Signals

SHORT_NAMES = {name: name for name, _, _ in leaves(ServeConfig()) if "." not in name}
CHECK_SECONDS = 0.1
JETSTREAM_PREFILL_LENGTHS = [2**i for i in range(4, 16)]  # JetStream supports no others


class ServingFailed(RuntimeError):
    """Failure of one of JetStream's threads."""


def rule_of(config: ServeConfig) -> Any:
    """Sampling rule of requests that have none."""
    from dapo_jax.rollout.sampling import SamplingRule

    return SamplingRule(config.temperature, config.top_p, config.top_k)


def load_served(config: ServeConfig) -> tuple[Any, Any, Any]:
    """Engine, decoding weights and tokenizer of a model folder. Raises `ConfigError`."""
    from dapo_jax.commands.serve.engine import ServedEngine
    from dapo_jax.data.prompts.tokenizer import Tokenizer
    from dapo_jax.model import load_huggingface
    from dapo_jax.run.compute import check_divisible, numerics
    from dapo_jax.runtime.sharding import make_mesh

    sizes = config.mesh.data, config.mesh.fsdp, config.mesh.tensor
    mesh = make_mesh(*sizes, decode_tensor=config.mesh.decode_tensor)
    compute = Compute(dtype=config.dtype)
    decoder = load_huggingface.read_config(config.model, field="model", **numerics(compute, mesh))
    check_divisible(decoder, mesh)
    tokenizer = Tokenizer.from_folder(config.model, "model")
    tokenizer.check_fits(decoder.vocab, "model", config.model)
    if tokenizer.chat is not None:
        tokenizer.chat.check(f"config.model = {config.model!r}")
    # One of JetStream's lengths, with room for the token that it puts before a client's ids.
    longest = min(n for n in JETSTREAM_PREFILL_LENGTHS if n > config.max_prompt_tokens)
    settings = Sampler(
        slots=config.slots,
        burst_tokens=1,  # of several, JetStream drops those beside the one that ends a response
        max_response_tokens=config.max_response_tokens,
        first_window_tokens=longest + config.max_response_tokens,
        cache=config.cache,
        weights_dtype=config.weights_dtype,
    )
    check_slots_fit(config, settings, decoder, mesh, longest)
    engine = ServedEngine(
        decoder,
        mesh,
        settings,
        max_prompt_tokens=longest,
        tokenizer=tokenizer,
        seed=config.seed,
    )
    engine.rule = rule_of(config)
    params = load_huggingface.load_params(config.model, decoder, mesh, field="model", cast=True)
    return engine, engine.load_params(params), tokenizer


def check_slots_fit(
    config: ServeConfig, settings: Sampler, decoder: Any, mesh: Any, prompt_tokens: int
) -> None:
    """Raises `ConfigError` where the cache of all slots can't fit into the devices' memory."""
    from dapo_jax.run import memory

    response = config.max_response_tokens
    cache = memory.cache_bytes(decoder, settings, mesh, config.slots, prompt_tokens, response)
    needs = {"weights": memory.decoding_bytes(decoder, settings, mesh), "cache": cache}
    blamed = f"slots = {config.slots} with max_response_tokens = {response}"
    model = f"model = {config.model!r}"
    memory.check_fits("serving", needs, mesh, {"cache": blamed, "weights": model})


def warm_up(engine: Any, params: Any) -> None:
    """Compiles the programs for every length of a prompt, so that no request waits for them."""
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
    """HTTP server of JetStream's Prometheus metrics, if `metrics_port` is set."""
    if not config.metrics_port:
        yield
        return
    from prometheus_client import start_http_server

    try:
        server, thread = start_http_server(config.metrics_port, addr=config.host)
    except OSError:
        port = config.metrics_port
        raise ConfigError(f"config.metrics_port = {port}: must be a port that is free") from None
    try:
        yield
    finally:
        server.shutdown()
        thread.join()


def bind(config: ServeConfig, field: str) -> socket.socket:
    """Socket that listens on the port of setting `field`. Raises `ConfigError`."""
    port, host = getattr(config, field), config.host.strip("[]")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except socket.gaierror as error:
        raise ConfigError(f"config.host = {config.host!r}: {error}") from None
    except OSError as error:
        raise ConfigError(f"config.{field} = {port}: on {config.host}: {error}") from None


def served_name(config: ServeConfig) -> str:
    """Name of the model for clients."""
    return config.served_name or os.path.basename(os.path.abspath(config.model))


async def answer(
    config: ServeConfig,
    generator: Any,
    tokenizer: Any,
    *,
    leave: Callable[[], bool],
    ready: Callable[[int, int], None],
) -> str:
    """Answers requests until `leave()` is true; returns the generator's failure or "".

    Args:
        generator: a `Generator`.
        ready: called with the ports of gRPC and HTTP (0: none) once requests are answered.
    """
    from dapo_jax.commands.serve.generator import Limits
    from dapo_jax.commands.serve.grpc_api import Servicer, start_grpc
    from dapo_jax.commands.serve.openai_api import HttpApi, HttpServer
    from dapo_jax.commands.serve.openai_requests import ServedModel

    limits = Limits(
        prompt_tokens=config.max_prompt_tokens,
        prompt_bytes=config.max_prompt_tokens * tokenizer.longest_token,
        response_tokens=config.max_response_tokens,
        vocab=tokenizer.backend.get_vocab_size(),
        waiting=config.waiting,
    )
    rule, seconds = rule_of(config), config.shutdown_seconds
    servicer = Servicer(generator, tokenizer, limits=limits, rule=rule)
    most_bytes = int(config.max_body_mb * 1e6)
    grpc, port = await start_grpc(servicer, f"{config.host}:{config.port}", most_bytes)
    stops = [lambda: grpc.stop(seconds)]
    if config.http_port:
        model = ServedModel(served_name(config), tokenizer, limits, rule)
        api = HttpApi(generator, model, most_bytes)
        stops.append(HttpServer(api, bind(config, "http_port"), seconds).stop)
    ready(port, config.http_port)
    while not leave() and not generator.broken():
        await asyncio.sleep(CHECK_SECONDS)
    await asyncio.gather(*(stop() for stop in stops))
    await asyncio.to_thread(generator.close)  # before the event loop that it writes to ends
    return generator.failure


def serve(
    config: ServeConfig, *, leave: Callable[[], bool], ready: Callable[[int, int], None]
) -> None:
    """Serves until `leave()` is true.

    Args:
        ready: called with the ports of gRPC and HTTP (0: none) once requests are answered.

    Raises:
        ConfigError: a setting is wrong, or a port is taken.
        ServingFailed: one of JetStream's threads failed.
    """
    for field in ("port", "http_port", "metrics_port"):
        bind(config, field).close()  # a taken port is reported before a model is loaded
    engine, params, tokenizer = load_served(config)
    warm_up(engine, params)
    # Imported after the engine, which prepares the import of JetStream.
    from dapo_jax.commands.serve.generator import Generator

    with metrics_server(config):
        metrics = config.metrics_port > 0
        generator = Generator(engine, params, waiting=config.waiting, metrics=metrics)
        with contextlib.closing(generator):
            failure = asyncio.run(answer(config, generator, tokenizer, leave=leave, ready=ready))
    if failure:
        raise ServingFailed(failure)


def main() -> int:
    """Runs the command; exit code 0: stopped by a signal, 1: a thread failed, 2: wrong settings."""
    config = command_line.load(ServeConfig, __doc__, SHORT_NAMES, needs_file=False)
    started = time.time()

    def ready(port: int, http_port: int) -> None:
        http = f"HTTP on http://{config.host}:{http_port}/v1, " if http_port else ""
        seconds = time.time() - started
        name = served_name(config)
        print(f"serving {name}: {http}gRPC on {config.host}:{port} ({seconds:.0f} s)", flush=True)

    try:
        with processes.as_command(), Signals() as signals:
            return checks.guarded(lambda: serve(config, leave=signals, ready=ready))
    except ServingFailed as error:
        print(f"stopped: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
