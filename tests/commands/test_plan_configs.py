"""Topologies, compiler flags and the shipped configs of real models."""

import pytest
from command_lines import ROOT, load

from dapo_jax.commands import checks
from dapo_jax.commands.plan import chips
from dapo_jax.commands.plan.published_shapes import config_values
from dapo_jax.commands.plan.targets import compiler_options
from dapo_jax.config.experiment import Config
from dapo_jax.runtime.settings import ConfigError

ENVIRONMENT = (ROOT / "launch/env.sh").read_text()


def test_hosts_and_chips_are_counted():
    counts = {"v5e:1x1": 1, "v6e:2x4": 1, "v6e:4x4": 4, "v5p:2x2x2": 2, "h100:8": 1, "h100:16": 2}
    assert {name: chips.parse(name).hosts for name in counts} == counts
    assert chips.parse("v6e:2x4", 2).hosts == 2 and chips.parse("v5p:4x4x4", 3).chips == 192


@pytest.mark.parametrize("kind", ["v6e:4x4", "v5p:2x2x1", "h100:8"])
def test_a_plan_compiles_with_the_flags_of_a_run(kind, monkeypatch):
    monkeypatch.delenv("LIBTPU_INIT_ARGS", raising=False)
    options = compiler_options(chips.parse(kind)) or {}
    words = {True: "true", False: "false"}  # XLA:GPU accepts only booleans
    flags = {f"--{name}={words.get(value, value)}" for name, value in options.items()}
    assert flags and all(flag in ENVIRONMENT for flag in flags)
    assert ("true" in options.values()) == (not kind.startswith("h100"))
    assert ("xla_tpu_scoped_vmem_limit_kib" in options) == kind.startswith("v6e")
    fusion = "xla_tpu_enable_async_collective_fusion"
    monkeypatch.setenv("LIBTPU_INIT_ARGS", f"--{fusion}=false")
    if not kind.startswith("h100"):
        changed = compiler_options(chips.parse(kind)) or {}
        assert options[fusion] == "true" and changed[fusion] == "false"
    assert compiler_options(chips.parse("cpu:1")) is None


CONFIGS = ("dapo_qwen2p5_32b", "qwen2p5_7b_math", "qwen2p5_1p5b_gsm8k", "qwen2p5_0p5b_gsm8k")


@pytest.mark.parametrize("name", CONFIGS)
def test_every_variant_of_a_config_is_valid_and_has_a_known_shape(name):
    path = ROOT / "configs" / f"{name}.py"
    scope: dict = {}
    exec(compile(path.read_text(), path, "exec"), scope)
    for variant in scope["VARIANTS"]:
        config = scope["get_config"](variant)
        checks.check(config)
        assert config_values(config.model.folder)
    with pytest.raises(ConfigError, match="config.variant = 'nix': must be one of"):
        scope["get_config"]("nix")


def test_the_large_config_has_the_papers_settings():
    """DAPO, arXiv 2503.14476, section 4.1."""
    config = load(Config, f"--config={ROOT}/configs/dapo_qwen2p5_32b.py")
    algorithm, rollout, optimizer = config.algorithm, config.rollout, config.optimizer
    assert (rollout.prompts_per_step, rollout.samples_per_prompt) == (512, 16)
    assert rollout.updates_per_rollout == 16
    assert (algorithm.clip_low, algorithm.clip_high, algorithm.kl) == (0.2, 0.28, "none")
    assert algorithm.aggregate == "token_mean" and algorithm.dynamic_sampling
    assert (optimizer.learning_rate, optimizer.warmup_steps) == (1e-6, 20)
    assert (optimizer.schedule, optimizer.weight_decay) == ("constant", 0.1)
    limit = config.sampler.max_response_tokens
    assert (limit, algorithm.overlong_buffer_share * limit) == (20_480, 4_096)
    evaluation = config.evaluation
    assert (evaluation.samples_per_problem, evaluation.temperature) == (32, 1.0)
    assert evaluation.top_p == 0.7 and (config.sampler.temperature, config.sampler.top_p) == (1, 1)
