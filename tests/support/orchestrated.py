"""JetStream's driver and orchestrator, for the engine's tests."""

import asyncio
import logging
import threading

import jax
from jetstream.core import orchestrator

# JAX removed jax.tree_map in 0.4.26; JetStream calls it after every insert.
jax.tree_map = jax.tree.map
# A failing JetThread kills the process by SIGKILL.
orchestrator.JetThread = threading.Thread
# Importing JetStream makes the process log every decode step to standard output.
logging.getLogger().removeHandler(orchestrator.handler)
logging.getLogger().setLevel(logging.WARNING)

Driver = orchestrator.Driver


def read(responses) -> tuple[str, list[int]]:
    samples = [response.stream_content.samples[0] for response in responses]
    return "".join(sample.text for sample in samples), [i for s in samples for i in s.token_ids]


def orchestrate(driver: Driver, *requests) -> list[tuple[str, list[int]]]:
    """Return text and ids of concurrent requests to JetStream's orchestrator."""
    server = orchestrator.LLMOrchestrator(driver)

    async def respond(request):
        return read([response async for response in server.Decode(request)])

    async def respond_to_all():
        try:
            return await asyncio.gather(*map(respond, requests))
        finally:
            await asyncio.to_thread(driver.stop)

    return asyncio.run(respond_to_all())
