"""The plan of a run: shapes, memory, the step's formula, report, command, and shipped configs."""

import dataclasses
import importlib.util
import json
import re
import subprocess
import sys

import jax
import numpy as np
import pytest
from command_lines import RL, ROOT, load, run_shown
from hlo_arrays import instructions, looped_collectives
from learners import token_logprobs
from row_files import read_table

from dapo_jax.config.experiment import Config
from dapo_jax.extras.plan import chips, plan
from dapo_jax.extras.plan.chips import compiler_options
from dapo_jax.extras.plan.estimate import (
    MEASURED,
    calibrated_step,
    estimate_step,
    forward_flops,
    published,
    update_flops,
)
from dapo_jax.extras.plan.main import ONE_TURN, PlanSettings
from dapo_jax.extras.plan.programs import (
    Compiler,
    lay_out,
    missing_memory,
    programs,
    training_programs,
)
from dapo_jax.extras.plan.published_shapes import NAMES, config_values, read_shape
from dapo_jax.model.decoder import abstract_params
from dapo_jax.model.logprobs import Rows
from dapo_jax.run import checks
from dapo_jax.runtime import sharding
from dapo_jax.runtime.sharding import unbox
from dapo_jax.types.errors import ConfigError

HAS_LIBTPU = importlib.util.find_spec("libtpu") is not None


def needs_libtpu(test):
    """Mark a slow test that compiles for TPUs; it needs the tpu extra, and no TPU."""
    return pytest.mark.slow(pytest.mark.skipif(not HAS_LIBTPU, reason="needs libtpu")(test))


# From names and model cards.
PARAMETERS = dict(read_table(__file__, "parameters in billions"))


FAMILIES = {config_values(name)["model_type"]: name for name in reversed(NAMES)}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] * (name not in FAMILIES.values()))
        for name in NAMES
    ],
)
def test_published_shapes_have_the_published_number_of_parameters(name):
    shapes = jax.tree.leaves(unbox(abstract_params(read_shape(name))))
    count = sum(np.prod(leaf.shape, dtype=float) for leaf in shapes)
    assert count == pytest.approx(PARAMETERS[name] * 1e9, rel=0.005)


