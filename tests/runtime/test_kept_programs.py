"""Programs that a second run finds compiled: which they are, and that its results do not change."""

import collections
import contextlib
import gc

import jax
import numpy as np
import pytest
from conftest import TINY
from learners import make_batch, place
from small_runs import equal, make_quick_config, read_rollouts, read_rows

import dapo_jax
from dapo_jax import algorithms
from dapo_jax.config.experiment import Config, Log
from dapo_jax.run.build import open_learners
from dapo_jax.run.console import PROGRAMS
from dapo_jax.run.export import SavedPolicy
from dapo_jax.runtime.kept_programs import forget_programs

TRACED, COMPILED = "jaxpr_trace_duration", "backend_compile_duration"
pytestmark = pytest.mark.usefixtures("fresh_programs")


@contextlib.contextmanager
def counted():
    """Programs of ours that are traced meanwhile, by name, and everything that is compiled."""
    found, of_ours = collections.Counter(), {name[4:-1] for name in PROGRAMS}

    def count(event: str, seconds: float, fun_name: str = "", **_) -> None:
        kind = event.rpartition("/")[2]
        name = fun_name.removeprefix("jit(").removesuffix(")")
        found[COMPILED] += kind == COMPILED
        if kind == TRACED and name in of_ours:
            found[name] += 1

    jax.monitoring.register_event_duration_secs_listener(count)
    try:
        yield found
    finally:
        jax.monitoring.unregister_event_duration_listener(count)


def make_config(base, folder, **changes) -> Config:
    log = Log(0, tensorboard=False, report=False)
    config = make_quick_config(base, folder, log=log, **changes)
    config.checkpoint.every_steps = 2
    return config


def results(folder):
    saved = SavedPolicy(str(folder), 2)
    weights = {path: np.asarray(saved.read(path)) for path in saved.shapes()}
    return read_rows(folder), read_rollouts(folder), weights


@pytest.mark.slow
def test_a_second_run_compiles_nothing_and_has_the_bits_of_a_first_one(base, tmp_path, alone):
    """And what is kept for it holds no parameters."""
    dapo_jax.train(make_config(base, tmp_path / "first"))
    with counted() as second:
        dapo_jax.train(make_config(base, tmp_path / "second"))
    assert not +second, second
    changed = algorithms.dapo()
    changed.entropy_coefficient = 0.1
    with counted() as other:
        dapo_jax.train(make_config(base, tmp_path / "other", algorithm=changed))
    assert other["_update_fn"] == 1 and not other["_generate"], "only the learner is another one"
    forget_programs()
    jax.clear_caches()  # as in a new process
    gc.collect()
    before = sum(array.nbytes for array in jax.live_arrays())
    with counted() as fresh:
        dapo_jax.train(make_config(base, tmp_path / "fresh"))
    gc.collect()
    kept = sum(array.nbytes for array in jax.live_arrays()) - before
    assert all(fresh[name] for name in ("_update_fn", "_generate", "_prefill")), fresh
    rows, rollouts, weights = results(tmp_path / "first")
    assert kept < 10_000 < sum(weight.nbytes for weight in weights.values())
    for name in ("second", "fresh"):
        found = results(tmp_path / name)
        assert found[:2] == (rows, rollouts) and equal(found[2], weights), name
    assert not equal(results(tmp_path / "other")[2], weights)


def test_a_config_that_changes_afterwards_changes_no_program(tiny_params, one_device):
    def learner(config: Config):
        return open_learners(config, TINY, one_device, None).policy

    def gradient(one):
        batch, used = make_batch()
        return one.differentiate(place(tiny_params, one), batch, used)[0]

    config = Config()
    first = learner(config)
    config.algorithm.entropy_coefficient = 0.1  # before anything is traced
    assert learner(Config()) is first and learner(config) is not first
    of_first, of_changed = gradient(first), gradient(learner(config))
    forget_programs()
    assert equal(of_first, gradient(learner(Config()))) and not equal(of_first, of_changed)


WARM_STEPS, STEPS = 6, 20


@pytest.mark.slow
def test_twenty_steps_of_varied_lengths_compile_in_the_first_ones_only(
    base, tmp_path, alone, fresh_programs
):
    by_step, lengths = [], []

    def on_step(step: int, values: dict[str, float]) -> None:
        by_step.append(compiled[COMPILED])
        lengths.append((values["response_tokens_mean"], values["trained_groups"]))

    config = make_quick_config(base, tmp_path / "run", total_steps=STEPS)
    with counted() as compiled:
        dapo_jax.train(config, on_step=on_step)
    assert len(set(lengths)) > STEPS / 2 and len(by_step) == STEPS
    assert by_step[0] > 0 and by_step[WARM_STEPS - 1] == by_step[-2], np.diff(by_step)
