"""Sinks: a tracker is one class, and it receives what a run reports."""

from small_runs import make_quick_config, open_run, read_rows

from dapo_jax.contracts import RunSink
from dapo_jax.reporting.trackers import Sink


class Recorder(Sink):
    def __init__(self):
        self.rows = {}
        self.groups = []

    def on_row(self, step, values):
        self.rows[step] = values

    def on_rollouts(self, step, collected):
        self.groups += collected.groups


def test_a_tracker_receives_the_rows_and_groups_of_a_run(base, alone, tmp_path):
    recorder = Recorder()
    tracker: RunSink = recorder
    with open_run(make_quick_config(base, tmp_path, updates=1)) as run:
        run.files.sinks.append(tracker)
        run.step()
    (row,) = read_rows(tmp_path)
    assert row.items() <= (recorder.rows[1] | {"step": 1}).items()
    assert len(recorder.groups) == row["trained_groups"] > 0
