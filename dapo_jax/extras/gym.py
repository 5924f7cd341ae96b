"""Tasks of the package reasoning-gym (an extra), with their own scorers.

Answers are untrusted text. Scorers of eight tasks evaluate the answer, and two tasks are won by a
constant answer: both lists were made by reading and probing the release `RELEASE`, so no other
release is accepted. The scorer of countdown evaluates it too, and gets only sums, products and
quotients of whole numbers. Other scorers get only finite numbers, in a process with limits.

A few tasks (isomorphic_strings, ransom_note, word_ladder, knight_swap) follow the order of Python
sets, so their items differ between processes. Items are sent to workers whole.
"""

import contextlib
import functools
import importlib.metadata
import json
import math
import re
import zlib
from typing import Any

from dapo_jax.config.experiment import Data
from dapo_jax.data.sources import Generated
from dapo_jax.runtime.user_code import read_options
from dapo_jax.types.errors import ConfigError
from dapo_jax.types.structs import Problem

PREFIX = "gym:"
RELEASE = "0.1.25"
EVALUATING = frozenset(
    "binary_matrix intermediate_integration n_queens polynomial_multiplication puzzle24 "
    "simple_integration spiral_matrix string_insertion".split()
)
WON_BY_CONSTANTS = frozenset({"coin_flip", "game_of_life_halting"})
_TUPLE = "__tuple__"
_ARITHMETIC = re.compile(r"(?:[0-9]{1,6}|(?<!/)/|(?<!\*)\*|[-+() ]){1,200}")  # no power, no name

# --- answers that reach a scorer ------------------------------------------------------------

_COMMAND = re.compile(r"\\[a-zA-Z]+")
_OTHER_LETTER = re.compile(r"[^\W\d_eij]", re.IGNORECASE)  # than those in 1e5 and 2 + 3i
_NOT_FINITE = re.compile(
    r"(?<![^\W\d_])s?(?:nan|inf(?:inity)?)\d*[ij]?(?![^\W_])|∞|\\infty|\de[+-]?\d{3}", re.IGNORECASE
)


def is_finite(answer: str, gold: str | None) -> bool:
    """Return False for NaN or infinity if the item's answer, `gold`, is a number."""
    if gold is None or answer.strip() == gold.strip():
        return True
    is_numeric = not _OTHER_LETTER.search(_COMMAND.sub("", gold))
    return not (is_numeric and _NOT_FINITE.search(answer))


# --- tasks ----------------------------------------------------------------------------------


def split_name(name: str) -> tuple[str, dict[str, Any]]:
    """Return task and settings of `gym:TASK?setting=value&...`."""
    task, _, query = name.removeprefix(PREFIX).partition("?")
    return task, read_options(query)


def _factory(setting: str) -> Any:
    """Return the package's registry of tasks.

    Raises `ConfigError`, with `setting`, if the package is missing or of another release.
    """
    try:
        from reasoning_gym import factory  # pyright: ignore[reportMissingImports]: an extra

        installed = importlib.metadata.version("reasoning-gym")
        reason = f"scorers of {installed} were not reviewed" * (installed != RELEASE)
    except ImportError as error:
        reason = str(error)
    if reason:
        raise ConfigError(f"{setting}: needs pip install 'reasoning-gym=={RELEASE}' ({reason})")
    return factory


def _refusal(task: str) -> str:
    """Return why a task can't be used; empty if it can."""
    if task in EVALUATING:
        return "its scorer evaluates the answer, and text that a model wrote is never evaluated"
    return "its scorer rewards a constant answer" if task in WON_BY_CONSTANTS else ""


def open_task(field: str, name: str, seed: int, size: int) -> Any:
    """Return the items 0 to size - 1 of `gym:TASK?setting=value&...`.

    The package seeds item i by seed + i, so neighbouring seeds would share nearly all items. It is
    therefore given a hash of the seed.

    Args:
        field: the setting that names the task.

    Raises:
        ConfigError: the package is missing, has no such task or setting, or the task is refused.
    """
    setting = f"config.{field} = {name!r}"
    task, options = split_name(name)
    factory = _factory(setting)
    names = factory.DATASETS.keys() - EVALUATING - WON_BY_CONSTANTS
    allowed = f"reasoning-gym has {', '.join(sorted(names))}"
    if reason := _refusal(task):
        raise ConfigError(f"{setting}: {reason}; {allowed}")
    try:
        seed = zlib.crc32(f"{name.removeprefix(PREFIX)} {seed}".encode()) // 2
        return factory.create_dataset(task, seed=seed, size=size, **options)
    except (ValueError, TypeError, AssertionError) as error:
        known = "" if task in names else f"; {allowed}"
        raise ConfigError(f"{setting}: {error}{known}") from None


def open_problems(field: str, name: str, data: Data, seed: int, split: str) -> Generated:
    """Return the problems of a task; the held-out ones follow the training ones."""
    items = open_task(field, name, seed, data.train_problems + data.heldout_count())

    def make(index: int) -> Problem:
        number = index + (data.train_problems if split == "heldout" else 0)
        item = items[number]
        return Problem(
            id=f"{name}-{number}",
            text=item["question"].strip(),
            answer=str(item["answer"]),
            source=name,
            subject=items.category,
            metadata=pack_item(item),
        )

    return Generated(data.count(split), make)


# --- items and scores, in workers -----------------------------------------------------------


def _mark_tuples(value: Any) -> Any:
    """Mark tuples, since JSON would turn them into lists and some scorers compare with tuples."""
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
    """Return the JSON of an item; values without a JSON form become text, unread by scorers."""
    return json.dumps(_mark_tuples(item), default=str)


@functools.lru_cache(maxsize=64)
def _scorer(name: str) -> Any:
    task, options = split_name(name)
    if reason := _refusal(task):
        raise ConfigError(reason)
    return _factory(name).create_dataset(task, **options)


def prepare(name: str) -> None:
    """Load the scorer of a task; that may take seconds."""
    with contextlib.suppress(Exception):  # the request for a score reports it
        _scorer(name)


def score(name: str, metadata: str, answer: str | None) -> float:
    """Return the score of the task's own scorer: 1 if correct, less for some other answers.

    Args:
        name: of the source, `gym:TASK?setting=value&...`.
        metadata: `Problem.metadata` of one of its problems.
        answer: extracted from the response; None if it has none.

    Raises:
        Exception: the scorer may raise anything.
    """
    if answer is None:
        return 0.0
    scorer = _scorer(name)
    if split_name(name)[0] == "countdown" and not _ARITHMETIC.fullmatch(answer):
        return 0.0
    item = json.loads(metadata, object_hook=_unmark_tuples)
    if not is_finite(answer, item.get("answer")):
        return 0.0
    value = float(scorer.score_answer(answer, item))
    return value if math.isfinite(value) else 0.0
