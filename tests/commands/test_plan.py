"""The plan of a run: shapes, chips, operations, traffic, memory, and the command."""

import dataclasses
import importlib.util
import json
import subprocess
import sys

import jax
import numpy as np
import pytest
from command_lines import RL, ROOT, load

from dapo_jax.commands.plan import advice, chips, compile_programs, plan, search, tables
from dapo_jax.commands.plan.flags import PlanSettings
from dapo_jax.commands.plan.main import main
from dapo_jax.commands.plan.programs import lay_out, training_programs
from dapo_jax.commands.plan.published_shapes import NAMES, config_values, read_shape
from dapo_jax.commands.plan.roofline import forward_flops
from dapo_jax.commands.plan.step_estimate import DRAW_PASSES, estimate, measure_lengths
from dapo_jax.config.experiment import Config, Environment
from dapo_jax.model.decoder import abstract_params
from dapo_jax.reporting.notices import describe_saving
from dapo_jax.run.memory import checkpoint_bytes
from dapo_jax.runtime.settings import ConfigError
from dapo_jax.runtime.sharding import unbox

# In billions, as the names and model cards say.
PARAMETERS = {
    "Qwen2.5-0.5B": 0.494,
    "Qwen2.5-1.5B": 1.54,
    "Qwen2.5-3B": 3.09,
    "Qwen2.5-7B": 7.62,
    "Qwen2.5-14B": 14.8,
    "Qwen2.5-32B": 32.8,
    "Qwen2.5-72B": 72.7,
    "Qwen3-0.6B": 0.596,
    "Qwen3-1.7B": 1.72,
    "Qwen3-4B": 4.02,
    "Qwen3-8B": 8.19,
    "Qwen3-14B": 14.8,
    "Qwen3-32B": 32.8,
    "Llama-3-8B": 8.03,
    "Llama-3-70B": 70.6,
    "Llama-3.1-8B": 8.03,
    "Llama-3.1-70B": 70.6,
    "Llama-3.2-1B": 1.24,
    "Llama-3.2-3B": 3.21,
    "Llama-3.3-70B": 70.6,
    "Qwen3-30B-A3B": 30.53,
    "Qwen3-235B-A22B": 235.1,
    "gemma-3-1b": 1.000,
    "gemma-3-4b": 3.880,
    "gemma-3-12b": 11.77,
    "gemma-3-27b": 27.01,
    "gpt-oss-20b": 20.91,
    "gpt-oss-120b": 116.83,
}


@pytest.mark.parametrize("name", NAMES)
def test_published_shapes_have_the_published_number_of_parameters(name):
    shapes = jax.tree.leaves(unbox(abstract_params(read_shape(name))))
    count = sum(np.prod(leaf.shape, dtype=float) for leaf in shapes)
    assert count == pytest.approx(PARAMETERS[name] * 1e9, rel=0.005)


def test_a_version_of_a_published_model_has_its_shape():
    for name in ("models/Qwen2.5-Math-7B", "gs://b/Qwen2.5-7B-Instruct", "qwen2.5-7b"):
        assert config_values(name) == config_values("Qwen2.5-7B")
    assert config_values("Meta-Llama-3.1-8B-Instruct") == config_values("Llama-3.1-8B")


def test_an_unknown_model_is_named_with_what_is_near():
    with pytest.raises(ConfigError, match=r"config.model.folder = 'x/Qwen2.5-8B': must be .*near"):
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
def config(folder) -> Config:
    """The embedded task on eight devices, by a policy that has only a shape."""
    flags = ["mesh.fsdp=4", "mesh.tensor=2", "packing.rows_per_microbatch=8", "sampler.slots=16"]
    flags += ["sampler.max_response_tokens=48", "data.max_prompt_tokens=16"]
    flags += ["packing.row_tokens=64", "rollout.prompts_per_step=8", "rollout.samples_per_prompt=4"]
    flags += ["rollout.updates_per_rollout=2", "sampler.prefill_prompts=4"]
    flags += [f"model.folder={folder}"]
    return load(Config, f"{RL}:ppo", *(f"--config.{flag}" for flag in flags))


@pytest.fixture(scope="module")
def settings(tmp_path_factory) -> PlanSettings:
    return PlanSettings(topology="cpu:8", cache=str(tmp_path_factory.mktemp("cache")), price=2.0)


