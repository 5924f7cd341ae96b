"""Weights & Biases: projects that are rejected, and the rows that a run sends."""

import sys
import types

import pytest

from dapo_jax.commands import checks
from dapo_jax.config.experiment import Config, Log
from dapo_jax.reporting.wandb_tracker import RUN_ID, WandbSink, check_project
from dapo_jax.runtime.settings import ConfigError


@pytest.mark.parametrize("project", ["a/b", "a:b", " a", "a" * 129])
def test_a_project_name_that_wandb_rejects_is_rejected(project):
    with pytest.raises(ConfigError, match=r"config.log.wandb = .*: must be empty, or at most 128"):
        checks.check(Config(log=Log(wandb=project)))


def test_without_the_package_a_project_is_rejected(monkeypatch, tmp_path):
    check_project("")
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match=r"'p': must be empty .* pip install 'dapo_jax\[wandb\]'"):
        checks.check(Config(log=Log(wandb="p")))
    monkeypatch.delitem(sys.modules, "wandb")
    (tmp_path / "wandb").mkdir()  # offline runs leave such a folder
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    with pytest.raises(ConfigError, match="must be empty without the package"):
        check_project("p")


class FakeWandb(types.ModuleType):
    """The part of wandb that a run uses."""

    class Error(Exception):
        pass

    def __init__(self):
        super().__init__("wandb")
        self.sent = []
        self.error = ""

    def Settings(self, **settings):  # noqa: N802
        return settings

    def init(self, **settings):
        if self.error:
            raise self.Error(self.error)
        self.settings = settings
        self.step = 1 + max((step for step, _ in self.sent), default=-1)
        return self

    def log(self, values, step, commit):
        self.sent.append((step, values))

    def finish(self, exit_code):
        self.code = exit_code


def test_a_resumed_run_sends_new_rows_under_its_id(monkeypatch, tmp_path):
    wandb = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    config = Config(run_dir=str(tmp_path / "run"), log=Log(wandb="project"))
    identities = []
    for steps in (range(2), range(1, 3)):  # the second process repeats step 1
        sink = WandbSink(tmp_path, config)
        identities.append(wandb.settings["id"])
        for step in steps:
            sink.on_row(step, {"reward": step / 2})
        sink.close(failed=False)
    assert wandb.sent == [(step, {"reward": step / 2}) for step in range(3)] and wandb.code == 0
    assert identities == [(tmp_path / RUN_ID).read_text()] * 2
    assert wandb.settings["project"] == "project" and wandb.settings["name"] == "run"
    assert wandb.settings["config"]["algorithm"]["clip_high"] == 0.28
    wandb.error = "No API key\nconfigured"
    with pytest.raises(ConfigError, match="log.wandb = 'project': No API key configured$"):
        WandbSink(tmp_path, config)
