"""Bad settings stop a command and say what is allowed; configs by name or file; help; rates."""

import dataclasses
import shutil
import subprocess
import sys

import pytest
from command_lines import BASE, RL, ROOT, load, run_shown
from row_files import read_table

import dapo_jax
from dapo_jax.commands import api
from dapo_jax.config.algorithms import preset
from dapo_jax.config.experiment import Config, Lora, Optimizer
from dapo_jax.config.files import config_for_folder, read_config, shipped_configs
from dapo_jax.config.rates import choose_rates
from dapo_jax.config.settings import leaves
from dapo_jax.extras.serve.settings import ServeConfig
from dapo_jax.extras.sft.settings import SftConfig
from dapo_jax.extras.sft.training import SftRun
from dapo_jax.run import checks
from dapo_jax.runtime.sharding import mesh_shape
from dapo_jax.types.errors import ConfigError


def other_value(value):
    """A legal value of the same type that differs from `value`."""
    if isinstance(value, bool):
        return not value
    return value * 2 + 1 if isinstance(value, int | float) else f"{value}x"


@pytest.mark.parametrize(("kind", "file"), [(Config, RL), (SftConfig, BASE)])
def test_every_setting_can_be_overridden(kind, file, monkeypatch):
    monkeypatch.setattr(checks, "check", lambda config: None)
    for name, _, value in leaves(load(kind, file)):
        new = other_value(value)
        loaded = load(kind, file, f"--config.{name}={new}")
        assert dict((n, v) for n, _, v in leaves(loaded))[name] == new, name