@pytest.fixture(scope="module")
def made(config, settings):
    return plan.make(config, settings)


def test_every_program_of_the_run_is_compiled(made):
    """PPO has all of them: a policy, a reference and a critic."""
    training = ["update", "score", "reference score", "critic score", "critic update"]
    assert list(made.measured) == ["load", "prefill", "insert", "decode", *training]
    assert made.fits and made.step.kept == 8


def test_memory_by_part_adds_up_to_the_peak(made):
    """What stays is known by shape alone; what XLA counts as arguments is no more and no less."""
    update = made.measured["update"]
    stays = {"parameters", "optimizer", "reference", "critic", "critic's optimizer"}
    assert set(update.alive) == stays and update.parts()["temporary"] > 0
    state = made.layout.learner.abstract_state
    shards = [
        np.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(state)
    ]
    assert update.alive["parameters"] + update.alive["optimizer"] == pytest.approx(
        sum(shards), rel=0.05
    )
    for one in made.measured.values():
        assert sum(one.parts().values()) == pytest.approx(one.together, rel=0.05)
        assert one.together - one.beside == pytest.approx(one.peak, rel=0.05)


def test_a_lag_keeps_the_policy_before_the_update(config):
    """A copy of the parameters, and as large."""
    lagging = dataclasses.replace(config.rollout, lag=1)
    layout = lay_out(dataclasses.replace(config, rollout=lagging), chips.parse("cpu:8"))
    program = next(iter(training_programs(layout, 1)))
    found = plan.Compiler(layout, None).measure(program).alive
    assert found["policy before the update"] == found["parameters"] > 0


@pytest.mark.parametrize(
    ("said", "needs", "temporaries"),
    [
        ("Ran out of memory in memory space hbm. Used 16.00G of 15.75G hbm.", 16 * 2**30, False),
        ("the total memory required for HLO temporaries (47.5G) exceeds", 47.5 * 2**30, True),
    ],
)
def test_a_compiler_that_gives_up_says_what_it_would_take(said, needs, temporaries):
    error = jax.errors.JaxRuntimeError(f"RESOURCE_EXHAUSTED: {said}")
    assert compile_programs._missing(error) == {"needs": needs, "temporaries": temporaries}
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"):
        compile_programs._missing(jax.errors.JaxRuntimeError("INTERNAL: Used 1G of 2G"))


def test_the_report_says_what_was_found(made, settings):
    text = tables.tables(made, settings)
    for part in (
        "critic update",
        "decoding weights",
        "together",
        "all-gather",
        "MFU",
        "dollars",
        "s that a spot",
    ):
        assert part in text
    record = json.loads(json.dumps(tables.record(made, settings)))
    assert record["fits"] and record["step"]["kept_groups"] == 8
    step = record["step"]
    assert step["dollars_step"] == pytest.approx(2.0 * 8 * step["seconds_step"] / 3600)
    assert step["seconds_step"] == pytest.approx(sum(step["phases"].values()), rel=1e-6)
    assert "rollout.carry_over=all" in tables.simulations(made, settings)
    turns = dataclasses.replace(made.layout.config, environment=Environment(name="calculator"))
    played = dataclasses.replace(made, layout=dataclasses.replace(made.layout, config=turns))
    assert tables.ONE_TURN in tables.tables(played, settings) and tables.ONE_TURN not in text


def test_mfu_and_fill_are_those_of_the_step(made, settings):
    step = tables.step_record(made, settings)
    full = step["update_mfu"] / made.step.fill
    assert step["fill"] == made.step.fill != made.lengths.fill
    assert step["update_mfu_of_full_rows"] == pytest.approx(full)
    assert full == pytest.approx(made.mfu / made.lengths.fill)


