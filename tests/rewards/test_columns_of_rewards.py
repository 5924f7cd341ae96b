"""Reward functions that take columns of the row, and those that keep a run waiting."""

import json
import re
import time

import numpy as np
import pytest
from scored import judge_groups, register

from dapo_jax.config.experiment import Config, Reward
from dapo_jax.rewards.functions import GroupCall, find_functions, wanted_columns
from dapo_jax.types.errors import ConfigError
from dapo_jax.types.structs import WantedColumns

COLUMNS = {"tests": [[1, 2], [3, 4]], "rubric": {"weight": 0.5}, "tokens": 9, "id": "a"}
COLUMNS["answer"] = {"gold": [1]}  # arrives as an object


def judge_group(names: list[str], columns=COLUMNS, **reward):
    """The group of two responses through the real judge, pool and workers."""
    parts = ",".join(f"{name}=1" for name in names)
    config = Config(reward=Reward(parts=parts, correct="threshold", **reward))
    sent = json.dumps(columns) if columns else ""
    split = lambda ids: [*"abcdef"][: len(ids)]  # noqa: E731
    ((group,), _) = judge_groups(config, ("a", "bb"), split=split, columns=sent)
    return group


def make_functions() -> list:
    """Functions that workers get as copies, without the imports of this module."""

    def named(prompt, response, answer, tests, rubric, missing=2):
        tests.append(1)  # of this call alone
        return len(tests) + rubric["weight"] + missing

    def every(prompt, response, answer, **columns):
        return float(len(columns) == 4 and columns["tokens"] == 9 and answer == {"gold": [1]})

    async def waits(prompt, response, answer, *, tests, **others):
        return sum(map(sum, tests)) + len(others)

    def group_of(prompt, responses, answer, lengths, correct, tests, **others):
        return [len(text) + len(tests) + len(others) + len(answer["gold"]) for text in responses]

    def by_tokens(prompt, response, answer, tokens, rubric):
        return [rubric["weight"]] * len(tokens)

    return [named, every, waits, group_of, by_tokens]


@pytest.mark.parametrize("in_process", [False, True])
def test_functions_receive_columns_of_any_json_type(in_process, capsys):
    names = register(*make_functions(), in_process=in_process)
    group = judge_group(names)
    assert not group.failed
    values = [group.reward_parts[name].tolist() for name in names]
    assert values == [[5.5, 5.5], [1, 1], [13, 13], [7, 8], [0.5, 1.0]]
    assert "waiting" not in capsys.readouterr().err  # rewards came soon


def test_columns_that_functions_take():
    functions = find_functions(register(*make_functions())).values()
    required, optional = frozenset({"tests", "rubric"}), frozenset({"missing"})
    assert wanted_columns(functions) == WantedColumns(required, optional, True)
    assert wanted_columns([]) == WantedColumns()


def test_an_argument_of_another_name_is_no_column():
    def score(prompt, completion, answer):
        return 0.0

    with pytest.raises(ConfigError, match="unexpected keyword argument 'response'; a reward is"):
        find_functions(register(score))


def test_a_function_without_its_column_breaks_its_group_alone():
    group = judge_group(register(make_functions()[0]), columns=None)
    assert group.is_broken and "named: " in group.first_failure
    assert "missing 2 required positional arguments" in group.first_failure


def test_a_reward_that_keeps_the_run_waiting_is_named(monkeypatch, capsys):
    monkeypatch.setattr("dapo_jax.rewards.group_rewards.NOTICE_SECONDS", 0.5)
    monkeypatch.setattr("dapo_jax.rewards.pool.LATE_FACTOR", 1)

    def hangs(prompt, response, answer):
        time.sleep(60)

    group = judge_group(register(hangs), None, timeout_seconds=0.5)
    assert group.is_broken
    lines = [line for line in capsys.readouterr().err.splitlines() if "for rewards" in line]
    assert 1 <= len(lines) <= 7  # each after twice the time of the last
    named = next(line for line in lines if "given:hangs is running" in line)
    assert re.match(r"warning: waiting \d s for rewards, 2 responses left: ", named)


# --- the signature of TRL ---------------------------------------------------------------------


def trl_all(prompts, completions, **columns):
    assert prompts == ["1+1="] * 2 and set(columns) == {"answer", "tests", "level"}
    return [len(c) + t[0] for c, t in zip(completions, columns["tests"], strict=True)]


def trl_named(completions, answer, level, other=None):
    assert other is None
    return np.array([float(a in c) + n for c, a, n in zip(completions, answer, level, strict=True)])


async def trl_async(*, completions, prompts):
    return [float(c.startswith(p)) for c, p in zip(completions, prompts, strict=True)]


def test_a_reward_with_the_signature_of_trl_gets_and_returns_lists():
    named = {f"test_columns_of_rewards:{f.__name__}": f for f in (trl_all, trl_named, trl_async)}
    functions = find_functions([*named])
    assert all(function.sees_group for function in functions.values())
    wanted = wanted_columns(functions.values())
    assert (wanted.required, wanted.optional, wanted.every) == ({"level"}, {"other"}, True)
    columns = json.dumps({"tests": [3], "level": 7})
    call = GroupCall("1+1=", ["1+1=2", "no"], "2", [5, 2], [True, False], columns)
    replies = [function.score(call, 5.0) for function in functions.values()]
    assert not any(reply.failure for reply in replies)
    rewards = [*(value for reply in replies for value in reply.parts.values())]
    assert rewards == [[8.0, 5.0], [8.0, 7.0], [1.0, 0.0]]
