"""Scores of answers by the source of their problem, if that has a scorer."""

import functools
from typing import Any, NamedTuple

from dapo_jax.runtime import registry
from dapo_jax.types.structs import Failure

SCORE_SECONDS = 2.0  # of CPU time for one score
SCORER_ERROR = "scorer_error"  # `ScoreReply.how` of an answer on which the scorer raised


class ScoreRequest(NamedTuple):
    """An answer to score; without metadata, only the scorer is loaded."""

    source: str
    metadata: str | None = None
    answer: str | None = None


class ScoreReply(NamedTuple):
    """The score of an answer and how it was decided, or why there is none."""

    score: float = 0.0
    how: str = "scorer"
    failure: Failure | None = None

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> "ScoreReply":
        known: dict[str, Any] = fields | {"failure": Failure.from_json(fields["failure"])}
        return cls(**known)


def find_source(name: str) -> Any:
    """Return the plug-in of a problem's source, as of `gym:TASK`, or None."""
    return registry.find("sources", name.partition(":")[0])


@functools.lru_cache(maxsize=64)
def scores(source: str) -> bool:
    """Return True if the source of a problem scores answers itself."""
    return hasattr(find_source(source), "score")