def test_versions_of_a_published_model_share_its_shape():
    for name in ("models/Qwen2.5-Math-7B", "gs://b/Qwen2.5-7B-Instruct", "qwen2.5-7b"):
        assert config_values(name) == config_values("Qwen2.5-7B")
    assert config_values("Meta-Llama-3.1-8B-Instruct") == config_values("Llama-3.1-8B")
    with pytest.raises(ConfigError, match=r"folder = 'x/Qwen2.5-8B': must be .*did you mean"):
        read_shape("x/Qwen2.5-8B")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model folder that has nothing but a config.json."""
    path = tmp_path_factory.mktemp("shape")
    values = config_values("Qwen2.5-0.5B") | {"num_hidden_layers": 2, "hidden_size": 64}
    values |= {"num_attention_heads": 4, "intermediate_size": 128, "vocab_size": 512}
    (path / "config.json").write_text(json.dumps(values))
    return path


@pytest.fixture(scope="module")
def flags(folder) -> list[str]:
    """The embedded task on eight devices, with a policy that has only a shape."""
    settings = (
        "mesh.fsdp=4 mesh.tensor=2 packing.rows_per_microbatch=8 packing.row_tokens=64 "
        "sampler.slots=16 sampler.max_response_tokens=48 sampler.prefill_prompts=4 "
        "data.max_prompt_tokens=16 rollout.prompts_per_step=8 rollout.samples_per_prompt=4 "
        f"rollout.updates_per_rollout=2 model.folder={folder}"
    )
    return [f"--config.{setting}" for setting in settings.split()]


@pytest.fixture(scope="module")
def config(flags) -> Config:
    return load(Config, f"{RL}:ppo", *flags)


@pytest.fixture(scope="module")
def settings(tmp_path_factory) -> PlanSettings:
    return PlanSettings(topology="cpu:8", cache=str(tmp_path_factory.mktemp("cache")), price=2.0)


@pytest.fixture(scope="module")
def layout(config, settings):
    return lay_out(config, chips.parse(settings.topology))


@pytest.fixture(scope="module")
def measured(layout, settings):
    return plan.compile_all(layout, settings)


@pytest.fixture(scope="module")
def made(config, settings, measured):  # which are cached
    return plan.make(config, settings)


def test_every_program_of_the_run_is_compiled(made):
    """PPO has all of them: a policy, a reference and a critic."""
    training = ["update", "score", "reference score", "critic score", "critic update"]
    assert list(made["programs"]) == ["load", "prefill", "insert", "decode", *training]
    assert made["fits"] and made["limit_bytes"] == 4 * 2**30


def test_memory_by_part_adds_up_to_the_peak(layout, measured):
    update = measured["update"]
    state = {"parameters", "optimizer", "reference", "critic", "critic's optimizer"}
    assert set(update.alive) == state and update.record(2**30)["parts"]["temporary"] > 0
    shards = [
        np.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(layout.learners.policy.abstract_state)
    ]
    held = update.alive["parameters"] + update.alive["optimizer"]
    assert held == pytest.approx(sum(shards), rel=0.05)
    for program in measured.values():
        parts = program.record(2**30)["parts"]
        assert sum(parts.values()) == pytest.approx(program.together, rel=0.05)
        assert program.together - program.beside == pytest.approx(program.peak, rel=0.05)


def test_a_lag_keeps_a_copy_of_the_policy_before_the_update(config):
    lagging = dataclasses.replace(config.rollout, staleness=1)
    layout = lay_out(dataclasses.replace(config, rollout=lagging), chips.parse("cpu:8"))
    program = next(iter(training_programs(layout, 1)))
    alive = Compiler(layout, None).measure(program).alive
    assert alive["policy before the update"] == alive["parameters"] > 0


@pytest.mark.parametrize(
    ("message", "needs", "known"),
    [
        ("Ran out of memory in memory space hbm. Used 16.00G of 15.75G hbm.", 16, 16),
        ("the total memory required for HLO temporaries (47.5G) exceeds", 47.5, 0),
    ],
)
def test_memory_is_read_from_a_compilers_error(message, needs, known):
    error = jax.errors.JaxRuntimeError(f"RESOURCE_EXHAUSTED: {message}")
    assert missing_memory(error) == {"needs": needs * 2**30, "known": known * 2**30}
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"):
        missing_memory(jax.errors.JaxRuntimeError("INTERNAL: Used 1G of 2G"))


def test_the_report_has_all_tables_and_no_zeros(made, settings):
    text = plan.tables(json.loads(json.dumps(made)), settings)
    parts = "critic update|decoding weights|together|decode steps|MFU|dollars"
    assert [part for part in parts.split("|") if part not in text] == []
    assert "0.00 " not in text and "| 0.0 " not in text
    assert plan.amount(0.004321) == "0.0043" and plan.amount(12345.6) == "12,346"


def test_a_step_is_the_sum_of_its_phases_by_the_formula(layout, settings):
    """8 of 16 groups of 4 are kept; prompts of 8 tokens, responses of 10, half of slots busy."""
    algorithm = dataclasses.replace(layout.config.algorithm, dynamic_sampling=True)
    config = dataclasses.replace(layout.config, algorithm=algorithm)
    layout = dataclasses.replace(layout, config=config)
    settings = dataclasses.replace(settings, tokens=10.0, busy=0.5, flops=0.5, hbm=0.25)
    step = estimate_step(layout, 1_000_000, settings)
    assert step["decode_steps"] == 16 * 4 * 10 / (16 * 0.5) and step["live_slots"] == 8
    # Two layers of 2 heads of 16, keys and values in float32, on half of them; four replicas.
    context = 8 + 2 * 10**2 / (2 * 10)
    read = 1_000_000 + 2 * context * 2 * 2 * 2 * 16 * 4 / 2
    assert step["decode_step_bytes"] == read
    chip, spent = layout.topology.chip, step["seconds"]
    assert spent["decode"] == pytest.approx(80 * read / (chip.hbm_bytes_per_second * 0.25))
    tokens, seen = 8 * 4 * 18, (8**2 + 2 * 8 * 10 + 2 * 10**2) / (2 * 18)
    useful, executed = update_flops(layout.decoder, tokens, seen)
    rate = 8 * chip.flops_per_second * 0.5
    assert spent["update"] == pytest.approx(2 * executed / rate)  # of policy and critic
    assert step["update_mfu"] == pytest.approx(0.5 * useful / executed)
    forward = forward_flops(layout.decoder, tokens, seen)
    scored = 3  # by the policy (the KL in the reward needs all), the reference and the critic
    assert spent["score"] == pytest.approx(scored * forward / rate)
    assert spent["prefill"] == pytest.approx(forward_flops(layout.decoder, 16 * 8, 4) / rate)
    assert step["seconds_step"] == pytest.approx(sum(spent.values()))
    assert step["chip_hours_step"] == pytest.approx(8 * step["seconds_step"] / 3600)
    assert step["dollars_step"] == pytest.approx(2.0 * step["chip_hours_step"])


def test_efficiencies_are_those_of_the_nearest_published_runs(layout, settings):
    """The range is that of the three nearest; a fraction that the user gives has no range."""
    nearest = published("training", "v6e", "dense", 7.6)
    assert [row["model"] for row in nearest] == ["Llama-3.1-8B", "Mistral-7B", "Gemma-3-12B"]
    few = published("training", "v5e", "experts", 3.0)  # nobody measured experts on v5e
    assert {row["kind"] for row in few} == {"experts"} and few[0]["model"] == "gemma4-26b"
    assert all(0.1 < row["efficiency"] < 0.75 and row["date"] > "2025" for row in MEASURED)
    step = calibrated_step(layout, 1_000_000, settings)
    fast, slow = step["seconds_range"]
    assert fast < slow and fast <= step["seconds_step"] <= slow
    assert [row["phase"] for row in step["sources"]] == ["training", "decoding"]
    given = dataclasses.replace(settings, flops=0.5, hbm=0.25)
    step = calibrated_step(layout, 1_000_000, given)
    assert step["seconds_range"] == [step["seconds_step"]] * 2
    assert step["seconds"] == estimate_step(layout, 1_000_000, given)["seconds"]


def test_results_are_kept_and_read_again(made, config, settings, monkeypatch):
    monkeypatch.setattr(jax.stages.Lowered, "compile", lambda *_, **__: pytest.fail("compiled"))
    assert plan.make(config, settings)["programs"] == made["programs"]


def test_a_program_that_does_not_fit_names_the_missing_memory_and_settings(measured):
    most = max(measured.values(), key=lambda program: program.together)
    (line,) = plan.changes(measured, most.together - 1)
    assert line.startswith(f"- {most.name}: 0.00 GiB too much; ") and "config." in line
    tiny = plan.changes(measured, 1)
    assert len(tiny) == len(measured) and "more chips, a smaller model" in tiny[0]


def run(*arguments: str) -> subprocess.CompletedProcess:
    """Run the command as a user would."""
    command = [sys.executable, "-m", "dapo_jax", "plan", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT)


def test_the_command_prints_json_and_exits_with_1_if_a_program_does_not_fit(
    flags, settings, made, monkeypatch, capsys
):
    line = [f"{RL}:ppo", "--topology=cpu:8", "--json", f"--cache={settings.cache}", *flags]
    code, output, error = run_shown("plan", line, monkeypatch, capsys)
    assert code == 0, error
    assert json.loads(output)["programs"].keys() == made["programs"].keys()
    line = [flag.replace("slots=16", "slots=2000000") for flag in line]
    code, output, error = run_shown("plan", line, monkeypatch, capsys)
    assert code == 1, error
    record = json.loads(output)
    assert not record["fits"] and "config.sampler.slots" in " ".join(record["changes"])
    assert "compiled decode" in error


def test_a_plan_warns_that_turns_are_not_counted(folder, monkeypatch, capsys):
    monkeypatch.setattr(plan, "plan", lambda *_: 0)
    line = [RL, f"--model={folder}", "--config.environment.name=calculator"]
    code, _, error = run_shown("plan", line, monkeypatch, capsys)
    assert code == 0 and f"warning: {ONE_TURN}" in error


@needs_libtpu
def test_a_plan_for_a_tpu_has_parts_that_add_up_to_the_compilers_figure(tmp_path):
    flags = ["--config=configs/qwen2p5_0p5b_gsm8k.py:v5e_1", "--topology=v5e:1x1", "--json"]
    done = run(*flags, f"--cache={tmp_path}")
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)
    assert record["fits"] and record["versions"].find("libtpu") > 0
    for program in record["programs"].values():
        assert sum(program["parts"].values()) == pytest.approx(program["together_bytes"], rel=0.05)
        assert program["together_bytes"] < record["limit_bytes"]
    done = run(*flags, f"--cache={tmp_path}", "--config.sampler.slots=4000")
    record = json.loads(done.stdout)
    assert done.returncode == 1 and not record["fits"]
    assert any(line.startswith("- decode: ") for line in record["changes"])


# --- operations ----------------------------------------------------------------------------------


def test_operations_agree_with_a_count_by_hand():
    """Every matrix and every attention score of Qwen2.5-32B."""
    large = dataclasses.replace(read_shape("Qwen2.5-32B"), remat="full")
    tokens, seen = 22_528.0, 22_528 / 2
    attention = 2 * 5120 * (40 + 8 + 8) * 128 + 2 * 40 * 128 * 5120
    layer = attention + 3 * 2 * 5120 * 27_648
    head = 2 * 5120 * 152_064
    scores = 64 * 2 * 2 * 40 * 128 * tokens * seen
    forward = tokens * (64 * layer + head) + scores
    by_hand = 3 * forward, 4 * forward  # all is computed again
    assert update_flops(large, tokens, seen) == pytest.approx(by_hand, rel=0.02)
    assert forward_flops(large, tokens, seen) == pytest.approx(forward, rel=0.02)
    # One pass over one token without attention is two operations for each weight but the lookup.
    assert forward_flops(large, 1, 0) / 2 == pytest.approx(31.98e9, rel=0.02)
    kept = update_flops(dataclasses.replace(large, remat="attention"), tokens, seen)[1]
    assert kept == pytest.approx(by_hand[1] - scores)


def test_operations_of_a_small_policy_are_those_that_xla_counts():
    decoder = dataclasses.replace(
        read_shape("Qwen2.5-0.5B"), layers=1, vocab=512, scan_unroll=1, attention="plain"
    )
    params = unbox(abstract_params(decoder))

    def forward(params, tokens, segments, positions):
        rows = Rows(tokens, segments, positions)
        return token_logprobs(params, decoder, rows, chunk_tokens=80)[0]

    whole = jax.ShapeDtypeStruct((1, 80), np.int32)
    counted = jax.jit(forward).lower(params, whole, whole, whole).compile().cost_analysis()
    # XLA computes both halves of the scores; the half above the diagonal is masked.
    by_plan = forward_flops(decoder, 80, 80)
    assert by_plan == pytest.approx(counted["flops"], rel=0.02)


# --- configs that ship ---------------------------------------------------------------------------

ENVIRONMENT = (ROOT / "launch/env.sh").read_text()


def test_chips_are_counted():
    counts = {"v5e:1x1": 1, "v6e:2x4": 8, "v5p:2x2x2": 8, "tpu7x:2x2x1": 4, "cpu:16": 16}
    assert {name: chips.parse(name).chips for name in counts} == counts
    assert chips.parse("v5p:4x4x4", 3).chips == 192


@pytest.mark.parametrize("kind", ["v6e:4x4", "v5p:2x2x1", "tpu7x:2x2x1"])
def test_a_plan_compiles_with_the_flags_of_a_run(kind, monkeypatch):
    monkeypatch.delenv("LIBTPU_INIT_ARGS", raising=False)
    options = compiler_options(chips.parse(kind)) or {}
    flags = {f"--{name}={value}" for name, value in options.items()}
    assert flags and all(flag in ENVIRONMENT for flag in flags)
    limit = {"v6e": "98304", "tpu7x": "61440"}.get(kind.partition(":")[0])
    assert options.get("xla_tpu_scoped_vmem_limit_kib") == limit
    fusion = "xla_tpu_enable_async_collective_fusion"
    monkeypatch.setenv("LIBTPU_INIT_ARGS", f"--{fusion}=false")
    changed = compiler_options(chips.parse(kind)) or {}
    assert options[fusion] == "true" and changed[fusion] == "false"
    assert compiler_options(chips.parse("cpu:1")) is None


@needs_libtpu
@pytest.mark.parametrize("kind", [kind for kind in chips.CHIPS if kind != "cpu"])
def test_the_compiler_knows_every_chip_and_how_many_devices_it_is(kind):
    topology = chips.parse(f"{kind}:2x2" + "x1" * (chips.CHIPS[kind].dimensions - 2))
    devices = chips.target_devices(topology)
    assert len(devices) == topology.chips * topology.chip.devices
    assert dict(sharding.make_mesh(1, -1, 2, devices).shape)["fsdp"] == len(devices) // 2


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


# --- experts in the compiled text of a TPU's programs ---------------------------------------------

EXPERTS, WIDTH, ROW = 24, 256, 1024
SHARDS = 4
CHOSEN = SHARDS * ROW * 2  # tokens that a device gathers, each for its two experts


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """Compiled text of update and decoding, by name: experts over 4 of 16 chips of v5e."""
    folder = tmp_path_factory.mktemp("experts")
    values = config_values("Qwen3-30B-A3B") | {"num_hidden_layers": 2, "hidden_size": 512}
    values |= {"num_attention_heads": 4, "num_experts": EXPERTS, "num_experts_per_tok": 2}
    values |= {"moe_intermediate_size": WIDTH, "vocab_size": 4096}
    (folder / "config.json").write_text(json.dumps(values))
    flags = (
        f"mesh.data=1 mesh.fsdp=4 mesh.expert={SHARDS} packing.rows_per_microbatch=16 "
        f"packing.row_tokens={ROW} sampler.slots=128 sampler.max_response_tokens=640 "
        "data.max_prompt_tokens=128 compute.dtype=bfloat16 compute.remat=full "
        f"rollout.prompts_per_step=16 model.folder={folder}"
    )
    config = load(Config, f"{RL}:dapo", *(f"--config.{flag}" for flag in flags.split()))
    topology = chips.parse("v5e:4x4")
    wanted = (p for p in programs(lay_out(config, topology), 1) if p.name in ("update", "decode"))
    options = compiler_options(topology)
    return {p.name: p.lower().compile(compiler_options=options).as_text() for p in wanted}


@needs_libtpu
@pytest.mark.parametrize("name", ["update", "decode"])
def test_no_array_has_an_element_for_each_pair_of_token_and_expert(name, texts):
    """Not inside of fusions either: there it would cost operations."""
    shapes = {
        tuple(map(int, sizes.split(","))) for sizes in re.findall(r"\[([\d,]+)\]", texts[name])
    }
    both = {s for s in shapes if CHOSEN in s and {EXPERTS, EXPERTS // SHARDS} & set(s)}
    assert not {s for s in both if len(s) > 2}, both
    assert "ragged-dot" in texts[name]


@needs_libtpu
def test_a_decode_step_gathers_no_expert(texts):
    """Tokens go to their experts; 128 slots in all."""
    moved = looped_collectives(instructions(texts["decode"]))
    assert moved and not [line for line in moved if re.search(rf"\[{EXPERTS},|,{WIDTH}\]", line)]


@needs_libtpu
def test_no_array_of_an_update_is_as_large_as_a_row_squared(texts):
    assert not [x for x in instructions(texts["update"]) if x.shape.count(ROW) > 1]
