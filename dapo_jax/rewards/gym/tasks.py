"""Generated tasks of the package reasoning-gym (an extra), with their own scorers.

Some of these evaluate what they are given: they see only answers that `data.harmless` lets through,
and that in a jail. Nothing here imports more than the standard library and that package: reward
workers use it too.
A few of its tasks (isomorphic_strings, polynomial_multiplication, ransom_note, word_ladder,
knight_swap) follow the order of Python sets, so that their items differ between processes unless
PYTHONHASHSEED is set; items travel to the workers whole, so they are scored right nonetheless.
"""

import functools
import importlib.util
import json
import math
import re
import zlib
from typing import Any

from dapo_jax.rewards.gym import answer_forms
from dapo_jax.runtime.settings import ConfigError
from dapo_jax.verifier.jail import jail_refusal

PREFIX = "gym:"
_BLANKS = re.compile(r"[\s()]")
_TUPLE = "__tuple__"


def _factory(asked: str) -> Any:
    """Raises `ConfigError` that begins with what was asked for."""
    try:
        from reasoning_gym import factory  # pyright: ignore[reportMissingImports]: an extra
    except ImportError as error:
        raise ConfigError(
            f"{asked}: needs reasoning-gym: pip install 'dapo_jax[gym]' or "
            f"pip install reasoning-gym ({error})"
        ) from None
    return factory


def open_task(field: str, task: str, seed: int, size: int) -> Any:
    """Items 0 to size - 1 of a task, at its default difficulty.

    The package seeds item i by seed + i, so that neighbouring seeds would share nearly all items:
    its seed is a hash of ours.

    Raises:
        ConfigError: the package is missing, or knows no such task (names those it knows), or the
            task's scorer evaluates text and that can't be made safe.
    """
    factory = _factory(f"config.{field} = {PREFIX + task!r}")
    try:
        seed = zlib.crc32(f"{task} {seed}".encode()) // 2
        dataset = factory.create_dataset(task, seed=seed, size=size)
    except (ValueError, TypeError, AssertionError) as error:
        known = ", ".join(sorted(factory.DATASETS))
        raise ConfigError(
            f"config.{field} = {PREFIX + task!r}: {error}; reasoning-gym has {known}"
        ) from None
    reason = refusal(task, dataset)
    if reason is None and task in answer_forms.EVALUATING and jail_refusal() is not None:
        reason = (
            "its scorer evaluates text, which takes a jail, and none can be had here: "
            f"{jail_refusal()}"
        )
    if reason is not None:
        raise ConfigError(f"config.{field} = {PREFIX + task!r}: {reason}")
    return dataset


def refusal(task: str, dataset: Any) -> str | None:
    """Why no answer may be shown to the scorer of a task; None where some may."""
    if task in answer_forms.FORMS:
        return None
    try:
        found = ", ".join(answer_forms.evaluators(type(dataset)))
    except (OSError, SyntaxError) as error:
        return f"whether its scorer evaluates text can't be seen: {error}"
    rule = "its scorer evaluates text ({}) and no rule here says what is harmless"
    return rule.format(found) if found else None


def package_folders() -> list[str]:
    """Where the package is installed; it reads its words and boards there."""
    spec = importlib.util.find_spec("reasoning_gym")
    return list(spec.submodule_search_locations or ()) if spec else []


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
    """An item as the JSON that `gym_score` takes.

    What JSON has no word for, a fraction that a story was made with, no scorer reads.
    """
    return json.dumps(_mark_tuples(item), default=str)


@functools.lru_cache(maxsize=64)
def _scorer(task: str) -> Any:
    dataset = _factory(PREFIX + task).create_dataset(task)
    reason = refusal(task, dataset)
    if reason is not None:  # the door was passed with another release of the package
        raise ConfigError(reason)
    return dataset


def is_copied(answer: str, item: dict[str, Any]) -> bool:
    """Whether an answer leaves the work undone that its gold has done.

    That is an integral that is still one, or an expression that stands in the question.
    """
    gold = str(item["answer"])
    mine, question = (_BLANKS.sub("", text) for text in (answer, item["question"]))
    undone = "Integral" in answer and "Integral" not in gold
    return undone or mine in question and mine != _BLANKS.sub("", gold)


def gym_score(task: str, metadata: str, response_answer: str | None) -> float:
    """What the task's own scorer gives an answer: 1 for a right one, less for some others.

    An answer of a form that is not proven harmless gets 0, and the scorer does not see it.

    Args:
        task: the name behind `gym:`.
        metadata: `Problem.metadata` of one of its problems.
        response_answer: what was taken out of the response; None where nothing was found.

    Raises:
        Exception: whatever the scorer raises; few of them do.
    """
    if response_answer is None or not answer_forms.is_harmless(task, response_answer):
        return 0.0
    item = json.loads(metadata, object_hook=_unmark_tuples)
    if task in answer_forms.COMPUTED and is_copied(response_answer, item):
        return 0.0
    score = float(_scorer(task).score_answer(response_answer, item))
    return score if math.isfinite(score) else 0.0  # of an answer like nan
