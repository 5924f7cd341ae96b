"""Metrics of a step: when they are computed. What they mean is tested where they are defined."""

import jax

from dapo_jax.config.experiment import Config
from dapo_jax.rollout.source import Rollout
from dapo_jax.run import step_record
from dapo_jax.runtime.clock import Clock
from dapo_jax.structs import CollectedGroups, SamplerCounts
from dapo_jax.train import StepRecord


def test_hosts_compute_their_metrics_before_they_wait_for_the_updates(monkeypatch):
    events, device_get, of_rollouts = [], jax.device_get, step_record.rollout_metrics

    def note(name, function):
        return lambda *args: (events.append(name), function(*args))[1]

    monkeypatch.setattr(jax, "device_get", note("devices", device_get))
    monkeypatch.setattr(step_record, "rollout_metrics", note("hosts", of_rollouts))
    batch = CollectedGroups([], [], [], 0, [], 1, 0.5, 1, 0, 0, False)
    record = StepRecord(0, Rollout(batch, SamplerCounts(tokens=30), 2.0))
    values = step_record.measure(Config(), record, Clock())
    assert events == ["hosts", "devices"] and values["sampled_tokens_per_second"] == 15