def test_settings_can_be_checked_without_devices_data_or_models(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    resized = ["--check=v6e:64", "--config.mesh.fsdp=16"]
    cases = [("v6e_8", word) for word in (["--check=v6e:8"], ["--check"], resized)]
    for variant, words in [*cases, ("tpu7x_4", ["--check=tpu7x:4"])]:  # of two devices each
        arguments = [f"qwen2p5_7b_math:{variant}", *words]
        code, output, _ = run_shown("train", arguments, monkeypatch, capsys)
        assert code == 0 and "the settings are valid" in output
    assert not list(tmp_path.iterdir())


def test_help_in_python_explains_every_setting_of_a_section():
    text = dapo_jax.Sampler.__doc__ or ""
    assert text.startswith("The decoding engine.\n\nSettings:\n")
    line = "    slots (int, default 128): Responses decoded in parallel. Above 0."
    assert line in text.splitlines()
    assert "cache (str, default 'auto'): Cache layout" in text and "One of: auto, slots" in text


def test_every_config_builds_and_validates():
    for path in sorted((ROOT / "configs").glob("*.py")):
        kind = SftConfig if path.stem.endswith(("_base", "_sft")) else Config
        assert isinstance(load(kind, f"--config={path}"), kind)


def test_dapo_is_grpo_with_the_four_tricks_and_without_kl():
    dapo = load(Config, f"{RL}:dapo").algorithm
    grpo = load(Config, f"{RL}:grpo").algorithm
    changed = {
        field.name
        for field in dataclasses.fields(dapo)
        if getattr(dapo, field.name) != getattr(grpo, field.name)
    }
    tricks = {"clip_high", "aggregate", "dynamic_sampling", "overlong_punishment"}
    assert changed == tricks | {"dual_clip"} | {"reference", "kl", "kl_coefficient"}


def test_no_device_is_touched_before_the_check():
    code = (
        "import sys; sys.argv = ['x', '--config=%s', '--config.sampler.slots=-1']\n"
        "import jax\nfrom dapo_jax.commands import train\n"
        "try: train.main()\n"
        "except SystemExit as e: assert e.code == 2\n"
        "from jax._src import xla_bridge\n"
        "assert not xla_bridge._backends, 'a backend was started'\n"
        "assert 'tensorflow' not in sys.modules, 'TensorFlow was imported'\n"
    ) % (ROOT / "configs/arithmetic.py")
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def help_of(kind, capsys, *arguments) -> str:
    with pytest.raises(SystemExit) as stopped:
        load(kind, *arguments, usage="The usage.")
    assert stopped.value.code == 0
    return capsys.readouterr().out


def test_help_lists_every_setting(capsys):
    shown = help_of(Config, capsys, "--help-all")
    assert "The usage." in shown
    assert all(f"--config.{name}=" in shown for name, _, _ in leaves(Config()))


@pytest.mark.parametrize("flag", ["--help", "--help-all"])
@pytest.mark.parametrize("command", "train evaluate sft dpo export serve plan".split())
def test_help_begins_with_what_is_changed_most_and_fits_80_columns(
    command, flag, monkeypatch, capsys
):
    code, shown, _ = run_shown(command, [flag], monkeypatch, capsys)
    # Commands with few settings list them in order of importance.
    title = "Settings" if command in ("export", "serve") else "Changed most"
    assert code == 0 and shown.index(title) < len(shown) / 2
    assert [line for line in shown.splitlines() if len(line) > 80] == []
    settings = [line for line in shown.splitlines() if line.startswith("  --")]
    if flag == "--help":
        assert len(settings) == 10 and len(shown.splitlines()) <= 45 and "..." not in shown


@pytest.mark.parametrize(("word", "names", "others"), [
    ("nucleus", ["sampler.top_p", "evaluation.top_p"], ["sampler.top_k"]),
    ("prefill", ["sampler.prefill_prompts", "sampler.prefill_chunk_tokens"], ["sampler.slots"]),
    ("adapters", ["lora.rank", "lora.folder"], ["seed"]),
])  # fmt: skip
def test_help_searches_names_and_texts(word, names, others, capsys):
    shown = help_of(Config, capsys, f"--help={word}")
    assert all(f"--config.{name}=" in shown for name in names)
    assert not any(f"--config.{name}=" in shown for name in others)


def test_help_of_serve_is_in_order_of_importance(capsys):
    shown = help_of(ServeConfig, capsys, "--help-all")
    names = "model http_port max_response_tokens default_max_tokens slots temperature seed dtype"
    places = [shown.index(f"  --{name}=") for name in f"{names} shutdown_seconds".split()]
    assert places == sorted(places)


def test_help_shows_a_section_alone_with_the_files_values(capsys):
    shown = help_of(Config, capsys, f"{RL}:ppo", "--help=algorithm", "--config.algorithm.gamma=0.9")
    assert "config.sampler" not in shown
    assert "--config.algorithm.gamma=0.9  (default 1.0)" in shown
    assert "--config.algorithm.critic=True  (default False)" in shown
    assert "One of: k1, k2, k3, k3+, abs." in shown


def test_a_switch_may_stand_alone_and_a_value_apart():
    apart = ["--config.log.tensorboard", "--config.seed", "3", "--config.optimizer.eps", "1e-9"]
    apart += ["--config.log.console", "false", *apart]  # the same value twice is no mistake
    loaded = load(Config, RL, *apart, "--config.critic.pretrain_steps", "-1", "--config.log.report")
    assert (loaded.log.tensorboard, loaded.seed, loaded.optimizer.eps) == (True, 3, 1e-9)
    assert loaded.critic.pretrain_steps == -1 and loaded.log.report and not loaded.log.console


def test_one_size_of_the_mesh_takes_what_the_others_leave():
    assert mesh_shape(-1, 1, 2, 8) == (4, 1, 1, 1, 1, 2)
    assert mesh_shape(2, -1, 1, 8) == (2, 4, 1, 1, 1, 1)
    assert mesh_shape(-1, 2, 1, 16, decode_tensor=4) == (2, 2, 1, 1, 4, 1)
    assert mesh_shape(1, -1, 2, 16, expert=4) == (1, 2, 4, 1, 1, 2)
    assert mesh_shape(1, -1, 2, 16, context=4) == (1, 2, 1, 4, 1, 2)
    with pytest.raises(ConfigError, match="a factorisation of the 8 devices"):
        mesh_shape(-1, 3, 1, 8)


# --- configs by name -----------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("line", read_table(__file__, "shipped"))
def test_a_shipped_config_is_found_by_its_name(line):
    expected = read_config(Config, f"{ROOT}/configs/arithmetic.py:grpo")
    expected.seed = 3
    assert load(Config, *line) == expected


def test_a_moved_checkout_reads_the_same_config(tmp_path, monkeypatch):
    read = []
    for name in ("before", "after"):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        shutil.copy(ROOT / "configs/two_sums.py", tmp_path / name)
        read.append(read_config(Config, str(tmp_path / name / "two_sums.py")))
    assert read[0] == read[1] and read[0].environment.name == read[0].data.source


def test_each_shipped_config_has_one_kind():
    configs, examples = shipped_configs("Config"), shipped_configs("SftConfig")
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
        "packing: {row_tokens: auto}\ndata: {heldout_problems: auto}\nlog: {console: false}\n"
    )
    config = load(Config, "mine.yaml", "--config.seed=3")
    assert (config.total_steps, config.seed, config.log.console) == (5, 3, False)
    assert (config.optimizer.learning_rate, config.optimizer.eps) == (2e-4, 1.5e-8)
    assert config.model.folder == "dapo_jax:arithmetic_base"
    assert config.packing.row_tokens == config.data.heldout_problems == -1
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


