"""Functions that a program gives as rewards: lambdas and a notebook's, and those that wait."""

import asyncio
import contextlib
import functools
import os
import subprocess
import sys
import tempfile
import textwrap
import threading
import time

import jax.numpy as jnp
import numpy as np
import pytest
from scored import ask, register, submit

from dapo_jax.config.experiment import Reward
from dapo_jax.rewards.pool import RewardPool
from dapo_jax.runtime.workers import pickled_functions
from dapo_jax.runtime.workers.pickled_functions import register_function
from dapo_jax.types.errors import ConfigError

FACTOR = 2.0


def judge(responses: list[str], *functions, in_process=False, **reward) -> tuple[list, int]:
    """Rewards or failures of the responses through the real pool, and its killed workers."""
    names = register(*functions, in_process=in_process)
    parts = ",".join(f"{name}=1" for name in names)
    with contextlib.closing(RewardPool(Reward(parts=parts, **reward))) as pool:
        verdicts = ask(pool, [(response, "7") for response in responses])
    values = [(v.failure and v.failure.text) or [v.parts[name] for name in names] for v in verdicts]
    return [v[0] if isinstance(v, list) and len(v) == 1 else v for v in values], pool.kills


def test_lambdas_closures_and_objects_run_in_workers():
    table, here = {"a": 1.0, "b": np.float32(3)}, os.getpid()

    class Long:
        def __call__(self, prompt, response, answer):
            return len(response) > 1 and os.getpid() != here

    def closed(prompt, response, answer, *, more=10):
        return FACTOR * table[response[0]] + more

    found, kills = judge(
        ["a", "bb"],
        lambda prompt, response, answer: len(response),
        lambda prompt, response, answer: 10 * len(response),
        closed,
        functools.partial(closed, more=0),
        Long(),
    )
    assert found == [[1, 10, 12, 2, 0], [2, 20, 16, 6, 1]] and kills == 0


def test_a_function_of_a_program_runs_in_a_worker_with_its_helpers(tmp_path):
    """As in a notebook: module `__main__`, which a worker can't import again."""
    program = """
        import functools, os
        from dapo_jax.config.experiment import Reward
        from dapo_jax.rewards.pool import RewardPool
        from dapo_jax.runtime.workers.pickled_functions import register_function
        from scored import ask
        TRAINER = os.getpid()
        @functools.cache
        def helper(text):
            assert os.getpid() != TRAINER
            return len(text)
        class Named:
            def __reduce__(self):
                return "named"  # by name, which no worker knows
        named = Named()
        try:
            register_function(lambda prompt, response, answer: named, False)
        except ValueError as error:
            print("refused", "`named`" in str(error))
        def score(prompt, response, answer):
            if not response:
                return 1 / len(response)
            return helper(response)
        name = register_function(score, False)
        pool = RewardPool(Reward(parts=f"{name}=1"))
        verdicts = ask(pool, [("abc", "7"), ("", "7")])
        pool.close()
        print(name, verdicts[0].parts[name], verdicts[1].failure.text)
    """
    path = tmp_path / "program.py"
    path.write_text(textwrap.dedent(program))
    refused, said = subprocess.check_output(
        [sys.executable, path], text=True, timeout=100
    ).splitlines()
    assert refused == "refused True"
    assert said.startswith("given:score 3.0 given:score: ")
    assert "return 1 / len(response): ZeroDivisionError: division by zero" in said


LOCK = threading.Lock()


