"""Supervised training and offline pairs, stopped or killed, go on where they were."""

import os
import signal

import pytest
from supervised_runs import example_rows, pair_rows, read_metrics, settings

from dapo_jax.config.experiment import DpoConfig, Lora, SftConfig
from dapo_jax.run import supervised
from dapo_jax.run.checkpointing.checkpoints import SavedPolicy
from dapo_jax.run.supervised import make_base

SIDES = ("whole", "stopped")


class Killed(BaseException):
    """Ends a run as a kill would: nothing is saved any more."""


@pytest.mark.parametrize(
    "command",
    ["sft", *(pytest.param(c, marks=pytest.mark.slow) for c in ("dpo", "dpo of adapters"))],
)
@pytest.mark.parametrize("end", ["kill", pytest.param("signal", marks=pytest.mark.slow)])
def test_a_stopped_run_goes_on_bit_for_bit(
    end, command, tiny_folder, alone, tmp_path, monkeypatch, capfd
):
    kind, rows = (SftConfig, example_rows()) if command == "sft" else (DpoConfig, pair_rows())
    size: dict = {"examples_per_step": 14} if command == "sft" else {"pairs_per_step": 14}
    work = make_base if command == "sft" else supervised.prefer
    size["lora"] = Lora(rank=3 * ("adapters" in command))

    def config_in(folder):
        folder.mkdir(exist_ok=True)
        return kind(**settings(folder, rows, tiny_folder, save_every_steps=3, **size))

    whole = config_in(tmp_path / "whole")
    work(whole)
    stopped, rate = config_in(tmp_path / "stopped"), supervised.learning_rate
    halfway = tmp_path / "stopped/out.halfway"

    def learning_rate(settings, step, total):
        if step == 4 and end == "kill":
            raise Killed
        if step == 4 and end == "signal":
            os.kill(os.getpid(), signal.SIGTERM)
        return rate(settings, step, total)

    monkeypatch.setattr(supervised, "learning_rate", learning_rate)
    with pytest.raises((Killed, supervised.Stopped)) as raised:
        work(stopped)
    if end == "signal":
        assert raised.value.step == 5
    assert halfway.is_dir() and not (tmp_path / "stopped/out").exists()
    parts = {path.split("/")[-1] for path in SavedPolicy(halfway).shapes()}
    assert parts == {"lora_a", "lora_b"} or "adapters" not in command
    monkeypatch.setattr(supervised, "learning_rate", rate)
    work(stopped)
    assert not halfway.exists()
    ours, theirs = (read_metrics(tmp_path / side / "out") for side in SIDES)
    assert [row | {"time": 0} for row in ours] == [row | {"time": 0} for row in theirs]
    names = ("model.safetensors", "config.json", "metrics.jsonl")
    assert all((tmp_path / "stopped/out" / name).exists() for name in names)
    weights = [(tmp_path / side / "out/model.safetensors").read_bytes() for side in SIDES]
    assert weights[0] == weights[1]


@pytest.mark.slow
def test_what_another_run_left_halfway_is_no_beginning(tiny_folder, alone, tmp_path, capfd):
    rows = example_rows()
    config = SftConfig(**settings(tmp_path, rows, tiny_folder, save_every_steps=1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(supervised, "write_policy", lambda *_: (_ for _ in ()).throw(Killed()))
        with pytest.raises(Killed):
            make_base(config)
    assert (tmp_path / "out.halfway").is_dir()
    config.optimizer.learning_rate *= 2
    make_base(config)
    assert "has other settings or data: training starts from scratch" in capfd.readouterr().err
    steps = [row["step"] for row in read_metrics(config.out)]
    assert steps == list(range(len(steps)))
    assert not (tmp_path / "out.halfway").exists()
