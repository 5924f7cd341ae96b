"""Trackers: wrong settings are rejected before the run; otherwise they get the same rows."""

import sys

import pytest

from dapo_jax.config.experiment import Config, Log
from dapo_jax.extras.trackers import TensorBoardEvents, WandbSink, check_trackers
from dapo_jax.run import checks
from dapo_jax.types.errors import ConfigError


@pytest.mark.parametrize(
    ("log", "words"),
    [(Log(wandb=project), "must be empty, or at most") for project in ("a/b", "a:b", " a")]
    + [(Log(wandb="a" * 129), "must be empty, or at most")]
    + [(Log(wandb="p"), "'p': must be empty .* pip install wandb")]
    + [(Log(tensorboard=True), "= True: must be false .* pip install tensorboard")],
)
def test_names_and_missing_packages_stop_before_the_run(log, words, monkeypatch):
    for package in ("wandb", "tensorboard"):
        monkeypatch.setitem(sys.modules, package, None)
    checks.check(Config())
    with pytest.raises(ConfigError, match=words):
        checks.check(Config(log=log))


def test_a_folder_of_offline_runs_is_no_package(monkeypatch, tmp_path):
    (tmp_path / "wandb").mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    with pytest.raises(ConfigError, match="must be empty without the package"):
        check_trackers(Log(wandb="p"))


def test_tensorboard_reads_the_rows(tmp_path):
    loader = pytest.importorskip("tensorboard.backend.event_processing.event_file_loader")
    TensorBoardEvents(tmp_path, 1).on_row(2, {"reward": 0.5, "entropy": 1.0})
    (path,) = (tmp_path / "tensorboard").iterdir()
    version, start, row = loader.LegacyEventFileLoader(str(path)).Load()
    assert version.file_version == "brain.Event:2"
    assert (start.step, start.session_log.status) == (2, 1)
    values = {value.tag: value.simple_value for value in row.summary.value}
    assert (row.step, values) == (2, {"reward": 0.5, "entropy": 1.0})


class Service:
    """What the sink uses of wandb; `lost` rows of a start are not sent when it is killed."""

    def __init__(self, offline):
        self.offline, self.sent, self.waiting = offline, [], []

    def init(self, **settings):
        self.id, self.waiting = settings["id"], []
        self.starting_step = 0 if self.offline else max(self.sent, default=-1) + 1
        return self

    def Settings(self, **settings):
        return settings

    def log(self, values, step, commit):
        self.waiting.append(step)

    def kill(self, lost):
        self.sent += self.waiting[: len(self.waiting) - lost]

    def finish(self, exit_code):
        self.sent += self.waiting


@pytest.mark.parametrize(("offline", "lost"), [(False, 2), (False, 0), (True, 2), (True, 0)])
def test_rows_that_a_kill_kept_from_the_service_are_sent_later(
    offline, lost, monkeypatch, tmp_path
):
    service = Service(offline)
    monkeypatch.setitem(sys.modules, "wandb", service)
    config = Config(run_dir=str(tmp_path), log=Log(wandb="project"))
    rows = [{"step": step, "time": 1.0, "reward": 0.5} for step in range(9)]
    sink = WandbSink(tmp_path, config, [])
    for step in range(3):
        sink.on_row(step, {})
    sink.close(False)
    sink = WandbSink(tmp_path, config, rows[:3])
    for step in range(3, 6):
        sink.on_row(step, {})
    service.kill(lost)
    sink = WandbSink(tmp_path, config, rows[:5])  # up to the newest checkpoint
    for step in range(5, 7):
        sink.on_row(step, {})
    sink.close(False)
    again = list(range(3, 6 - lost)) if offline else []
    assert sorted(service.sent) == sorted([*range(7), *again])
