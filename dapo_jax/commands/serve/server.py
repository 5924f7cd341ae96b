"""Serves a model folder: OpenAI's protocol over HTTP, JetStream's over gRPC.

    dapo-jax serve --model=FOLDER --http_port=8000 --port=9000

The engine is the one that samples in training. SIGTERM and Ctrl-C let running requests end, and
the exit code is 0. Short flags:
"""

import asyncio
import contextlib
import errno
import os
import resource
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

from dapo_jax.commands import checks, command_line
from dapo_jax.commands.serve.access import Access, exposure, read_key
from dapo_jax.config.experiment import Compute, ServeConfig
from dapo_jax.data.policies import model_path
from dapo_jax.runtime import processes
from dapo_jax.runtime.settings import ConfigError, leaves, require
from dapo_jax.runtime.signals import Signals

SHORT_NAMES = {name: name for name, _, _ in leaves(ServeConfig()) if "." not in name}
CHECK_SECONDS = 0.1
SPARE_FILES = 64  # for all that is no connection
WAITING_CLIENTS = 2048  # that are not accepted yet; of more the kernel drops some for a second


class ServingFailed(RuntimeError):
    """Failure of one of JetStream's threads."""


def rule_of(config: ServeConfig) -> Any:
    """Sampling rule of requests that have none."""
    from dapo_jax.rollout.sampling import SamplingRule

    return SamplingRule(config.temperature, config.top_p, config.top_k)


def load_served(config: ServeConfig) -> tuple[Any, Any, Any]:
    """Engine, decoding weights and tokenizer of a model folder. Raises `ConfigError`."""
    from dapo_jax.commands.serve import budgets
    from dapo_jax.commands.serve.engine import ServedEngine
    from dapo_jax.data.prompts.tokenizer import Tokenizer
    from dapo_jax.model import load_huggingface
    from dapo_jax.run.compute import check_divisible, check_rotations, mesh_sizes, numerics
    from dapo_jax.runtime.sharding import make_mesh

    mesh = make_mesh(**mesh_sizes(config.mesh), devices=None)
    compute = Compute(dtype=config.dtype)
    decoder = load_huggingface.read_config(config.model, field="model", **numerics(compute, mesh))
    check_divisible(decoder, mesh)
    tokenizer = Tokenizer.from_folder(config.model, "model")
    tokenizer.check_fits(decoder.vocab, "model", config.model)
    if tokenizer.chat is not None:
        tokenizer.chat.check(f"config.model = {config.model!r}")
    config, context = budgets.resolve(config, decoder, mesh)
    longest = config.max_prompt_tokens + config.max_response_tokens
    check_rotations(decoder, longest, "model", config.model)
    budgets.check_slots_fit(config, decoder, mesh)
    engine = ServedEngine(
        decoder,
        mesh,
        budgets.sampler_of(config),
        max_prompt_tokens=budgets.prefill_tokens(config.max_prompt_tokens),
        tokenizer=tokenizer,
        seed=config.seed,
    )
    engine.rule, engine.longest_prompt = rule_of(config), config.max_prompt_tokens
    engine.context = context
    params = load_huggingface.load_params(config.model, decoder, mesh, field="model", cast=True)
    return engine, engine.load_params(params), tokenizer


def warm_up(engine: Any, params: Any) -> None:
    """Compiles the programs for prompts up to `FIRST_TOKENS`, so that these wait for nothing."""
    import jax
    import numpy as np

    from dapo_jax.commands.serve.budgets import FIRST_TOKENS, PREFILL_TOKENS

    state = engine.init_decode_state()
    for length in PREFILL_TOKENS:
        if length <= min(engine.max_prefill_length, FIRST_TOKENS):
            padded = np.zeros(length, np.int32)
            key = jax.random.key(0)
            prefix = engine.prefill(params=params, padded_tokens=padded, true_length=1, key=key)
            state = engine.insert(prefix, state, slot=0)
    jax.block_until_ready(engine.generate(params, state))


def bind(config: ServeConfig, field: str) -> socket.socket:
    """Socket that listens on the port of setting `field`. Raises `ConfigError`."""
    port, host = getattr(config, field), config.host.strip("[]")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=WAITING_CLIENTS)
    except OSError as error:
        reason, number = str(error.strerror).partition(" (")[0], error.errno or 0
        allowed = "a name or an address of this machine, such as 127.0.0.1, or 0.0.0.0 for all"
        unknown = number < 0 or number == errno.EADDRNOTAVAIL  # of getaddrinfo
        require(not unknown, "host", config.host, f"{allowed}: {reason}")
        raise ConfigError(f"config.{field} = {port}: on {config.host}: {error}") from None


