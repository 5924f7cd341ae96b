"""The plan of a run: shapes, memory, roofline, report, the command, and shipped configs."""

import dataclasses
import importlib.util
import json
import pathlib
import subprocess
import sys

import jax
import numpy as np
import pytest
from command_lines import RL, ROOT, load, run_shown

from dapo_jax.commands import checks
from dapo_jax.config.experiment import Config
from dapo_jax.extras.plan import chips, hlo_text, plan, roofline
from dapo_jax.extras.plan.flags import PlanSettings
from dapo_jax.extras.plan.hlo_text import Times
from dapo_jax.extras.plan.main import ONE_TURN
from dapo_jax.extras.plan.programs import Compiler, lay_out, missing_memory, training_programs
from dapo_jax.extras.plan.published_shapes import NAMES, config_values, read_shape
from dapo_jax.extras.plan.roofline import DRAW_PASSES, estimate, forward_flops, measure_lengths
from dapo_jax.extras.plan.targets import compiler_options
from dapo_jax.model.decoder import abstract_params
from dapo_jax.model.logprobs import Rows, token_logprobs
from dapo_jax.runtime.settings import ConfigError
from dapo_jax.runtime.sharding import unbox

# In billions, from names and model cards.
PARAMETERS = """
Qwen2.5-0.5B 0.494 Qwen2.5-1.5B 1.54 Qwen2.5-3B 3.09 Qwen2.5-7B 7.62 Qwen2.5-14B 14.8
Qwen2.5-32B 32.8 Qwen2.5-72B 72.7 Qwen3-0.6B 0.596 Qwen3-1.7B 1.72 Qwen3-4B 4.02
Qwen3-8B 8.19 Qwen3-14B 14.8 Qwen3-32B 32.8 Llama-3-8B 8.03 Llama-3-70B 70.6
Llama-3.1-8B 8.03 Llama-3.1-70B 70.6 Llama-3.2-1B 1.24 Llama-3.2-3B 3.21
Llama-3.3-70B 70.6 Qwen3-30B-A3B 30.53 Qwen3-235B-A22B 235.1 gemma-3-1b 1.000
gemma-3-4b 3.880 gemma-3-12b 11.77 gemma-3-27b 27.01 gpt-oss-20b 20.91
Qwen3.5-9B 8.95 Qwen3.5-35B-A3B 34.66 Qwen3-Next-80B-A3B 79.67
gpt-oss-120b 116.83 Olmo-3-7B 7.30 Olmo-3-32B 32.2 SmolLM3-3B 3.08
gemma-4-E2B 4.63 gemma-4-E4B 7.46 gemma-4-31B 30.7
""".split()
PARAMETERS = dict(zip(PARAMETERS[::2], map(float, PARAMETERS[1::2]), strict=True))


@pytest.mark.parametrize("name", NAMES)
def test_published_shapes_have_the_published_number_of_parameters(name):
    shapes = jax.tree.leaves(unbox(abstract_params(read_shape(name))))
    count = sum(np.prod(leaf.shape, dtype=float) for leaf in shapes)
    assert count == pytest.approx(PARAMETERS[name] * 1e9, rel=0.005)


def test_versions_of_a_published_model_share_its_shape():
    for name in ("models/Qwen2.5-Math-7B", "gs://b/Qwen2.5-7B-Instruct", "qwen2.5-7b"):
        assert config_values(name) == config_values("Qwen2.5-7B")
    assert config_values("Meta-Llama-3.1-8B-Instruct") == config_values("Llama-3.1-8B")
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
    """The embedded task on eight devices, with a policy that has only a shape."""
    flags = (
        "mesh.fsdp=4 mesh.tensor=2 packing.rows_per_microbatch=8 packing.row_tokens=64 "
        "sampler.slots=16 sampler.max_response_tokens=48 sampler.prefill_prompts=4 "
        "data.max_prompt_tokens=16 rollout.prompts_per_step=8 rollout.samples_per_prompt=4 "
        f"rollout.updates_per_rollout=2 model.folder={folder}"
    )
    return load(Config, f"{RL}:ppo", *(f"--config.{flag}" for flag in flags.split()))


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


