"""Print a table of all tasks of the installed reasoning-gym.

    PYTHONPATH=tests/support python tests/benchmarks/gym_gym.py [TASK ...]

A row has the task; the seconds of opening it twice; how many of 32 items the package's own answers
win; how many its most frequent answer wins; the constant answer that wins most, with its items; or
the reason why the task is rejected.
"""

import collections
import contextlib
import os
import sys
import time

from gym_items import CONSTANTS, QUESTION, WITHOUT_ANSWER, every_task, gold

from dapo_jax.config.experiment import Reward
from dapo_jax.rewards import gym
from dapo_jax.rewards.pool import RewardPool
from dapo_jax.runtime.settings import ConfigError

ITEMS = 32


def row(pool: RewardPool, task: str) -> list[str]:
    began = time.monotonic()
    try:
        for _ in range(2):  # as training and held-out problems
            dataset = gym.open_task("data.source", task, 1, ITEMS)
    except ConfigError as error:
        reason = str(error).split(": ", 1)[1].split("; reasoning")[0]
        return [task, "", "", "", "", reason]
    seconds = time.monotonic() - began
    items = [dataset[i] for i in range(ITEMS)]

    def wins(answers: list[str]) -> int:
        pending = [
            pool.submit("", f"<answer>{text}</answer>", gold(item), f"gym:{task}", packed)
            for text, item, packed in zip(answers, items, map(gym.pack_item, items), strict=True)
        ]
        return sum(future.result(timeout=900).correct for future in pending)

    def of_constant(text: str) -> list[str]:
        return [item["question"] if text is QUESTION else text for item in items]

    golds = list(map(gold, items))
    own = "none given" if task in WITHOUT_ANSWER else str(wins(golds))
    most = collections.Counter(golds).most_common(1)[0][1] if any(golds) else 0
    best = max(CONSTANTS, key=lambda text: wins(of_constant(text)))
    won = wins(of_constant(best))
    shown = best if best is QUESTION else repr(best)
    return [task, f"{seconds:.1f}", own, str(most), f"{shown} {won}" if won else "0", ""]


def main() -> None:
    from reasoning_gym import factory  # pyright: ignore[reportMissingImports]: an extra

    reward = Reward(verifier="math", parts="gym=1", workers=1)
    with contextlib.closing(RewardPool(reward)) as pool:
        for task in sys.argv[1:] or every_task(factory):
            print("|", " | ".join(row(pool, task)), "|", flush=True)
    os._exit(0)  # some tasks leave threads behind


if __name__ == "__main__":
    main()
