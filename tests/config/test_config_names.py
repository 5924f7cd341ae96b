"""Configs by name: those that ship, from any folder, for every command that takes one."""

import shutil
import subprocess

import pytest
from command_lines import ROOT, load, run, run_shown

from dapo_jax.__main__ import COMMANDS
from dapo_jax.algorithms import preset
from dapo_jax.config.experiment import Config, SftConfig
from dapo_jax.config.files import command_for_folder, read_config, shipped_configs
from dapo_jax.runtime.settings import ConfigError


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("line", [
    ["arithmetic:grpo", "--config.seed=3"], ["--config.seed=3", "arithmetic:grpo"],
    ["--config", "arithmetic:grpo", "--config.seed=3"], ["arithmetic:grpo", "--config.seed", "3"],
    ["--config=arithmetic:grpo", "--config.seed=3"],
])  # fmt: skip
def test_a_shipped_config_is_found_by_its_name(line):
    expected = read_config(Config, f"{ROOT}/configs/arithmetic.py:grpo")
    expected.seed = 3
    assert load(Config, *line) == expected


def test_each_shipped_config_has_one_kind():
    configs, examples = shipped_configs(Config), shipped_configs(SftConfig)
    assert {"arithmetic", "two_strategies"} <= set(configs) and "arithmetic_base" in examples
    assert configs | examples == shipped_configs() and not configs.keys() & examples.keys()
    assert {path.stem for path in ROOT.glob("configs/*.py")} == set(shipped_configs())


def test_a_file_or_run_of_that_name_here_comes_first(tmp_path):
    text = "from dapo_jax import Config\n\ndef get_config(): return Config(total_steps=7)\n"
    (tmp_path / "mine.py").write_text(text)
    assert load(Config, "mine.py", "--config.data.max_prompt_tokens=9").total_steps == 7
    (tmp_path / "arithmetic").mkdir()  # of something else
    assert load(Config, "arithmetic").total_steps == 30
    (tmp_path / "arithmetic/config.json").write_text('{"total_steps": 5}')
    assert read_config(Config, "arithmetic").total_steps == 5
    with pytest.raises(ConfigError, match="there is no such file; did you mean arithmetic"):
        read_config(Config, "arithmetic.py")
    shutil.copy(ROOT / "configs/arithmetic.py", tmp_path)
    assert read_config(Config, "arithmetic.py:grpo").run_dir == "runs/arithmetic_grpo"


@pytest.mark.parametrize(("command", "arguments", "said"), [
    ("train", ["nothing"], ["--config=nothing", "packaged configs are arithmetic, "]),
    ("train", ["arithmetik"], ["did you mean arithmetic"]),
    ("train", ["arithmetic_base"], ["get_config() returns SftConfig; this command takes Config"]),
    ("train", ["arithmetic", "grpo"], ["unexpected arguments: grpo"]),
    ("evaluate", [], ["a config is required", "dapo-jax evaluate arithmetic"]),
    ("evaluate", ["arithmetic", "--k=0"], ["evaluation.samples_per_problem"]),
    ("plan", ["arithmetic", "--topology=v9:2"], ["topology"]),
    ("sft", ["arithmetic_base", "--config.total_steps=-1"], ["config.total_steps"]),
    ("serve", ["models/mine"], ["unexpected arguments: models/mine"]),
])  # fmt: skip
def test_every_command_reads_a_name_or_says_what_is_wrong(
    command, arguments, said, monkeypatch, capsys
):
    code, error = run(command, arguments, monkeypatch, capsys)
    assert code == 2 and all(part in error for part in said), error
    assert error.startswith("error: ") and error.count("\n") == 1


