"""Responses through the real pool of rewards, its processes and the judge."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np

from dapo_jax.config.experiment import Config
from dapo_jax.rewards.group_rewards import Judge
from dapo_jax.rewards.pool import RewardPool
from dapo_jax.runtime.workers.pickled_functions import register_function
from dapo_jax.types.structs import Completion, Group, Prompt, Verdict


def register(*functions: Callable, in_process: bool = False) -> list[str]:
    """Return the names of functions as parts of a reward."""
    names: list[str] = []
    for function in functions:
        names.append(register_function(function, in_process, reserved=names))
    return names


def say(text: str, tokens: int | None = None, **fields) -> Completion:
    """Return a response with a token for each character, or so many."""
    ids = np.full(len(text) if tokens is None else tokens, 5, np.int32)
    return Completion(ids, np.full(len(ids), -1, np.float32), False, 0, text, **fields)


def make_prompt(index: int, answer: str, **fields) -> Prompt:
    tokens = np.array([2, 3], np.int32)
    named: dict[str, Any] = {"id": f"p{index}", "text": "", "source": "test"} | fields
    return Prompt(index, tokens=tokens, answer=answer, **named)


def submit(pool: RewardPool, response: str, answer: str = "", **prompt) -> Future[list[Verdict]]:
    """Submit a group of one response."""
    return pool.submit_group(make_prompt(0, answer, **prompt), [say(response, 1)])


def ask(pool: RewardPool, pairs: Iterable[tuple[str, str]], **prompt) -> list[Verdict]:
    """Return the verdicts on (response, gold answer) pairs, each a group."""
    futures = [submit(pool, *pair, **prompt) for pair in pairs]
    return [future.result(timeout=100)[0] for future in futures]


def judge_groups(
    config: Config,
    *groups: Sequence[str | Completion],
    split: Callable[[list[int]], Sequence[str]] = lambda _: (),
    columns: str = "",
) -> tuple[list[Group], int]:
    """Return groups of responses to the answer 7, and the number of killed processes."""
    pool = RewardPool(config.reward, split)
    with contextlib.closing(Judge(config, pool)) as judge:
        pending = []
        for i, texts in enumerate(groups):
            whole = (say(own) if isinstance(own, str) else own for own in texts)
            numbered = (dataclasses.replace(own, sample=j) for j, own in enumerate(whole))
            prompt = make_prompt(i, "7", columns=columns)
            pending.append(judge.submit(prompt, tuple(numbered)))
        return judge.groups(pending), pool.kills
