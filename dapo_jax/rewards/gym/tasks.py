"""Generated tasks of the package reasoning-gym (an extra), with their own scorers.

Reward workers import this module too: it needs the standard library and that package alone.

A few tasks (isomorphic_strings, ransom_note, word_ladder, knight_swap) follow the order of Python
sets, so that their items differ between processes unless PYTHONHASHSEED is set. Items travel to
the workers whole, so that answers are scored right nonetheless.
"""

import contextlib
import functools
import json
import math
import warnings
import zlib
from typing import Any

from dapo_jax.rewards.gym.answers import unfit
from dapo_jax.rewards.gym.constants import ITEMS, WON_BY_CONSTANTS, won_constant
from dapo_jax.rewards.gym.evaluating_scorers import EVALUATING, refusal
from dapo_jax.runtime.settings import ConfigError

PREFIX = "gym:"
_TUPLE = "__tuple__"


def _factory(setting: str) -> Any:
    """Registry of the package's tasks.

    Raises:
        ConfigError: the package is missing. The message begins with `setting`.
    """
    try:
        from reasoning_gym import factory  # pyright: ignore[reportMissingImports]: an extra
    except ImportError as error:
        raise ConfigError(
            f"{setting}: needs reasoning-gym: pip install 'dapo_jax[gym]' or "
            f"pip install reasoning-gym ({error})"
        ) from None
    return factory


def open_task(field: str, task: str, seed: int, size: int) -> Any:
    """Items 0 to size - 1 of a task, at its default difficulty.

    The package seeds item i by seed + i, so that neighbouring seeds would share nearly all items:
    its seed is a hash of ours.

    Args:
        field: the setting that names the task, for the error.

    Raises:
        ConfigError: the package is missing, or has no such task, or the task's scorer evaluates
            the answer or gives a constant one what it should not; the message names the tasks that
            are allowed.
    """
    setting = f"config.{field} = {PREFIX + task!r}"
    factory = _factory(setting)
    names = factory.DATASETS.keys() - EVALUATING - WON_BY_CONSTANTS
    allowed = f"reasoning-gym has {', '.join(sorted(names))}"
    try:
        seed = zlib.crc32(f"{task} {seed}".encode()) // 2
        dataset = factory.create_dataset(task, seed=seed, size=size)
    except (ValueError, TypeError, AssertionError) as error:
        raise ConfigError(f"{setting}: {error}; {allowed}") from None
    reason = refusal(task, dataset)
    if reason is not None:
        raise ConfigError(
            f"{setting}: {reason}, and no text that a model wrote is ever evaluated; {allowed}"
        )
    constant = _probe(task)
    if constant is not None:
        raise ConfigError(f"{setting}: its scorer rewards a constant: {constant}; {allowed}")
    return dataset


@functools.lru_cache(maxsize=64)  # training and held-out problems are opened apart
def _probe(task: str) -> str | None:
    """Constant that wins the task's items, the same for every seed; None without one."""
    dataset = _factory(PREFIX + task).create_dataset(task, seed=0, size=ITEMS)
    items = [dataset[i] for i in range(ITEMS)]

    def score(answer: str, item: dict[str, Any]) -> float:
        try:
            return _score(dataset, answer, pack_item(item))
        except Exception:  # some scorers raise where an answer is junk
            return 0.0

    with warnings.catch_warnings(action="ignore"):  # numpy's, about answers that are none
        return won_constant(items, score)


def _mark_tuples(value: Any) -> Any:
    """A value whose tuples JSON keeps apart from lists, since some scorers compare with tuples."""
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
    """JSON of an item, as `gym_score` takes it.

    Values that JSON has no form for, such as a fraction, become text: no scorer reads them.
    """
    return json.dumps(_mark_tuples(item), default=str)


@functools.lru_cache(maxsize=64)
def _scorer(task: str) -> Any:
    dataset = _factory(PREFIX + task).create_dataset(task)
    reason = refusal(task, dataset)
    if reason is not None:  # the door was passed with another release of the package
        raise ConfigError(reason)
    return dataset


def prepare(task: str) -> None:
    """Imports and parses all that a task's scorer needs, which may take seconds."""
    with contextlib.suppress(Exception):  # whoever asks for a score is told
        _scorer(task)


def _score(dataset: Any, answer: str, metadata: str) -> float:
    item = json.loads(metadata, object_hook=_unmark_tuples)
    if unfit(answer, item.get("answer")) is not None:
        return 0.0
    score = float(dataset.score_answer(answer, item))
    return score if math.isfinite(score) else 0.0


def gym_score(task: str, metadata: str, response_answer: str | None) -> float:
    """Score that the task's own scorer gives an answer: 1 for a right one, less for some others.

    Args:
        task: the name behind `gym:`.
        metadata: `Problem.metadata` of one of its problems.
        response_answer: the answer extracted from the response; None where none was found.

    Raises:
        Exception: whatever the scorer raises; few of them do.
    """
    if response_answer is None:
        return 0.0
    return _score(_scorer(task), response_answer, metadata)