def test_a_function_that_can_not_be_copied_is_rejected_with_the_variable(monkeypatch):
    array, lock, rows = jnp.ones(3), threading.Lock(), list(range(100_000))
    monkeypatch.setattr(pickled_functions, "MAX_COPY_BYTES", 100_000)

    def ask(response):
        return LOCK and len(response)

    rejected = {
        "`array`: TypeError: a JAX array": lambda prompt, response, answer: array.sum(),
        "`lock`: TypeError: cannot pickle": lambda prompt, response, answer: lock.locked(),
        "`LOCK`": lambda prompt, response, answer: LOCK.locked(),
        "`ask`": lambda prompt, response, answer: ask(response),
        "worker process: TypeError: cannot pickle": lambda prompt, response, answer, held=lock: 1.0,
        "`rows`: ValueError: its copy has over 100,000": lambda prompt, response, answer: len(rows),
    }
    for words, function in rejected.items():
        with pytest.raises(ConfigError, match="config.reward.parts = <function") as error:
            register_function(function, False)
        assert words in str(error.value) and "in_process=True" in str(error.value)
        assert register_function(function, True).startswith("in_process:")


@pytest.mark.parametrize("in_process", [False, True])
def test_async_calls_do_not_wait_for_the_slowest(in_process):
    async def waits(prompt, response, answer):
        await asyncio.sleep(60 if response == "slow" else 0.01)
        return 1.0

    name = register_function(waits, in_process)
    pool = RewardPool(Reward(parts=f"{name}=1", timeout_seconds=100))
    slow, *others = (submit(pool, text) for text in ["slow", *"a" * 64])
    assert [future.result(timeout=50)[0].parts[name] for future in others] == [1.0] * 64
    assert not slow.done()
    pool.close()
    assert slow.cancelled() and submit(pool, "a").cancelled()


def test_what_failed_is_asked_once_more():
    seen = []

    def passing_later(name: str, response: str) -> float:
        seen.append((name, response))
        if response != "never" and seen.count((name, response)) < 2:
            raise RuntimeError("not yet")
        return float(seen.count((name, response)))

    def starts_a_loop(prompt, response, answer):
        async def value():
            return passing_later("loop", response)

        return asyncio.run(value())

    async def waits(prompt, response, answer):
        return passing_later("async", response)

    def of_group(responses, **others):
        return [passing_later("group", responses[0])] * len(responses)

    functions = starts_a_loop, waits
    found, kills = judge(["a", "b"], *functions)
    assert found == [[2.0, 2.0]] * 2 and kills == 0
    assert judge(["a"], *functions, in_process=True)[0] == [[2.0, 2.0]]
    assert judge(["c"], of_group, in_process=True)[0] == [2.0]


def test_a_call_that_waits_for_ever_or_holds_up_the_others_costs_itself(monkeypatch):
    monkeypatch.setattr("dapo_jax.rewards.pool.GRACE_SECONDS", 0.5)
    monkeypatch.setattr("dapo_jax.rewards.pool.LATE_FACTOR", 1)

    async def odd(prompt, response, answer):
        if response == "ever":
            await asyncio.Event().wait()
        if response == "deaf":
            time.sleep(60)
        if response == "leave":
            os.kill(os.getpid(), 9)
        return 1.0

    (one, ever, two), kills = judge(["a", "ever", "b"], odd, timeout_seconds=0.2)
    assert (one, two) == (1, 1) and "TimeoutError: no answer within 0.8 s" in ever and kills == 0
    found, kills = judge(["a", "deaf", "b", "leave", "c"], odd, timeout_seconds=0.5)
    assert found[::2] == [1, 1, 1] and "no answer in time" in found[1] and "died" in found[3]
    (ever, one), _ = judge(["ever", "a"], odd, in_process=True, timeout_seconds=0.1)
    assert one == 1 and "no answer within 0.4 s" in ever


def test_closing_a_pool_ends_calls_of_groups_and_deletes_the_copies(tmp_path, monkeypatch):
    async def forever(responses, **others):
        await asyncio.Event().wait()

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    parts = f"{register_function(forever, False)}=1"
    pool = RewardPool(Reward(parts=parts, timeout_seconds=100))
    futures = [submit(pool, "a") for _ in range(9)]
    assert list(tmp_path.iterdir())
    pool.close()
    assert all(future.cancelled() for future in futures) and not list(tmp_path.iterdir())