@pytest.mark.parametrize(("name", "text", "words"), read_table(__file__, "keys that occur twice"))
def test_a_key_that_occurs_twice_is_an_error_with_its_lines(tmp_path, name, text, words):
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=words):
        read_config(Config, str(tmp_path / name))


def test_keys_of_merged_tables_may_be_replaced(tmp_path):
    text = "optimizer: &a {eps: 1.0e-4, beta1: 0.5}\ncritic: {optimizer: {<<: *a, eps: 1.0e-3}}\n"
    (tmp_path / "a.yaml").write_text(text)
    config = read_config(Config, str(tmp_path / "a.yaml"))
    assert (config.optimizer.eps, config.critic.optimizer.eps) == (1e-4, 1e-3)


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


# --- rates that the settings leave to the program -------------------------------------------------


KINDS = {"rl": Config, "sft": SftRun, "dpo": Config}


@pytest.mark.parametrize(
    ("kind", "rank", "parameters", "steps", "rate", "warmup"), read_table(__file__, "rates")
)
def test_auto_is_a_rate_for_the_size_and_a_warmup_for_the_length(
    kind, rank, parameters, steps, rate, warmup
):
    config = KINDS[kind](lora=Lora(rank=rank))
    chosen, lines, warnings = choose_rates(config, parameters, steps)
    assert (chosen.optimizer.learning_rate, chosen.optimizer.warmup_steps) == (rate, warmup)
    assert f"optimizer.learning_rate = {rate:g} (auto: {parameters:,} parameters" in lines[0]
    assert len(lines) == 2 and not warnings and config == KINDS[kind](lora=Lora(rank=rank))
    saved = {"optimizer.learning_rate": 0.5, "optimizer.warmup_steps": 7}
    saved |= {f"critic.{name}": -1 for name in saved}
    resumed = choose_rates(config, parameters, 10 * steps, saved)[0].optimizer
    assert (resumed.learning_rate, resumed.warmup_steps) == (0.5, 7)


def test_a_critic_gets_twice_the_rate_and_a_policy_that_waits_a_shorter_warmup():
    config = Config(algorithm=preset("vapo"), total_steps=100)
    config.optimizer.warmup_steps = "auto"  # as on the command line
    chosen, _, _ = choose_rates(config, 2_000_000_000, 100)
    assert (chosen.optimizer.learning_rate, chosen.optimizer.warmup_steps) == (1e-6, 5)
    critic = chosen.critic.optimizer
    assert (critic.learning_rate, critic.warmup_steps) == (2e-6, 10)


@pytest.mark.parametrize(
    ("rate", "words"), [(1e-6, "far below"), (1e-4, ""), (1e-3, ""), (0.1, "far above")]
)
def test_a_fixed_rate_far_from_the_usual_one_is_a_warning(rate, words):
    config = Config(optimizer=Optimizer(learning_rate=rate))
    chosen, (line,), warnings = choose_rates(config, 600_000, 20)
    assert chosen.optimizer.learning_rate == rate and "warmup_steps = 2" in line
    assert len(warnings) == bool(words) and all(words in text for text in warnings)