def test_a_plan_with_samplers_compiles_theirs_and_overlaps_sampling_with_the_update(
    config, settings, made
):
    rollout = dataclasses.replace(config.rollout, remote="only", staleness=1)
    theirs = {"samplers": 3, "sampler_topology": "cpu:2", "sampler_price": 1.0, "sampler_slots": 8}
    settings = dataclasses.replace(settings, **theirs, preemptions=600.0)
    planned = plan.make(dataclasses.replace(config, rollout=rollout), settings)
    assert list(planned.sampler.measured) == ["prefill", "insert", "decode"]
    assert planned.sampler.layout.sampling_mesh.shape["tensor"] == 2
    record = plan.record(planned, settings)
    step, longest = record["step"], max(planned.step.rollout_seconds, planned.step.update_seconds)
    assert step["seconds_step"] == longest and step["kept_groups"] == made.step.kept
    hours = longest / 3600
    assert step["dollars_step"] == pytest.approx(hours * (8 * 2.0 + 6 * 1.0))
    text = "\n\n".join(plan.tables(planned, settings, record))
    assert "3 samplers, each: " in text and "| samplers " in text
    with pytest.raises(ConfigError, match="rollout.remote = 'none': must be 'only'"):
        plan.make(config, settings)


def test_memory_by_part_adds_up_to_the_peak(made):
    update = made.measured["update"]
    state = {"parameters", "optimizer", "reference", "critic", "critic's optimizer"}
    assert set(update.alive) == state and update.parts()["temporary"] > 0
    shards = [
        np.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(made.layout.learners.policy.abstract_state)
    ]
    held = update.alive["parameters"] + update.alive["optimizer"]
    assert held == pytest.approx(sum(shards), rel=0.05)
    for program in made.measured.values():
        assert sum(program.parts().values()) == pytest.approx(program.together, rel=0.05)
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


def test_the_report_has_all_tables_and_its_record_adds_up(made, settings):
    record = json.loads(json.dumps(plan.record(made, settings)))
    text = "\n\n".join(plan.tables(made, settings, record))
    parts = "critic update|decoding weights|together|ICI s|MFU|dollars"
    assert [part for part in parts.split("|") if part not in text] == []
    step = record["step"]
    assert record["fits"] and step["kept_groups"] == 8
    assert step["dollars_step"] == pytest.approx(2.0 * 8 * step["seconds_step"] / 3600)
    assert step["seconds_step"] == pytest.approx(sum(step["phases"].values()), rel=1e-6)
    assert step["fill"] == made.step.fill != made.lengths.fill
    full = step["update_mfu_of_full_rows"]
    assert full == pytest.approx(made.mfu / made.lengths.fill)
    assert step["update_mfu"] == pytest.approx(full * step["fill"])
    decode = record["programs"]["decode"]
    assert sum(decode["phases"].values()) == pytest.approx(decode["unit_seconds"])


def test_phases_of_a_decode_step_add_up(made, settings):
    """Products and attention of a layer run in sequence; all slots are computed."""
    layout, lengths = made.layout, made.lengths
    decode, decoder = made.measured["decode"], made.layout.decoder

    def estimate_with(**sampler):
        sampler = dataclasses.replace(layout.config.sampler, **sampler)
        config = dataclasses.replace(layout.config, sampler=sampler)
        return estimate(lay_out(config, layout.topology), decode, lengths)

    unit = estimate(layout, decode, lengths)
    seconds = unit.seconds(settings.reached(layout.topology.chip))
    assert set(seconds) == {"products", "keys and values", "exchange", "draw"}
    assert min(seconds.values()) > 0
    slots, pieces = layout.config.sampler.slots / 4, 2  # of a replica, split over two chips
    assert unit.phases["products"].flops * pieces == forward_flops(decoder, slots, 0)
    logits = slots * decoder.vocab * 4 / pieces
    assert unit.phases["draw"].hbm_bytes == DRAW_PASSES * logits
    sorting = estimate_with(top_p=0.9)
    assert sorting.phases["draw"].hbm_bytes == (DRAW_PASSES + 9 * 10) * logits  # of 2**9 tokens
    rounding = estimate_with(weights_dtype="int8_products")
    head = 2 * slots * decoder.embed * decoder.vocab  # not rounded
    in_layers = forward_flops(decoder, slots, 0) - head
    assert rounding.phases["products"].flops * pieces == head + in_layers / 2
    simulated = sum(
        made.step.seconds[f"decode_{part}"] for part in ("products", "exchange", "draw")
    )
    without_cache = sum(seconds.values()) - seconds["keys and values"]
    assert simulated == pytest.approx(made.step.counts["decode_step"] * without_cache)