def connections_within(wanted: int) -> int:
    """Number of connections for each protocol, at most `wanted`; raises the soft limit of files.

    Raises:
        ConfigError: the limit of open files leaves room for none.
    """
    used = len(os.listdir("/dev/fd")) + SPARE_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= soft < used + 2 * wanted:
        soft = used + 2 * wanted if hard < 0 else min(hard, used + 2 * wanted)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    room = wanted if soft < 0 else min(wanted, (soft - used) // 2)
    limit = f"the limit of open files, {soft}, leaves room for {max(room, 0)}"
    require(room > 0, "max_connections", wanted, f"smaller: {limit} (ulimit -n)")
    if room < wanted:
        processes.print_error(f"warning: max_connections = {wanted}: {limit} of each protocol")
    return room


def served_name(config: ServeConfig) -> str:
    """Name of the model for clients."""
    folder = os.path.abspath(model_path(config.model, "model"))
    return config.served_name or os.path.basename(folder)


async def answer(
    config: ServeConfig,
    generator: Any,
    engine: Any,
    params: Any,
    tokenizer: Any,
    key: str,
    *,
    leave: Callable[[], bool],
    ready: Callable[[int, int], None],
) -> str:
    """Answers requests until `leave()` is true; returns the generator's failure or "".

    Args:
        generator: a `Generator`, with its `ServedEngine` and that one's `params`.
        key: that clients must send; empty: none.
        ready: called with the ports of gRPC and HTTP (0: none) once requests are answered.
    """
    from prometheus_client import make_asgi_app

    from dapo_jax.commands.serve.generator import Limits
    from dapo_jax.commands.serve.grpc_api import Servicer, start_grpc
    from dapo_jax.commands.serve.http_connections import HttpServer
    from dapo_jax.commands.serve.openai_api import HttpApi
    from dapo_jax.commands.serve.openai_requests import ServedModel
    from dapo_jax.commands.serve.scoring import Scorer

    limits = Limits(
        prompt_tokens=engine.longest_prompt,
        prompt_bytes=engine.longest_prompt * tokenizer.longest_token,
        response_tokens=engine.max_response_tokens,
        context=engine.context,
        vocab=tokenizer.backend.get_vocab_size(),
        waiting=config.waiting,
    )
    rule, seconds = rule_of(config), config.shutdown_seconds
    access, connections = Access(config, key), connections_within(config.max_connections)
    servicer = Servicer(
        generator,
        tokenizer,
        limits=limits,
        rule=rule,
        access=access,
        request_seconds=config.request_seconds,
    )
    most_bytes = int(config.max_body_mb * 1e6)
    address = f"{config.host}:{config.port}"
    grpc, port = await start_grpc(servicer, address, most_bytes, connections)

    async def stop_grpc() -> None:
        servicer.drop_unread()
        await grpc.stop(seconds)

    stops = [stop_grpc]

    def open_http(app: Any, field: str) -> None:
        server = HttpServer(
            app,
            bind(config, field),
            connections=connections,
            request_seconds=config.request_seconds,
            idle_seconds=config.idle_seconds,
            most_bytes=most_bytes,
            shutdown_seconds=seconds,
        )
        stops.append(server.stop)

    if config.http_port:
        model = ServedModel(served_name(config), tokenizer, limits, rule)
        scorer = Scorer(engine.config, params)
        open_http(HttpApi(generator, scorer, model, access, most_bytes).app, "http_port")
    if config.metrics_port:
        open_http(make_asgi_app(), "metrics_port")
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
    key = read_key(config)
    if warning := exposure(config, key):
        processes.print_error(warning)
    engine, params, tokenizer = load_served(config)
    warm_up(engine, params)
    # Imported after the engine, which prepares the import of JetStream.
    from dapo_jax.commands.serve.generator import Generator

    metrics = config.metrics_port > 0
    generator = Generator(engine, params, waiting=config.waiting, metrics=metrics)
    with contextlib.closing(generator):
        failure = asyncio.run(
            answer(config, generator, engine, params, tokenizer, key, leave=leave, ready=ready)
        )
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
