"""Generated tasks of the package reasoning-gym (an extra), with their own scorers.

Nothing here imports more than the standard library and that package: reward workers use it too.
A few of its tasks (isomorphic_strings, polynomial_multiplication, ransom_note, word_ladder,
knight_swap) follow the order of Python sets, so that their items differ between processes unless
PYTHONHASHSEED is set; items travel to the workers whole, so they are scored right nonetheless.
"""

import functools
import json
import zlib
from typing import Any

from dapo_jax.experiment.settings import ConfigError

PREFIX = "gym:"
_TUPLE = "__tuple__"


def _factory() -> Any:
    try:
        from reasoning_gym import factory
    except ImportError as error:
        raise ConfigError(
            f"a data source {PREFIX}TASK needs reasoning-gym: pip install 'dapo_jax[gym]' or "
            f"pip install reasoning-gym ({error})"
        ) from None
    return factory


def open_task(field: str, task: str, seed: int, size: int) -> Any:
    """Items 0 to size - 1 of a task, at its default difficulty.

    The package seeds item i by seed + i, so that neighbouring seeds would share nearly all items:
    its seed is a hash of ours.

    Raises:
        ConfigError: the package is missing, or knows no such task; names those like it.
    """
    factory = _factory()
    try:
        seed = zlib.crc32(f"{task} {seed}".encode()) // 2
        return factory.create_dataset(task, seed=seed, size=size)
    except (ValueError, TypeError, AssertionError) as error:
        known = ", ".join(sorted(factory.DATASETS))
        raise ConfigError(
            f"config.{field} = {PREFIX + task!r}: {error}; reasoning-gym has {known}"
        ) from None


def _mark_tuples(value: Any) -> Any:
    """JSON would make lists of tuples, and some scorers compare with tuples."""
    if isinstance(value, tuple):
        return {_TUPLE: [_mark_tuples(part) for part in value]}
    if isinstance(value, list):
        return [_mark_tuples(part) for part in value]
    if isinstance(value, dict):
        return {name: _mark_tuples(part) for name, part in value.items()}
    return value


def _unmark_tuples(value: dict) -> Any:
    return tuple(value[_TUPLE]) if value.keys() == {_TUPLE} else value


def pack_item(item: dict[str, Any]) -> str:
    """An item as the JSON that `gym_score` takes."""
    return json.dumps(_mark_tuples(item))


@functools.lru_cache(maxsize=64)
def _scorer(task: str) -> Any:
    return _factory().create_dataset(task)


def gym_score(task: str, metadata: str, response_answer: str | None) -> float:
    """What the task's own scorer gives an answer: 1 for a right one, less for some others.

    Args:
        task: the name behind `gym:`.
        metadata: `Problem.metadata` of one of its problems.
        response_answer: what was taken out of the response; None where nothing was found.

    Raises:
        Exception: whatever the scorer raises; few of them do.
    """
    if response_answer is None:
        return 0.0
    item = json.loads(metadata, object_hook=_unmark_tuples)
    return float(_scorer(task).score_answer(response_answer, item))