def test_results_are_kept_and_read_again(made, config, settings, monkeypatch):
    monkeypatch.setattr(jax.stages.Lowered, "compile", lambda *_, **__: pytest.fail("compiled"))
    again = plan.make(config, settings)
    peaks = {name: program.peak for name, program in made.measured.items()}
    assert {name: program.peak for name, program in again.measured.items()} == peaks


def test_a_program_that_does_not_fit_names_the_missing_memory_and_settings(made):
    most = max(made.measured.values(), key=lambda program: program.together)
    small = dataclasses.replace(made, limit=most.together - 1, step=None)
    (line,) = plan.changes(small)
    assert not small.fits and line.startswith(f"- {most.name}: 0.00 GiB too much; ")
    assert "config." in line
    tiny = plan.changes(dataclasses.replace(made, limit=1, step=None))
    assert len(tiny) == len(made.measured) and "more chips, a smaller model" in tiny[0]


def test_an_update_has_the_microbatches_that_its_rows_need(config):
    law = PlanSettings(median_tokens=20.0).make_workload(config)
    lengths = measure_lengths(config, read_shape(config.model.folder), law)
    rows = lengths.microbatches * config.packing.rows_per_microbatch
    assert rows - config.packing.rows_per_microbatch < lengths.rows <= rows
    tokens = lengths.responses * lengths.tokens
    assert lengths.fill == pytest.approx(tokens / (rows * config.packing.row_tokens))


def run(*arguments: str) -> subprocess.CompletedProcess:
    """Run the command as a user would."""
    command = [sys.executable, "-m", "dapo_jax", "plan", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT)


def test_the_command_prints_json_and_exits_with_1_if_a_program_does_not_fit(
    folder, tmp_path, monkeypatch, capsys
):
    flags = [RL, f"--model={folder}", "--topology=cpu:8", "--json"]
    flags += [f"--cache={tmp_path}", "--config.packing.rows_per_microbatch=8"]
    flags += ["--config.packing.row_tokens=96", "--config.sampler.slots=16"]
    turns = "--config.environment.name=calculator"
    code, output, error = run_shown("plan", [*flags, turns], monkeypatch, capsys)
    assert code == 0, error
    assert f"warning: {ONE_TURN}" in error
    assert json.loads(output)["fits"] and "compiled update" in error
    flags += ["--config.compute.logprob_chunk_tokens=4096", "--config.sampler.slots=2000000"]
    code, output, error = run_shown("plan", flags, monkeypatch, capsys)
    assert code == 1, error
    record = json.loads(output)
    assert not record["fits"] and "config.sampler.slots" in " ".join(record["changes"])


@pytest.mark.slow
@pytest.mark.skipif(not importlib.util.find_spec("libtpu"), reason="needs libtpu")
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


# --- operations and traffic ----------------------------------------------------------------------


def test_operations_agree_with_a_count_by_hand():
    """Every matrix and every attention score of Qwen2.5-32B."""
    large = dataclasses.replace(read_shape("Qwen2.5-32B"), remat="full")
    tokens, row = 22_528.0, 22_528
    attention = 2 * 5120 * (40 + 8 + 8) * 128 + 2 * 40 * 128 * 5120
    layer = attention + 3 * 2 * 5120 * 27_648
    head = 2 * 5120 * 152_064
    scores = 64 * 2 * 2 * 40 * 128 * (tokens * row / 2)
    forward = tokens * (64 * layer + head) + scores
    by_hand = 3 * forward + tokens * (64 * layer + head) + scores  # all is computed again
    assert roofline.update_flops(large, tokens, tokens * row / 2) == pytest.approx(
        by_hand, rel=0.02
    )
    assert roofline.forward_flops(large, tokens, tokens * row / 2) == pytest.approx(
        forward, rel=0.02
    )
    # One pass over one token without attention is two operations for each weight but the lookup.
    assert roofline.forward_flops(large, 1, 0) / 2 == pytest.approx(31.98e9, rel=0.02)


def test_operations_of_a_small_policy_are_those_that_xla_counts():
    decoder = dataclasses.replace(
        read_shape("Qwen2.5-0.5B"), layers=1, vocab=512, scan_unroll=1, attention="plain"
    )
    params = unbox(abstract_params(decoder))

    def forward(params, tokens, segments, positions):
        return token_logprobs(
            params, decoder, Rows(tokens, segments, positions), temperature=1.0, chunk_tokens=80
        )[0]

    whole = jax.ShapeDtypeStruct((1, 80), np.int32)
    counted = jax.jit(forward).lower(params, whole, whole, whole).compile().cost_analysis()
    # XLA computes both halves of the scores; the half above the diagonal is masked.
    by_plan = roofline.forward_flops(decoder, 80, 80 * 80)
    assert by_plan == pytest.approx(counted["flops"], rel=0.02)


