"""Base of sinks: a `contracts.RunSink` that ignores everything, so that a tracker is one class."""

from collections.abc import Sequence
from typing import Any

from dapo_jax.structs import CollectedGroups


class Sink:
    """A sink that ignores everything."""

    def on_row(self, step: int, values: dict[str, float]) -> None:
        """Receive the metrics of a finished step (0: before training)."""

    def on_rollouts(self, step: int, collected: CollectedGroups) -> None:
        """Receive the scored groups of a step."""

    def on_evaluation(self, step: int, responses: Sequence[Any]) -> None:
        """Receive the scored responses to the held-out problems."""

    def on_summary(self, summary: dict[str, Any]) -> None:
        """Receive the result of the finished run."""

    def close(self, failed: bool) -> None:
        """Flush and disconnect."""