def test_a_colon_selects_a_preset_for_files_without_arguments(tmp_path):
    text = "from dapo_jax import Config\n\ndef get_config(): return Config(run_dir='runs/mine')\n"
    (tmp_path / "mine.py").write_text(text)
    (tmp_path / "mine.yaml").write_text("run_dir: runs/mine\n")
    (tmp_path / "run").mkdir()
    (tmp_path / "run/config.json").write_text('{"run_dir": "runs/mine"}')
    expected = Config(run_dir="runs/mine_grpo", algorithm=preset("grpo"))
    for name in ("mine.py", "mine.yaml", "run", "run/config.json"):
        assert read_config(Config, f"{name}:grpo", preset) == expected
        assert read_config(Config, name, preset) == Config(run_dir="runs/mine")
    assert load(Config, "guessing:reinforce", "--config.rollout.updates_per_rollout=1").algorithm


def test_yaml_is_read_as_the_dictionaries_of_a_python_file(tmp_path):
    (tmp_path / "mine.yaml").write_text(
        "total_steps: 5\nmodel: {folder: dapo_jax:arithmetic_base}\n"
        "optimizer:\n  learning_rate: 2e-4  # without a point\n  eps: 1.5E-8\n"
        "packing: {row_tokens: auto}\nlog: {console: false}\n"
    )
    config = load(Config, "mine.yaml", "--config.seed=3")
    assert (config.total_steps, config.seed, config.log.console) == (5, 3, False)
    assert (config.optimizer.learning_rate, config.optimizer.eps) == (2e-4, 1.5e-8)
    assert config.model.folder == "dapo_jax:arithmetic_base" and config.packing.row_tokens == -1
    (tmp_path / "object.yaml").write_text("seed: !!python/object/apply:os.getpid []\n")
    with pytest.raises(ConfigError, match="object.yaml: can't be read as YAML"):
        read_config(Config, "object.yaml")
    (tmp_path / "list.yml").write_text("- seed\n")
    with pytest.raises(ConfigError, match="must be a table of settings"):
        read_config(Config, "list.yml")


def test_configs_are_listed_and_shown(monkeypatch, capsys, tmp_path):
    code, listed, _ = run_shown("configs", [], monkeypatch, capsys)
    assert code == 0 and len(listed.splitlines()) == len(shipped_configs())
    for name, path in shipped_configs().items():
        assert f" {name} " in listed and path.read_text().splitlines()[0].strip('"') in listed
    code, text, _ = run_shown("configs", ["show", "guessing"], monkeypatch, capsys)
    (tmp_path / "my.py").write_text(text)
    assert code == 0 and read_config(Config, "my.py") == read_config(Config, "guessing")


def test_missing_base_names_the_command_that_makes_it():
    made = {"runs/calculator_base": "calculator_base", "runs/arithmetic_sft": "arithmetic_sft"}
    for folder, name in made.items():
        assert command_for_folder(SftConfig, "sft", folder) == f"dapo-jax sft {name}"
    assert not command_for_folder(SftConfig, "sft", "runs/other")


@pytest.mark.parametrize(("line", "expected"), [
    ("dapo-jax ", set(COMMANDS)),
    ("dapo-jax tr", {"train"}),
    ("dapo-jax train calc", {"calculator"}),
    ("dapo-jax evaluate --config.sampler.top_k", {"--config.sampler.top_k="}),
    ("dapo-jax sft two", {"two_strategies_base"}),
    ("dapo-jax export --ru", {"--run="}),
    ("dapo-jax configs show gue", {"guessing"}),
    ("dapo-jax replay --", set()),
])  # fmt: skip
def test_bash_completes_commands_configs_and_settings(line, expected, monkeypatch, capsys):
    code, script, _ = run_shown("completion", ["bash"], monkeypatch, capsys)
    assert code == 0
    word = line.split(" ")[-1]
    ask = f'COMP_LINE="{line}"; _dapo_jax dapo-jax "{word}" x 2>/dev/null; echo "${{COMPREPLY[@]}}"'
    shown = subprocess.run(["bash", "-c", f"{script}\n{ask}"], capture_output=True, text=True)
    assert shown.returncode == 0 and set(shown.stdout.split()) == expected, shown.stderr
