"""Requests through JetStream's orchestrator."""

import asyncio

from served import read

from dapo_jax.commands.serve import jetstream_server


def orchestrate(driver, *requests) -> list[tuple[str, list[int]]]:
    """Return text and ids of concurrent requests to JetStream's orchestrator."""
    orchestrator = jetstream_server.orchestrator.LLMOrchestrator(driver)

    async def respond(request):
        return read([response async for response in orchestrator.Decode(request)])

    async def respond_to_all():
        try:
            return await asyncio.gather(*map(respond, requests))
        finally:
            await asyncio.to_thread(driver.stop)

    return asyncio.run(respond_to_all())