def test_phases_of_a_decode_step_add_up(made, settings):
    """Products and attention of a layer wait for each other; all slots are computed."""
    layout, chip, lengths = made.layout, made.layout.topology.chip, made.lengths
    unit = estimate(layout, made.measured["decode"], lengths)
    seconds = unit.seconds(chip, settings.efficiency)
    assert set(seconds) == {"products", "keys and values", "exchange", "draw"}
    assert min(seconds.values()) > 0
    slots, pieces = layout.config.sampler.slots / 4, 2  # of a replica, whose chips share the work
    decoder = layout.decoder
    assert unit.phases["products"].flops * pieces == forward_flops(decoder, slots, 0)
    logits = slots * decoder.vocab * 4 / pieces
    assert unit.phases["draw"].hbm_bytes == DRAW_PASSES * logits
    truncated = dataclasses.replace(layout.config.sampler, top_p=0.9)
    sorting = dataclasses.replace(layout.config, sampler=truncated)
    unit = estimate(dataclasses.replace(layout, config=sorting), made.measured["decode"], lengths)
    assert unit.phases["draw"].hbm_bytes == (DRAW_PASSES + 9 * 10) * logits  # of 2**9 tokens
    rounding = dataclasses.replace(layout.config.sampler, weights_dtype="int8_products")
    rounding = dataclasses.replace(layout.config, sampler=rounding)
    unit = estimate(lay_out(rounding, layout.topology), made.measured["decode"], lengths)
    head = 2 * slots * decoder.embed * decoder.vocab  # which stays as it is
    in_layers = forward_flops(decoder, slots, 0) - head
    assert unit.phases["products"].flops * pieces == head + in_layers / 2
    decode = sum(made.step.seconds[f"decode_{part}"] for part in ("products", "exchange", "draw"))
    steps = made.step.counts["decode_step"]
    without = sum(seconds.values()) - seconds["keys and values"]
    assert decode == pytest.approx(steps * without)


def test_results_are_kept_and_read_again(made, config, settings, monkeypatch):
    monkeypatch.setattr(jax.stages.Lowered, "compile", lambda *_, **__: pytest.fail("compiled"))
    again = plan.make(config, settings)
    assert {n: one.peak for n, one in again.measured.items()} == {
        n: one.peak for n, one in made.measured.items()
    }


def test_what_does_not_fit_says_by_how_much_and_what_to_change(made):
    most = max(made.measured.values(), key=lambda one: one.together)
    small = dataclasses.replace(made, limit=most.together - 1, step=None)
    (line,) = advice.changes(small)
    assert not small.fits and line.startswith(f"- {most.name}: 0.00 GiB too much; try config.")
    tiny = dataclasses.replace(made, limit=1, step=None)
    assert len(advice.changes(tiny)) == len(made.measured)
    assert "what stays takes 0.0 GiB of a chip alone" in advice.changes(tiny)[0]


def test_every_mesh_that_cuts_the_policy_evenly_is_tried(config):
    expected = [(8, 1, 1), (4, 2, 1), (4, 1, 2), (2, 4, 1), (2, 2, 2), (2, 1, 4)]
    for slices in (1, 2):
        topology = chips.parse("v5e:2x4", slices)
        tried = [one.mesh for one in search.meshes(config, topology, kv_heads=4)]
        assert [(one.fsdp, one.decode_tensor, one.tensor) for one in tried] == expected
        assert {one.data for one in tried} == {slices}


@pytest.mark.slow
def test_the_search_finds_the_most_rows_and_slots_that_fit(config, settings, monkeypatch):
    small = dataclasses.replace(chips.CHIPS["cpu"], hbm_gib=0.01)
    monkeypatch.setitem(chips.CHIPS, "cpu", small)
    one = dataclasses.replace(settings, topology="cpu:1")
    (found,) = search.Search(config, one)()
    assert found.config.mesh.fsdp == 1 and found.update_gib < 0.01 > found.decode_gib
    batch = config.rollout.prompts_per_step * config.rollout.samples_per_prompt
    assert found.config.sampler.slots == batch  # more would stand idle


def test_an_update_has_the_microbatches_that_its_rows_need(config):
    law = PlanSettings(median_tokens=20.0).make_workload(config)
    lengths = measure_lengths(config, read_shape(config.model.folder), law)
    rows = lengths.microbatches * config.packing.rows_per_microbatch
    assert rows - config.packing.rows_per_microbatch < lengths.rows <= rows
    tokens = lengths.responses * lengths.tokens
    assert lengths.fill == pytest.approx(tokens / (rows * config.packing.row_tokens))


