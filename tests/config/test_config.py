"""Bad settings stop a command, with the field, its value and what is allowed."""

import dataclasses
import subprocess
import sys

import pytest
from command_lines import BASE, RL, ROOT, load

from dapo_jax.__main__ import entry
from dapo_jax.commands import checks
from dapo_jax.config.experiment import Config, ServeConfig, SftConfig
from dapo_jax.runtime.settings import ConfigError, leaves
from dapo_jax.runtime.sharding import mesh_shape

# overrides below `config.` | what the message has to name
BAD = """
algorithm.clip_hgih=0.3 | clip_hgih, clip_high
seed=abc | seed, abc
sampler.slots=1.5 | slots, 1.5
algorithm.advantage=zscore | advantage, 'zscore', group_zscore
algorithm.aggregate=mean | aggregate, 'mean', token_mean
rollout.when_starved=wait | when_starved, 'wait', partial
sampler.top_p=1.5 | top_p, 1.5, at most 1.0
sampler.top_p=0 | top_p, 0.0, above 0.0
sampler.burst_tokens=0 | burst_tokens, 0, above 0
optimizer.learning_rate=nan | learning_rate, nan, finite
algorithm.dual_clip=1.1 | dual_clip, 1.1, 1 + clip_high
rollout.samples_per_prompt=1 | samples_per_prompt, 1, at least 2
rollout.updates_per_rollout=5 | updates_per_rollout, 5, divisor
algorithm.ratio=none algorithm.region=none algorithm.dual_clip=0 | updates_per_rollout, 4, ratio
packing.row_tokens=79 | row_tokens, 79, 80
algorithm.reward_wrong=2 | reward_correct, 1.0, 2.0
compute.attention=cudnn | attention, cudnn, blocked
data.min_terms=1 | min_terms, 1, from 2
mesh.fsdp=0 | mesh.fsdp, 0, -1
mesh.data=0 | mesh.data, 0, -1
mesh.data=-1 mesh.fsdp=-1 | mesh.fsdp, if mesh.data is above 0
algorithm.old_logprobs=sampler sampler.top_k=5 | old_logprobs, sampler, recompute
unexpected | unexpected
seed=-1 | seed, -1, 4294967295
optimizer.eps=0 | eps, 0.0, above 0
optimizer.beta2=1 | beta2, 1.0, below 1
algorithm.advantage=one | trained_responses, 'all', 'correct', imitates wrong
data.template=dapo | reward.verifier, final_number, dapo
data.source=gsm8k=0 | data.source, gsm8k=0, above 0
data.heldout_source=a,a | data.heldout_source, a,a, each once
data.system_prompt=Hi | data.system_prompt, Hi, empty, none
data.few_shot=0 | data.few_shot, 0, above 0
""".strip().splitlines()


@pytest.mark.parametrize("row", BAD)
def test_bad_settings_name_field_value_and_allowed(row, capsys):
    overrides, words = row.split(" | ")
    with pytest.raises(SystemExit) as stopped:
        load(
            Config, RL, *(f"--config.{text}" if "=" in text else text for text in overrides.split())
        )
    message = capsys.readouterr().err
    assert stopped.value.code == 2
    assert all(word in message for word in words.split(", ")), message
    assert "Traceback" not in message


def test_a_missing_or_wrong_config_file_is_one_line(capsys):
    for arguments in ([RL.replace(".py", "_no.py")], ["--config.seed=1"], [BASE]):
        with pytest.raises(SystemExit):
            load(Config, *arguments)
        message = capsys.readouterr().err
        assert message.startswith("error: ") and len(message.splitlines()) == 1


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


def test_an_unknown_preset_lists_the_known(capsys):
    with pytest.raises(SystemExit):
        load(Config, f"{RL}:ppoo")
    message = capsys.readouterr().err
    assert "dapo" in message and len(message.splitlines()) == 1


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


def test_help_lists_every_setting(capsys):
    with pytest.raises(SystemExit) as stopped:
        load(Config, "--help-all", usage="The usage.")
    shown = capsys.readouterr().out
    assert stopped.value.code == 0 and "The usage." in shown
    assert all(f"--config.{name}=" in shown for name, _, _ in leaves(Config()))


