"""Serve a policy by OpenAI's HTTP API.

    dapo-jax serve FOLDER --http_port=8000
    dapo-jax serve runs/arithmetic_dapo
    dapo-jax serve --tinker --model=FOLDER

serves a model folder, or the newest checkpoint of a run, which it exports into the run once. The
server uses the engine that samples in training. With --tinker it also trains: it answers Tinker's
SDK. After SIGTERM or Ctrl-C, running requests finish, and the exit code is 0.
"""

import asyncio
import contextlib
import dataclasses
import functools
import os
import time
from collections.abc import Callable

from dapo_jax.extras.serve.settings import ServeConfig
from dapo_jax.run import checks, command_line
from dapo_jax.runtime import processes
from dapo_jax.runtime.keys import KEY_VARIABLE, LOOPBACK, read_key
from dapo_jax.runtime.signals import Signals
from dapo_jax.runtime.storage.models import model_path


def served_name(config: ServeConfig) -> str:
    """Return the model's name for clients."""
    folder = os.path.abspath(model_path(config.model, "model"))
    return config.served_name or os.path.basename(folder)


def serve(
    config: ServeConfig, *, should_stop: Callable[[], bool], ready: Callable[[int], None]
) -> str:
    """Serve until `should_stop()`; call `ready` with the HTTP port once it answers.

    Returns the failure of the thread that samples, or empty.
    """
    from dapo_jax.extras.serve import app, policy
    from dapo_jax.run.export import newest_export

    app.bind(config).close()  # report a taken port before the model is loaded
    key = read_key(config.api_key_file, "api_key_file")
    if not key and config.host.strip("[]") not in LOOPBACK:
        open_to_all = f"anyone who can reach {config.host} can use the server: there is no API key"
        processes.print_error(f"warning: {open_to_all} (--api_key_file=FILE, or {KEY_VARIABLE})")
    folder = newest_export(config.model, "model")
    config = dataclasses.replace(config, model=folder, served_name=served_name(config))
    if config.tinker:
        from dapo_jax.extras.tinker.app import open_tinker

        opened = open_tinker(config)
    else:
        served = policy.load_served(config)
        slots = served.engine.max_concurrent_decodes
        compiling = f"compiling for {slots} slots: seconds for a small model, else minutes"
        processes.print_error(compiling)
        policy.warm_up(served)
        opened = contextlib.nullcontext(functools.partial(app.OpenaiApi, served))
    with opened as open_api:
        return asyncio.run(app.serve_api(open_api, config, key, should_stop, ready))


def main() -> int:
    """Run the command; exit code 0: stopped by a signal, 1: it failed, 2: wrong settings."""
    config = command_line.load(ServeConfig, __doc__)
    started = time.time()

    def ready(port: int) -> None:
        url = f"http://{config.host}:{port}"
        api = f"Tinker's API on {url}" if config.tinker else f"HTTP on {url}/v1"
        print(f"serving {served_name(config)}: {api} ({time.time() - started:.0f} s)", flush=True)

    def work() -> int:
        if failure := serve(config, should_stop=signals, ready=ready):
            processes.print_error(f"stopped: {failure}")
        return int(bool(failure))

    with processes.as_command(), Signals() as signals:
        return checks.guarded(work)
