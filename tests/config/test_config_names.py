"""Configs by name: those that ship, from any folder, for every command that takes one."""

import dataclasses

import pytest
from command_lines import load, run_shown

from dapo_jax.commands import api
from dapo_jax.config.experiment import Config
from dapo_jax.config.files import config_for_folder, read_config, shipped_configs
from dapo_jax.config.presets import preset
from dapo_jax.extras.sft.settings import SftConfig
from dapo_jax.types.errors import ConfigError


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_a_colon_selects_a_preset_for_files_without_arguments(tmp_path):
    text = "from dapo_jax import Config\n\ndef get_config(): return Config(run_dir='runs/mine')\n"
    (tmp_path / "mine.py").write_text(text)
    (tmp_path / "mine.yaml").write_text("run_dir: runs/mine\n")
    (tmp_path / "run").mkdir()
    (tmp_path / "run/config.json").write_text('{"run_dir": "runs/mine"}')
    expected = Config(run_dir="runs/mine_grpo", algorithm=preset("grpo"))
    for name in ("mine.py", "mine.yaml", "run", "run/config.json"):
        assert read_config(Config, f"{name}:grpo") == expected
        assert read_config(Config, name) == Config(run_dir="runs/mine")
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


def test_algorithm_may_name_a_preset(tmp_path):
    (tmp_path / "mine.yaml").write_text("algorithm: grpo\n")
    (tmp_path / "mine.py").write_text(
        "from dapo_jax import Config\ndef get_config(): return Config(algorithm='grpo')\n"
    )
    (tmp_path / "mine.json").write_text('{"algorithm": "grpo"}')
    for name in ("mine.yaml", "mine.py", "mine.json"):
        config = load(Config, name, "--config.algorithm.clip_high=0.3")
        assert config.algorithm == dataclasses.replace(preset("grpo"), clip_high=0.3)
    config = Config(algorithm="grpo")  # pyright: ignore[reportArgumentType]
    assert api.load(config, Config).algorithm == preset("grpo")


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.yaml", "seed: 1\noptimizer: {eps: 1.0}\n\noptimizer: {}\n", "'optimizer'.*1?2 and 4"),
        ("a.yaml", "optimizer:\n  eps: 1.0\n  beta1: 0.5\n  eps: 1.0\n", "'eps'.*lines 2 and 4"),
        ("a.yaml", "optimizer: {eps: 1.0, eps: 2.0}\n", "'eps'.*lines 1 and 1"),
        ("a.yaml", "model:\n- {x: 1,\n   x: 2}\n", "'x'.*lines 2 and 3"),
        ("a.json", '{"seed": 1,\n"optimizer": {},\n"optimizer": {}}', "'optimizer'.*lines 2, 3"),
        ("a.json", '{"optimizer": {"eps": 1.0,\n"eps": 2.0}}', "'eps'.*lines 1, 2"),
    ],
)
def test_a_key_that_occurs_twice_is_an_error_with_its_lines(tmp_path, name, text, words):
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=words):
        read_config(Config, str(tmp_path / name))


def test_keys_of_merged_tables_may_be_replaced(tmp_path):
    text = "optimizer: &a {eps: 1.0e-4, beta1: 0.5}\ncritic: {optimizer: {<<: *a, eps: 1.0e-3}}\n"
    (tmp_path / "a.yaml").write_text(text)
    config = read_config(Config, str(tmp_path / "a.yaml"))
    assert (config.optimizer.eps, config.critic.optimizer.eps) == (1e-4, 1e-3)


@pytest.mark.parametrize(
    "flags",
    [
        ["--config.seed=1", "--config.seed=2"],
        ["--config.seed", "1", "--config.seed=2"],
        ["--config=smollm2"],
        ["--config", "smollm2"],
    ],
)
def test_a_flag_with_two_values_is_an_error(flags, capsys):
    with pytest.raises(SystemExit):
        load(Config, "--config=arithmetic", *flags)
    assert " is given twice: '" in capsys.readouterr().err
    same = ["--config=arithmetic", "--config.seed=1"]
    assert load(Config, *same, *same).seed == 1


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
    made |= {"runs/smollm2_base_gsm8k": "smollm2_base:gsm8k", "runs/smollm2_base": "smollm2_base"}
    for folder, name in made.items():
        assert config_for_folder(SftConfig, folder) == name
    assert not config_for_folder(SftConfig, "runs/other")
    assert not config_for_folder(SftConfig, "runs/smollm2_base_other")