@pytest.mark.parametrize("flag", ["--help", "--help-all"])
@pytest.mark.parametrize("command", "train evaluate sft dpo export serve plan".split())
def test_help_begins_with_what_is_changed_most_and_fits_80_columns(
    command, flag, monkeypatch, capsys
):
    monkeypatch.setattr(sys, "argv", [command, flag])
    with pytest.raises(SystemExit) as stopped:
        entry(command)()
    shown = capsys.readouterr().out
    # Commands with few settings list them in order of importance.
    title = "Settings" if command in ("export", "serve") else "Changed most"
    assert stopped.value.code == 0 and shown.index(title) < len(shown) / 2
    assert [line for line in shown.splitlines() if len(line) > 80] == []
    settings = [line for line in shown.splitlines() if line.startswith("  --")]
    assert flag == "--help-all" or len(settings) == 10 and len(shown.splitlines()) <= 28


@pytest.mark.parametrize(("word", "names", "others"), [
    ("nucleus", ["sampler.top_p", "evaluation.top_p"], ["sampler.top_k"]),
    ("prefill", ["sampler.prefill_prompts", "sampler.prefill_chunk_tokens"], ["sampler.slots"]),
    ("adapters", ["lora.rank", "lora.folder"], ["seed"]),
])  # fmt: skip
def test_help_searches_names_and_texts(word, names, others, capsys):
    with pytest.raises(SystemExit) as stopped:
        load(Config, f"--help={word}")
    shown = capsys.readouterr().out
    assert stopped.value.code == 0
    assert all(f"--config.{name}=" in shown for name in names)
    assert not any(f"--config.{name}=" in shown for name in others)


def test_help_of_serve_is_in_order_of_importance(capsys):
    with pytest.raises(SystemExit):
        load(ServeConfig, "--help")
    shown = capsys.readouterr().out
    names = "model http_port max_response_tokens default_max_tokens slots temperature seed dtype"
    places = [shown.index(f"config.{name}=") for name in f"{names} shutdown_seconds".split()]
    assert places == sorted(places)


def test_help_shows_a_section_alone_with_the_files_values(capsys):
    with pytest.raises(SystemExit) as stopped:
        load(Config, f"{RL}:ppo", "--help=algorithm", "--config.algorithm.gamma=0.9")
    shown = capsys.readouterr().out
    assert stopped.value.code == 0 and "config.sampler" not in shown
    assert "--config.algorithm.gamma=0.9  (default 1.0)" in shown
    assert "--config.algorithm.critic=True  (default False)" in shown
    assert "One of: k1, k2, k3, k3+." in shown


def test_a_switch_may_stand_alone_and_a_value_apart():
    apart = ["--config.log.tensorboard", "--config.seed", "3", "--config.optimizer.eps", "1e-9"]
    loaded = load(Config, RL, *apart, "--config.critic.pretrain_steps", "-1", "--config.log.report")
    assert (loaded.log.tensorboard, loaded.seed, loaded.optimizer.eps) == (True, 3, 1e-9)
    assert loaded.critic.pretrain_steps == -1 and loaded.log.report


def test_one_size_of_the_mesh_takes_what_the_others_leave():
    assert mesh_shape(-1, 1, 2, 8) == (4, 1, 1, 1, 1, 2) and mesh_shape(2, -1, 1, 8) == (
        2,
        4,
        1,
        1,
        1,
        1,
    )
    assert mesh_shape(-1, 2, 1, 16, decode_tensor=4) == (2, 2, 1, 1, 4, 1)
    assert mesh_shape(1, -1, 2, 16, expert=4) == (1, 2, 4, 1, 1, 2)
    assert mesh_shape(1, -1, 2, 16, context=4) == (1, 2, 1, 4, 1, 2)
    with pytest.raises(ConfigError, match="a factorisation of the 8 devices"):
        mesh_shape(-1, 3, 1, 8)
