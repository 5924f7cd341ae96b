"""Seconds of a rollout whose rewards take long: decoding must not wait for them.

python tests/benchmarks/slow_rewards.py   # rewards of 0, 0.5, 1 and 5 s, random around it
"""

import pathlib
import sys
import threading
import time
from concurrent.futures import Future

import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "support"))

from scripted_sampler import ScriptedSampler

from dapo_jax.config.experiment import Config, Data, Rollout
from dapo_jax.data.prompt_stream import PromptStream
from dapo_jax.extras.arithmetic import arithmetic_tokenizer
from dapo_jax.rewards.group_rewards import Judge
from dapo_jax.rollout.dynamic_sampling import Collection, collect
from dapo_jax.types.structs import CollectedGroups, Verdict

BURST_SECONDS = 0.05
GROUPS = 32
SAMPLES = 4


class SlowPool:
    """Pool whose rewards take a random time around `seconds`; half of the responses are correct."""

    running = ()

    def __init__(self, seconds: float, seed: int = 0):
        self._seconds = seconds
        self._random = np.random.default_rng(seed)
        self.longest = 0.0
        self.ends = {}  # by prompt, when its last reward is there

    def submit_group(self, prompt, completions):
        future = Future()
        seconds = max(self._seconds * self._random.uniform(0.5, 1.5) for _ in completions)
        self.longest = max(self.longest, seconds)
        self.ends[prompt.index] = time.monotonic() + seconds
        right = prompt.index % 3 > 0
        verdicts = [Verdict(i % 2 == 0 and right, "1") for i in range(len(completions))]

        def reply() -> None:
            if future.set_running_or_notify_cancel():
                future.set_result(verdicts)

        if seconds:
            timer = threading.Timer(seconds, reply)
            timer.daemon = True
            timer.start()
        else:
            reply()
        return future


class TimedSampler(ScriptedSampler):
    """Sampler whose bursts take `seconds`."""

    seconds = BURST_SECONDS

    def step(self, meanwhile=lambda: None):
        end = time.monotonic() + self.seconds
        finished = super().step(meanwhile)
        time.sleep(max(0.0, end - time.monotonic()))
        return finished


def roll_out(seconds: float, seed: int = 0, burst_seconds=BURST_SECONDS, **rollout):
    """Return the groups of a rollout, its seconds, those of its slowest reward, and the least.

    The least: all groups up to the last that is kept, in data order, are decoded and scored.
    """
    settings = Rollout(GROUPS, SAMPLES, updates_per_rollout=1, **rollout)
    config = Config(data=Data(train_problems=1000), rollout=settings)
    sampler = TimedSampler(lambda i: 6 + i % 5, slots=48)
    sampler.seconds = burst_seconds
    pool = SlowPool(seconds, seed)
    prompts = PromptStream(config.data, 0, arithmetic_tokenizer())
    start = time.monotonic()
    collection, judge = Collection(config, 0.67, 0), Judge(config, pool)
    collected: CollectedGroups = collect(collection, prompts, sampler, judge)
    seconds, last = time.monotonic() - start, collected.groups[-1].prompt.index
    least = max(end for index, end in pool.ends.items() if index <= last) - start
    return collected, seconds, pool.longest, least, sampler.counts


def main() -> None:
    print("reward s  rollout s  slowest s  least s  bursts  groups scored")
    for seconds in (0.0, 0.5, 1.0, 5.0):
        collected, took, longest, least, counts = roll_out(seconds)
        kept = [group.prompt.index for group in collected.groups]
        scored = len(collected.scored)
        numbers = f"{seconds:8} {took:10.2f} {longest:10.2f} {least:8.2f}"
        numbers += f" {counts.bursts:7} {scored:10}"
        print(f"{numbers}  {kept[0]}..{kept[-1]}", flush=True)


if __name__ == "__main__":
    main()
