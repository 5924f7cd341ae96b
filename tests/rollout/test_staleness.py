"""rollout.staleness: later steps are sampled while the policy is updated."""

import dataclasses
import functools
import itertools
import json
import pathlib
import sys
import types

import jax
import numpy as np
import pytest
from kept_groups import differing, make_kept
from small_runs import open_run, read_rollouts, read_rows

from dapo_jax.config.experiment import Checkpoint, Mesh, Rollout
from dapo_jax.learner import update
from dapo_jax.rollout import source
from dapo_jax.rollout.dynamic_sampling import Starved
from dapo_jax.rollout.sampling import SAMPLE_FOR_TRAINING
from dapo_jax.run.loop import train
from dapo_jax.runtime.sampler_devices import split_devices
from dapo_jax.types.errors import ConfigError
from dapo_jax.types.structs import Interrupted, RolloutKey


def test_the_second_step_is_sampled_by_the_policy_before_the_first_update(
    tiny_folder, score_folder, tmp_path, monkeypatch, alone
):
    loaded = []  # for which step, when an update begins: later it would wait for the update
    with open_run(make_stale(tiny_folder, score_folder, tmp_path / "run", 1)) as run:
        before = jax.tree.map(np.asarray, run.state.learners.policy.params)

        def note(*arguments):
            loaded.append(run.components.sampler.key)
            return update.update(*arguments)

        monkeypatch.setattr(sys.modules["dapo_jax.step"], "update", note)
        run.step()
        changed = jax.tree.leaves(
            jax.tree.map(lambda a, b: (a != b).any(), before, run.state.learners.policy.params)
        )
        state = run.state.source
        assert state.behaviour is None
        (ahead,) = state.ahead
        following = dataclasses.replace(state, position=ahead.batch.judged[0].prompt.index)
        now = run.trainer.source.sample(following, run.components.first_params(), 1, 0)
    tokens = [
        [c.tokens.tolist() for group in groups for c in group.completions]
        for groups in (ahead.groups, now.groups)
    ]
    assert any(changed) and tokens[0] == tokens[1] != []
    assert loaded == [RolloutKey(SAMPLE_FOR_TRAINING, 1)] * 2


def make_stale(tiny_folder, score_folder, run_dir, staleness, setting="plain", **changes):
    """Five steps, or `changes`, with the default checkpoints of a run that saves every step."""
    rollout = Rollout(4, 4, updates_per_rollout=2, staleness=staleness)
    settings = {"total_steps": 5, "checkpoint": Checkpoint(every_steps=1, keep=1)} | changes
    return make_kept(setting, tiny_folder, score_folder, run_dir, rollout=rollout, **settings)


@pytest.fixture(scope="module")
def make_wide(tiny_folder, score_folder):
    """Make a run of four steps on eight devices, or on others."""

    def make(run_dir, mesh=Mesh(data=2, fsdp=2, tensor=2)):  # noqa: B008
        return make_stale(tiny_folder, score_folder, run_dir, 1, total_steps=4, mesh=mesh)

    return make


@pytest.fixture(scope="module")
def finished(make_wide, tmp_path_factory):
    config = make_wide(tmp_path_factory.mktemp("stale") / "run")
    train(config)
    return pathlib.Path(config.run_dir)


def interrupt(run, interrupted) -> None:
    changed = dataclasses.replace(run.trainer.source, interrupted=interrupted)
    run.trainer = dataclasses.replace(run.trainer, source=changed)


@pytest.mark.slow
def test_a_signal_or_starvation_ahead_loses_no_step(make_wide, finished, tmp_path, monkeypatch):
    with open_run(make_wide(tmp_path / "run")) as run:
        run.begin()
        bursts = itertools.count()
        interrupt(run, lambda: run.state.step == 1 and next(bursts) > 1)
        run.step()
        ahead = run.state.source.ahead
        run.step()
        assert (run.state.step, run.state.source.ahead) == (2, ()) and len(ahead) == 1
        assert run.state.source.behaviour is not None
        collect = source.collect
        monkeypatch.setattr(source, "collect", starve)
        interrupt(run, lambda: False)
        with pytest.raises(Starved):
            run.step()
        monkeypatch.setattr(source, "collect", collect)
        run.checkpoints.close()
    train(make_wide(tmp_path / "run"))
    assert read_rows(tmp_path / "run") == read_rows(finished)
    assert read_rollouts(tmp_path / "run") == read_rollouts(finished)


def starve(*arguments, **options):
    raise Starved


def train_with_stops(config, bursts) -> int:
    """Train; stop after twice `bursts` bursts, then twice as many. Return the number of starts."""
    for starts in itertools.count(1):
        with open_run(config) as run:
            left = iter(range(bursts << starts))
            interrupt(run, lambda left=left: next(left, None) is None)
            try:
                while run.state.step < config.total_steps:
                    run.step()
                run.finish()
                return starts
            except Interrupted:
                run.keep()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("staleness", "setting"),
    [
        *((1, "plain"), (2, "plain"), (4, "plain"), (2, "turns"), (4, "adapters")),
        *((1, "adaptive"), (2, "interpolated")),
    ],
)
def test_stopped_runs_repeat_the_uninterrupted_one(
    staleness, setting, tiny_folder, score_folder, tmp_path, alone
):
    make = functools.partial(make_stale, tiny_folder, score_folder)
    whole = make(tmp_path / "whole", staleness, setting)
    train(whole)
    stopped = make(tmp_path / "run", staleness, setting)
    assert train_with_stops(stopped, bursts=16) > 1
    assert differing(tmp_path / "run", tmp_path / "whole") == []
    rows = read_rows(tmp_path / "whole")
    assert read_rows(tmp_path / "run") == rows
    assert [row["policy_lag"] for row in rows] == [min(i, staleness) for i in range(5)]


@pytest.mark.slow
def test_a_longer_run_needs_policies_that_are_gone(tiny_folder, score_folder, tmp_path, alone):
    make = functools.partial(make_stale, tiny_folder, score_folder, tmp_path / "run", 2)
    train(make(total_steps=2))
    with pytest.raises(ConfigError, match="config.total_steps = 5: must be what it was"):
        train(make())


def responses(run_dir) -> list[tuple[int, int, str]]:
    lines = (json.loads(x) for text in read_rollouts(run_dir).values() for x in text.splitlines())
    return [(line["index"], line["sample"], line["response"]) for line in lines]


@pytest.mark.slow
def test_dedicated_sampling_devices_sample_the_same(make_wide, finished, tmp_path):
    """Four train and four sample: the same tokens as eight that do both."""
    train(make_wide(tmp_path / "run", Mesh(data=1, fsdp=2, tensor=2, sampler_share=0.5)))
    assert responses(tmp_path / "run") == responses(finished)
    for row, expected in zip(read_rows(tmp_path / "run"), read_rows(finished), strict=True):
        assert row == pytest.approx(expected, rel=1e-3, abs=1e-5)


def test_a_flat_torus_of_several_hosts_cannot_be_split():
    """Their compiler aborts where a program's chips have gaps between them."""
    chips = [
        types.SimpleNamespace(
            platform="tpu", device_kind="TPU v5 lite", process_index=y // 2, coords=(x, y, 0)
        )
        for y in range(4)
        for x in range(2)
    ]
    with pytest.raises(ConfigError, match="mesh.sampler_share = 0.5: must be 0 on several hosts"):
        split_devices(chips, 0.5, 1)
    learning, sampling = split_devices(chips[:4], 0.5, 1)  # of one host
    assert (learning, sampling) == (chips[:2], chips[2:4])
