"""The folder of a run where a model folder is expected."""

import dataclasses
import json
import pathlib
import shlex
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from served import http_serving, reopen
from small_runs import make_evaluation, run_evaluation

from dapo_jax.config.experiment import Config
from dapo_jax.extras.serve import policy
from dapo_jax.model import load_huggingface
from dapo_jax.run import export
from dapo_jax.run.export import SavedPolicy
from dapo_jax.run.store import checkpoint_folder
from dapo_jax.runtime import processes, registry
from dapo_jax.types.errors import ConfigError


@pytest.fixture
def run(saved_run, tmp_path, monkeypatch) -> str:
    """A run with checkpoints of steps 1 and 2, in the working folder."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(saved_run[0], "runs/mine")
    pathlib.Path("runs/mine/config.json").write_text(json.dumps(dataclasses.asdict(Config())))
    return "runs/mine"


def test_the_newest_checkpoint_is_exported_once(run, capsys):
    with ThreadPoolExecutor(3) as pool:
        folders = list(pool.map(lambda _: export.newest_export(run, "model"), range(3)))
    assert folders == ["runs/mine/exported/mine-step2"] * 3
    assert capsys.readouterr().out.count("written to") == 1
    layer = next(iter(load_huggingface.read_layers(folders[0], ["embedding"], decoder(folders[0]))))
    assert (layer[1](0) == SavedPolicy(run, 2).read("embedding")).all()
    # An older newest checkpoint, as after a run that lost its last one, gets another folder.
    shutil.rmtree(checkpoint_folder(run) / "2")
    assert export.newest_export(run, "model") == "runs/mine/exported/mine-step1"
    assert export.newest_export(folders[0], "model") == folders[0]
    assert export.newest_export("dapo_jax:arithmetic_base", "model") == "dapo_jax:arithmetic_base"


def decoder(folder: str):
    return load_huggingface.read_config(folder)


def test_serve_takes_a_run_and_names_it_for_clients(run, byte_engine, monkeypatch):
    loaded, load = [], reopen(byte_engine)
    monkeypatch.setattr(policy, "load_served", lambda config: loaded.append(config) or load(config))
    monkeypatch.setattr(policy, "warm_up", lambda *args: None)
    with http_serving(run, served_name="") as (_, client):
        assert [model.id for model in client.models.list()] == ["mine"]
        assert client.completions.create(model="mine", prompt="3+4=", max_tokens=2).choices
    assert [config.model for config in loaded] == ["runs/mine/exported/mine-step2"]


def test_evaluate_takes_a_run(run, alone, tmp_path):
    scores = run_evaluation(make_evaluation(run, "scores", samples=1))
    assert scores["policy"] == "runs/mine/exported/mine-step2"
    (report,) = tmp_path.glob("scores/evaluations/mine-step2_*/report.json")
    assert json.loads(report.read_text())["problems"] == scores["problems"] > 0


@pytest.mark.parametrize("several", [False, True])
def test_a_run_that_cannot_be_exported_into_names_the_command(run, several, monkeypatch, capsys):
    with monkeypatch.context() as patch, pytest.raises(ConfigError) as raised:
        if several:
            patch.setattr(processes, "count", lambda: 2)
            patch.setattr(export, "newest_step", lambda *args, **options: 2)
            patch.setattr(processes, "broadcast_from_host0", lambda work, name: work())
        else:
            pathlib.Path(run, "exported").write_text("in the way")
        export.newest_export(run, "model")
    check_command(str(raised.value), "config.model = 'runs/mine': can't export the run", capsys)


def check_command(message: str, words: str, capsys) -> None:
    """Run the command that ends an error, and read the folder that it writes."""
    assert words in message and "\n" not in message
    _, name, *arguments = shlex.split(message.partition("export it first: ")[2])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [name, *arguments])
        assert registry.find("commands", name)() == 0, capsys.readouterr().err
    load_huggingface.check_weights("models/mine")


def test_training_from_a_run_names_the_command(run, capsys):
    with pytest.raises(ConfigError) as raised:
        load_huggingface.read_config(run, field="start")
    check_command(str(raised.value), "config.start = 'runs/mine': is a run, not a model", capsys)