def run(*arguments: str) -> subprocess.CompletedProcess:
    """The command, as a user would."""
    command = [sys.executable, "-m", "dapo_jax", "plan", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT)


def test_the_command_prints_json_and_its_exit_code_says_whether_it_fits(folder, tmp_path):
    flags = [RL, f"--model={folder}", "--topology=cpu:8", "--json"]
    flags += [f"--cache={tmp_path}", "--config.packing.rows_per_microbatch=8"]
    flags += ["--config.packing.row_tokens=96", "--config.sampler.slots=16"]
    done = run(*flags, "--config.environment.name=calculator")
    assert done.returncode == 0, done.stderr
    assert f"warning: {tables.ONE_TURN}" in done.stderr
    assert json.loads(done.stdout)["fits"] and "compiled update" in done.stderr
    done = run(
        *flags, "--config.compute.logprob_chunk_tokens=4096", "--config.sampler.slots=2000000"
    )
    assert done.returncode == 1, done.stderr
    told = json.loads(done.stdout)
    assert not told["fits"] and "config.sampler.slots=" in " ".join(told["changes"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--topology=v9:1"], "--topology = 'v9:1': must be KIND:SHAPE"),
        ([], "--topology = '': must be KIND:SHAPE"),
        (["--topology=cpu:9"], "at most cpu:"),
        (["--topology=cpu:1", "--model=nowhere"], "must be a folder with a config.json, or one of"),
        (["--topology=cpu:1", "--price=-1"], "--price = -1.0: must be at least 0"),
        (["--topology=cpu:1", "--kept=1.5"], "law.kept"),
        (["--topology=h100:9"], "--topology = 'h100:9': must be at most 8 GPUs or a multiple"),
        (["--topology=cpu:1", "--cache=/proc/x"], "--cache = '/proc/x': must be a folder"),
    ],
)
def test_wrong_flags_are_a_line(arguments, message, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["plan", RL, "--model=Qwen2.5-0.5B", *arguments])
    try:
        code = main()
    except SystemExit as stopped:
        code = stopped.code
    assert code == 2 and message in capsys.readouterr().err


def test_what_a_spot_machines_notice_can_save_is_said():
    config = load(Config, f"--config={ROOT}/configs/dapo_qwen2p5_32b.py")
    size = checkpoint_bytes(config, read_shape(config.model.folder))
    assert size == pytest.approx(12 * PARAMETERS["Qwen2.5-32B"] * 1e9, rel=0.005)
    hosts = chips.parse("v5p:4x4x4").hosts
    said = describe_saving(size, hosts, config.checkpoint.every_steps, 1_770.0)
    assert "393.2 GB, which 16 hosts write in about 49.1 s" in said and "more than the 30 s" in said
    assert said.endswith("may be 5 steps old, 148 minutes")
    assert "one host writes" in describe_saving(1e9, chips.parse("v5e:2x4").hosts, 0)
    counts = {"v5e:1x1": 1, "v6e:2x4": 1, "v6e:4x4": 4, "v5p:2x2x2": 2, "h100:8": 1, "h100:16": 2}
    assert {name: chips.parse(name).hosts for name in counts} == counts
    assert chips.parse("v6e:2x4", 2).hosts == 2 and chips.parse("v5p:4x4x4", 3).chips == 192


@pytest.mark.slow
@pytest.mark.skipif(not importlib.util.find_spec("libtpu"), reason="needs libtpu")
def test_a_plan_for_a_tpu_says_what_fits_and_its_parts_are_the_compilers(tmp_path):
    flags = ["--config=configs/qwen2p5_0p5b_gsm8k.py:v5e_1", "--topology=v5e:1x1", "--json"]
    done = run(*flags, f"--cache={tmp_path}")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["fits"] and told["versions"].find("libtpu") > 0
    for one in told["programs"].values():
        assert sum(one["parts"].values()) == pytest.approx(one["together_bytes"], rel=0.05)
        assert one["together_bytes"] < told["limit_bytes"] and not one["contents"]["T x T"]
    done = run(*flags, f"--cache={tmp_path}", "--config.sampler.slots=4000")
    told = json.loads(done.stdout)
    assert done.returncode == 1 and not told["fits"]
    assert any(line.startswith("- decode: ") for line in told["changes"])
