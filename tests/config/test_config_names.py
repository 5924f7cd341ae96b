"""Configs by name: those that ship, from any folder, for every command that takes one."""

import shutil

import pytest
from command_lines import ROOT, load, run
from row_files import read_table

from dapo_jax.config.experiment import Config, SftConfig
from dapo_jax.config.files import read_config, shipped_configs
from dapo_jax.runtime.settings import ConfigError


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    "line",
    [
        ["arithmetic:grpo", "--config.seed=3"],
        ["--config.seed=3", "arithmetic:grpo"],
        ["--config", "arithmetic:grpo", "--config.seed=3"],
        ["arithmetic:grpo", "--config.seed", "3"],
        ["--config=arithmetic:grpo", "--config.seed=3"],
    ],
)
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


@pytest.mark.parametrize(("command", "arguments", "said"), read_table(__file__, "names"))
def test_every_command_reads_a_name_or_says_what_is_wrong(
    command, arguments, said, monkeypatch, capsys
):
    code, error = run(command, arguments, monkeypatch, capsys)
    assert code == 2 and all(part in error for part in said), error
    assert error.startswith("error: ") and error.count("\n") == 1
