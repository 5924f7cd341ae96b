"""The card of an exported policy: what it says of the run, and what stays on the machine."""

import pathlib
import shlex

from command_lines import load

from dapo_jax.config.experiment import Config, Data, ExportConfig, Lora, Model
from dapo_jax.config.files import read_config
from dapo_jax.config.settings import leaves
from dapo_jax.run import model_card

HOME = "/home/alice/secret"


def write(run: str, out: pathlib.Path, step: int = 37, **changes) -> str:
    settings = {name: value for name, _, value in leaves(read_config(Config, run))}
    config = ExportConfig(run=run, out=str(out), **changes)
    out.mkdir()
    model_card.write_card(out, config, settings, step, "Qwen2.5-0.5B")
    return (out / "README.md").read_text()


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


def test_an_adapters_card_names_its_library_and_base(write_run, tmp_path):
    run = write_run("first")
    card = write(run, tmp_path / "out", 20, weights="adapter", base_model="Qwen/Qwen2.5-0.5B")
    assert "library_name: peft\n" in card and "base_model_relation: adapter\n" in card
    assert "Low-rank adapters of Qwen/Qwen2.5-0.5B, trained by" in card
