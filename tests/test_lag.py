"""rollout.lag: the next step's groups are collected while this one is learned."""

import threading

import jax
import numpy as np
import pytest
from small_runs import (
    make_quick_config,
    make_small_base,
    open_run,
    read_rollouts,
    read_rows,
)

from dapo_jax import ahead, algorithms, cli
from dapo_jax.experiment.config import Checkpoint, Config, Data, Evaluation, Log, Mesh, Rollout
from dapo_jax.experiment.settings import ConfigError
from dapo_jax.filtering import Interrupted
from dapo_jax.run import train


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return make_small_base(tmp_path_factory.mktemp("lag") / "base")


def make_config(base, run_dir, lag=1, **changes) -> Config:
    algorithm = algorithms.dapo()
    algorithm.importance_cap = 2.0
    settings = {
        "algorithm": algorithm,
        "total_steps": 4,
        "data": Data(min_terms=2, max_terms=3, max_prompt_tokens=8, heldout_problems=4),
        "rollout": Rollout(4, 4, updates_per_rollout=2, lag=lag),
        "checkpoint": Checkpoint(every_steps=1, keep=9),
        "evaluation": Evaluation(every_steps=2, samples_per_problem=1, top_p=1.0),
        "log": Log(show_group_every_steps=0, tensorboard=False),
        "mesh": Mesh(data=2, fsdp=2, tensor=2),
    }
    return make_quick_config(base, run_dir, **settings | changes)


@pytest.fixture(scope="module")
def finished(base, tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("lag") / "run"
    train(make_config(base, run_dir))
    return run_dir


def test_responses_are_one_policy_old_from_the_second_step_on(finished):
    assert [row["policy_lag"] for row in read_rows(finished)[1:]] == [0, 1, 1, 1]


def test_the_same_run_twice_is_the_same(base, finished, tmp_path):
    train(make_config(base, tmp_path / "again"))
    assert read_rows(tmp_path / "again") == read_rows(finished)
    assert read_rollouts(tmp_path / "again") == read_rollouts(finished)


def test_the_first_step_and_the_data_are_those_of_a_run_without_lag(base, finished, tmp_path):
    train(make_config(base, tmp_path / "run", lag=0, total_steps=1))
    first = "step_000001.jsonl"
    assert read_rollouts(tmp_path / "run")[first] == read_rollouts(finished)[first]


def test_the_second_step_is_drawn_by_the_policy_before_the_first_update(base, tmp_path):
    with open_run(make_config(base, tmp_path / "run")) as run:
        before = jax.tree.map(np.asarray, run.state.train.params)
        run.step()
        jax.tree.map(np.testing.assert_array_equal, before, run.state.behaviour)
        changed = jax.tree.leaves(
            jax.tree.map(lambda a, b: (a != b).any(), before, run.state.train.params)
        )
        ahead_groups = run.state.ahead.result().collected.groups
        order = ahead.Order(
            run.parts.learner.copy(run.state.behaviour), 0, 1, run.state.position,
            run.state.kept_fraction,
        )  # fmt: skip
        now = ahead.make_rollouts(run.parts, order, lambda: False)
    tokens = [
        [c.tokens.tolist() for group in groups for c in group.completions]
        for groups in (ahead_groups, now.collected.groups)
    ]
    assert any(changed) and tokens[0] == tokens[1] != []


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    "stop_after", [2, pytest.param(1, marks=SLOW), pytest.param(3, marks=SLOW)]
)
def test_a_stopped_run_resumes_bit_for_bit(stop_after, base, finished, tmp_path):
    """Stopped with rollouts of the next step under way, which are then made again."""
    with open_run(make_config(base, tmp_path / "run")) as run:
        run.begin()
        for _ in range(stop_after):
            run.step()
        run.state.ahead.exception()
        run.checkpoints.close()
    train(make_config(base, tmp_path / "run"))
    assert read_rows(tmp_path / "run") == read_rows(finished)
    assert read_rollouts(tmp_path / "run") == read_rollouts(finished)


def test_what_happens_in_the_background_reaches_the_next_step(base, tmp_path, monkeypatch):
    with open_run(make_config(base, tmp_path / "run")) as run:
        interrupted = threading.Event()
        run.signals = interrupted.is_set
        run.step()
        run.state.ahead.exception()
        interrupted.set()
        with pytest.raises(Interrupted):
            run.step()
        assert run.state.step == 1

    collect = ahead.collect

    def broken_beside_an_update(*arguments, **options):
        if threading.current_thread() is not threading.main_thread():
            raise ZeroDivisionError
        return collect(*arguments, **options)

    monkeypatch.setattr(ahead, "collect", broken_beside_an_update)
    with open_run(make_config(base, tmp_path / "other")) as run:
        run.step()
        with pytest.raises(ZeroDivisionError):
            run.step()


def test_a_lag_is_0_or_1_and_asks_for_importance_weights(base, tmp_path):
    config = make_config(base, tmp_path / "run")
    config.rollout.lag = 2
    with pytest.raises(ConfigError, match="rollout.lag = 2: must be 0 or 1"):
        cli.check(config)
    config.rollout.lag, config.algorithm.importance_cap = 1, 0.0
    with pytest.raises(ConfigError, match="rollout.lag = 1: must be 0 without .*importance_cap"):
        cli.check(config)
