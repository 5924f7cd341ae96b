"""Metrics of a server in Prometheus' text format."""

import time
from typing import Any

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

SECONDS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300)


class ServeMetrics:
    """Counts of what is asked and answered, of one server."""

    def __init__(self, generator: Any):
        self._registry = registry = CollectorRegistry()
        options: dict[str, Any] = {"registry": registry}
        self._answers = Counter(
            "dapo_http_answers", "Answers of HTTP.", ["path", "status"], **options
        )
        self._seconds = Histogram(
            "dapo_http_seconds",
            "Seconds from a request to the end of its answer.",
            ["path"],
            buckets=SECONDS,
            **options,
        )
        self.prompt_tokens = Counter("dapo_prompt_tokens", "Tokens of prompts.", **options)
        self.response_tokens = Counter("dapo_response_tokens", "Tokens drawn.", **options)
        waiting = Gauge("dapo_waiting_responses", "Responses that wait for a slot.", **options)
        waiting.set_function(lambda: generator.waiting)
        slots = Gauge("dapo_busy_slots", "Slots that draw a response.", **options)
        slots.set_function(lambda: generator.busy)

    def page(self) -> tuple[bytes, str]:
        """Page for Prometheus, with the process's own metrics and JetStream's; its type."""
        return generate_latest(self._registry) + generate_latest(REGISTRY), CONTENT_TYPE_LATEST

    def counted(self, app: Any, paths: set[str]) -> Any:
        """ASGI application that counts the answers of `app`; other paths are counted as one."""

        async def answer(scope: Any, receive: Any, send: Any) -> None:
            began, path = time.monotonic(), scope["path"] if scope["path"] in paths else "other"

            async def watch(message: Any) -> None:
                if message["type"] == "http.response.start":
                    self._answers.labels(path, message["status"]).inc()
                await send(message)

            try:
                await app(scope, receive, watch)
            finally:
                self._seconds.labels(path).observe(time.monotonic() - began)

        return answer
