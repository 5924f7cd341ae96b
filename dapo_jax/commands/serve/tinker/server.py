"""Server of Tinker's API: the folder of its state, its thread, and HTTP."""

import asyncio
import pathlib
import time
from collections.abc import Callable

from starlette.applications import Starlette

from dapo_jax.commands.serve.access import Access
from dapo_jax.commands.serve.app import ERRORS, answer_error, start_http
from dapo_jax.commands.serve.server import POLL_SECONDS, bind, raise_file_limit
from dapo_jax.commands.serve.tinker.app import TinkerApi
from dapo_jax.commands.serve.tinker.policies import Policies
from dapo_jax.commands.serve.tinker.store import Store
from dapo_jax.commands.serve.tinker.worker import Worker
from dapo_jax.config.experiment import ServeConfig
from dapo_jax.runtime.storage.output_folder import TINKER, claim

TIDY_SECONDS = 600.0


def serve_tinker(
    config: ServeConfig, key: str, should_stop: Callable[[], bool], ready: Callable[[], None]
) -> str:
    """Serve until `should_stop()`; return the failure of the worker, or empty."""
    policies = Policies(config)
    with claim("tinker_dir", config.tinker_dir, TINKER) as folder:
        store = Store(pathlib.Path(str(folder)))
        try:
            return asyncio.run(_answer(policies, store, key, should_stop, ready))
        finally:
            store.close()


async def _answer(
    policies: Policies,
    store: Store,
    key: str,
    should_stop: Callable[[], bool],
    ready: Callable[[], None],
) -> str:
    config = policies.config
    raise_file_limit(config.max_connections)
    worker = Worker(policies, store)
    try:
        api = TinkerApi(policies, worker, store, Access(config, key))
        handlers = dict.fromkeys(ERRORS, answer_error)
        app = Starlette(routes=api.routes, exception_handlers=handlers)
        stop = start_http(app, bind(config, "http_port"), config)
        ready()
        tidied = -TIDY_SECONDS
        while not should_stop() and not worker.failure:
            if time.monotonic() - tidied > TIDY_SECONDS:
                await asyncio.to_thread(store.tidy)
                tidied = time.monotonic()
            await asyncio.sleep(POLL_SECONDS)
        await stop()
    finally:
        await asyncio.to_thread(worker.close)  # its thread writes to the event loop
    return worker.failure