def test_a_window_bounds_the_pairs_that_training_attention_computes():
    """Five of six layers of Gemma 3 see 1,024 tokens; each pair is counted by hand."""
    decoder = read_shape("gemma-3-27b")
    near, full = (np.minimum(np.arange(1, 5001), reach).sum() for reach in (1024, 5000))
    sliding = sum(decoder.sliding) / decoder.layers
    assert 0.8 < sliding < 0.85
    by_hand = sliding * near + (1 - sliding) * full
    assert roofline.seen_pairs(decoder, 5000) == pytest.approx(by_hand, rel=0.001)
    assert roofline.seen_pairs(decoder, 900) == 900**2 / 2  # the window holds it all
    assert roofline.seen_pairs(read_shape("Qwen2.5-7B"), 5000) == 5000**2 / 2


@pytest.mark.parametrize("window", [None, 100])
def test_pairs_of_a_packed_row_are_those_of_the_blocks_that_the_kernel_computes(window):
    """A block of 64 is computed if one of its pairs is seen; pairs are counted one by one."""
    decoder, lengths = dataclasses.replace(read_shape("Qwen2.5-7B"), window=window), [150, 42, 128]
    ids, places = np.repeat([1, 2, 3, 0], [*lengths, 192]), np.arange(512)
    distance = places[:, None] - places
    seen = (distance >= 0) & (distance < (window or 512)) & (ids[:, None] == ids)
    blocks = seen.reshape(8, 64, 8, 64).any(axis=(1, 3))
    blocks[5:] = np.eye(8)[5:]  # of padding, the block itself
    counted = roofline.row_pairs(decoder, lengths, 512, 64)
    assert counted == 64**2 * blocks.sum()


TEXT = pathlib.Path(__file__).with_suffix(".hlo").read_text()


def test_traffic_of_a_text_is_counted_as_often_as_its_loops_run():
    counted = hlo_text.read(TEXT, 8)
    gathered = 32 * 64 * 2 * 3 / 4  # of which a chip sends three quarters, in a ring of 4
    scattered, reduced = 16 * 64 * 2 * 3, 2 * 4 * 7 / 8  # in a ring of 4, and over all 8
    assert counted.sent == Times(reduced, 5 * gathered + scattered)
    assert counted.crossed == Times(2 * 8 * 64 * 4, 0.0)
    # Written: the add, a copy and the sum around the loop; inside it a row in place, what was
    # gathered, a result beside an exchange in the background, and what was scattered. What stays on
    # the chip, S(1), is not.
    inner = 64 * 4 + 32 * 64 * 2 + 8 * 64 * 4
    assert counted.written == Times(2 * 8 * 64 * 4 + 4, 5 * inner + 16 * 64 * 2)


# --- configs that ship ---------------------------------------------------------------------------

ENVIRONMENT = (ROOT / "launch/env.sh").read_text()


def test_hosts_and_chips_are_counted():
    counts = {"v5e:1x1": 1, "v6e:2x4": 1, "v6e:4x4": 4, "v5p:2x2x2": 2, "cpu:16": 2}
    assert {name: chips.parse(name).hosts for name in counts} == counts
    assert chips.parse("v6e:2x4", 2).hosts == 2 and chips.parse("v5p:4x4x4", 3).chips == 192


@pytest.mark.parametrize("kind", ["v6e:4x4", "v5p:2x2x1"])
def test_a_plan_compiles_with_the_flags_of_a_run(kind, monkeypatch):
    monkeypatch.delenv("LIBTPU_INIT_ARGS", raising=False)
    options = compiler_options(chips.parse(kind)) or {}
    flags = {f"--{name}={value}" for name, value in options.items()}
    assert flags and all(flag in ENVIRONMENT for flag in flags)
    assert ("xla_tpu_scoped_vmem_limit_kib" in options) == kind.startswith("v6e")
    fusion = "xla_tpu_enable_async_collective_fusion"
    monkeypatch.setenv("LIBTPU_INIT_ARGS", f"--{fusion}=false")
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
