"""The card of an exported policy: what it says of the run, and what stays on the machine."""

import json
import pathlib
import shlex

import pytest
from command_lines import load
from reports import row
from row_files import read_table

from dapo_jax.config.experiment import Config, Data, ExportConfig, Lora, Model, Reward
from dapo_jax.config.files import read_config
from dapo_jax.reporting import model_card
from dapo_jax.runtime.settings import leaves

HOME = "/home/alice/secret"


def write(run: str, out: pathlib.Path, step: int = 37, **changes) -> str:
    settings = {name: value for name, _, value in leaves(read_config(Config, run))}
    config = ExportConfig(run=run, out=str(out), **changes)
    out.mkdir()
    recorded = model_card.recorded(run, settings, step)
    model_card.write_card(out, config, recorded, step, "Qwen2.5-0.5B")
    return (out / "README.md").read_text()


def table(card: str, title: str) -> list[list[str]]:
    """Cells of the table below a heading, without its head."""
    lines = card.split(f"## {title}\n")[1].split("\n## ")[0].splitlines()
    rows = [line.strip("| ").split(" | ") for line in lines if line.startswith("| ")]
    return rows[2:]


def test_scores_and_curves_end_at_the_exported_step(write_run, tmp_path):
    rows = [row(step, reward=None if step == 9 else step / 8) for step in range(41)]
    run = write_run("first", steps=40, rows=rows)
    card = write(run, tmp_path / "out")
    assert "37 of 40 steps" in card and "Preset `dapo`." in card
    curves = table(card, "Curves")
    assert [line[0] for line in curves][::8] == ["0", "37"] and len(curves) == 9
    assert curves[-1][1] == "4.625" and curves[2][:2] == ["9", ""]
    scores = table(card, "Held-out scores")
    assert [line[0] for line in scores] == ["step 0", "step 35"]
    assert scores[1][2:6] == ["4", "0.4", "0.3", "0.5"]
    assert scores[1][8:] == ["-0.2", "-0.4", "0"]
    reward = Reward(parts="mine:score=1", correct="spread")
    own = write_run("own", steps=40, rows=rows, reward=reward)
    card = write(own, tmp_path / "card")
    assert table(card, "Held-out scores")[1][3:7] == ["-0.2", "-0.4", "0", "0.4"]
    assert "| step | reward | heldout_reward | entropy | accuracy |" in card


def test_what_evaluate_measured_of_the_step_is_in_it(write_run, tmp_path):
    run = write_run("first", steps=40)
    estimate = {"value": 0.61, "low": 0.55, "high": None}
    report = {"policy": f"{run} step 37", "data": f"{HOME}/math500.jsonl", "accuracy": estimate}
    report |= {"samples_per_problem": 32, "majority": estimate | {"value": 0.7}}
    report["pass_at_k"] = {"1": estimate, "16": estimate | {"value": 0.9}, "2": estimate}
    for name, content in {"a": report, "b": report | {"policy": f"{run} step 3"}, "c": []}.items():
        folder = pathlib.Path(run, "evaluations", name)
        folder.mkdir(parents=True)
        (folder / "report.json").write_text(json.dumps(content))
    scores = table(write(run, tmp_path / "out"), "Held-out scores")
    assert len(scores) == 3
    assert scores[2] == ["step 37", "`math500.jsonl`", "32", "0.61", "0.55", "", "0.9", "0.7"]


def test_paths_of_the_machine_are_not_published(write_run, tmp_path, monkeypatch):
    text = "Think.|```</think>\n{{ system }}{{ problem }}"
    own = Data(source=f"{HOME}/train*.jsonl=2,gs://bucket/y.jsonl", folder=HOME, template=text)
    own.system_prompt, own.heldout_source = "/no_think", "../alice/held.jsonl"
    model, lora = Model(folder=f"{HOME}/Qwen2.5-0.5B/"), Lora(rank=4, folder="~/adapters")
    run = write_run("first", steps=40, data=own, model=model, lora=lora)
    card = write(run, tmp_path / "out")
    settings = (tmp_path / "out/run_config.json").read_text()
    for written in (card, settings):
        for place in ("alice", "/home", "bucket", "~/", str(tmp_path)):
            assert place not in written
    monkeypatch.chdir(tmp_path / "out")
    fence = card.split("```bash\n")[1].split("\n```")[0]
    command = shlex.split(fence.replace("\\\n", ""))
    assert command[:3] == ["dapo-jax", "train", "--config=run_config.json"]
    config = load(Config, *command[2:])
    assert (config.model.folder, config.lora.folder) == ("Qwen2.5-0.5B", "adapters")
    assert config.data.source == "train*.jsonl=2,y.jsonl"
    assert (config.data.template, config.data.system_prompt) == (text, "/no_think")
    assert config.data.heldout_source == "held.jsonl" and config.total_steps == 40


@pytest.mark.parametrize(("value", "shown"), read_table(__file__, "names"))
def test_the_last_name_of_an_absolute_path_is_shown(value, shown):
    assert model_card.without_paths({"data.source": value}) == {"data.source": shown}


def test_an_adapters_card_names_its_library_and_base(write_run, tmp_path):
    run = write_run("first")
    card = write(run, tmp_path / "out", 20, weights="adapter", base_model="Qwen/Qwen2.5-0.5B")
    assert "library_name: peft\n" in card and "base_model_relation: adapter\n" in card
    assert "Low-rank adapters of Qwen/Qwen2.5-0.5B, trained by" in card
