"""Every script of the repository does its work on something small: what nothing runs breaks."""

import importlib
import json
import os
import pathlib
import shutil
import subprocess
import sys

import numpy as np
import pytest

ROOT = pathlib.Path(__file__).parents[2]
ONE_DEVICE = " --xla_force_host_platform_device_count=1"  # the last such flag counts


def run(script: str, *arguments: object) -> str:
    """What the script prints. Fails where it does."""
    done = subprocess.run(
        [sys.executable, str(ROOT / script), *map(str, arguments)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | {"XLA_FLAGS": os.environ["XLA_FLAGS"] + ONE_DEVICE},
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


def test_attacks_on_the_verifier_are_refused():
    told = run("tests/verifier/attack_verifier.py", "--golds", 12, "--every", 5)
    totals = json.loads(told.splitlines()[-1])
    assert totals["attacks"] > 500 and totals["accepted"] == totals["killed"] == 0


def test_the_fuzzer_finds_nothing():
    assert "nothing did harm" in run("tests/verifier/fuzz_verifier.py", "--minutes", 0.02)


def test_gold_answers_equal_themselves(tmp_path):
    rows = [
        {"problem": "Add $1+1$.", "answer": "2", "solution": r"It is \boxed{2}."},
        {"problem": "Factor $x^2-1$.", "answer": "(x-1)(x+1)", "solution": r"\boxed{(x+1)(x-1)}"},
    ]
    path = tmp_path / "few.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    told = run("tests/benchmarks/gold.py", path)
    assert "| 2 | 0 | 2 of 2 | 2 of 2 | 2 of 2 | 0 | 2 | 0 |" in told


def test_the_verifiers_benchmark_times_it():
    arguments = ("--responses", 64, "--characters", 500, "--workers", 1)
    told = run("tests/benchmarks/verifier.py", *arguments)
    lines = [json.loads(line) for line in told.splitlines() if line[0] == "{"]
    assert {line["kind"] for line in lines} == {"dapo-like", "math-like"}


def test_loading_is_measured_on_a_folder():
    folder = ROOT / "tests/fixtures/models/qwen3"
    assert json.loads(run("tests/benchmarks/loading.py", folder, "measure"))["files"] > 0


def test_responses_side_by_side_are_counted():
    sizes = ("--gib", 0.5, "--max_response", 2000, "--max_prompt", 100, "--median", 200)
    told = run("tests/benchmarks/pages.py", *sizes, "--responses", 64, "--slots", 8, 16)
    slots, ragged, few, many = map(json.loads, told.splitlines())
    assert slots["side_by_side_most"] == slots["slots"] < few["slots"]
    assert many["decode_steps"] < few["decode_steps"] < slots["decode_steps"]
    assert many["seconds"] < few["seconds"] < ragged["seconds"] <= slots["seconds"]


def test_the_hosts_part_of_a_step_is_measured():
    told = run("tests/benchmarks/hosts.py", "--responses", 64, "--tokens", 60, "--processes", 3)
    told = told.splitlines()
    found = json.loads(told[-1])
    assert found["tokens"] > 1000 and found["files"] > 0 and found["bursts"] > 4
    assert min(found["costs"].values()) > 0
    assert sum(line.endswith("|") and "process" in line for line in told) == 9
    assert found["seconds"]["messages"] > 0
    assert found["beside"]["journal"] > found["seconds"]["journal"]


def test_the_price_of_dynamic_sampling_is_held_against_the_ideal():
    sizes = ("--prompts", 8, "--samples", 4, "--slots", 16, "--steps", 6, "--kept", 0.4)
    table = run("tests/benchmarks/price.py", *sizes).splitlines()
    rounds, none, _, carried = (float(cell.split()[0]) for cell in table[2].split("|")[3:-1])
    assert 1 < carried < max(none, rounds)  # so few steps say no more


def test_our_benchmark_and_the_comparison_run():
    sizes = ("--only", "update", "--workload", "smoke")
    told = run("tests/benchmarks/compare.py", "--rounds", 1, "--repeats", 1, *sizes)
    first, *table = told.splitlines()
    step = json.loads(first)["dapo_jax"]["update"]
    assert step["median_s"] > 0 and 0 < step["gflops"] < step["matmul_gflops"]
    assert len(table) == 3 and table[-1].startswith("| smoke | update |")


@pytest.mark.parametrize(
    "peer, install", [("trl", "trl==1.16.0"), ("tunix", "google-tunix==0.1.7")]
)
def test_a_peers_script_says_what_to_install(peer, install):
    script = ROOT / f"tests/benchmarks/peer_{peer}.py"
    command = [sys.executable, str(script), "--repeats", "1"]
    told = subprocess.run(command, capture_output=True, text=True)
    assert told.returncode == 1 and told.stdout == "" and "Traceback" not in told.stderr
    assert (
        told.stderr.startswith(f"peer_{peer}.py: ")
        and "pip install" in told.stderr
        and install in told.stderr
    )
    command = [sys.executable, str(script), "--only", "rolout"]
    told = subprocess.run(command, capture_output=True, text=True)
    assert told.returncode == 2 and "rolout: is none of rollout, update, step" in told.stderr
    help_text = run(f"tests/benchmarks/peer_{peer}.py", "--help")
    assert "--new-tokens" in help_text and "--repeats" in help_text


def test_rows_are_fuller_where_they_are_chosen():
    rows = run("tests/benchmarks/fill.py").splitlines()[2:]
    shares = [[int(cell.strip(" %")) for cell in row.split("|")[2:4]] for row in rows]
    assert len(shares) == 5 and all(chosen >= given for given, chosen in shares)


def test_growth_is_measured_and_drawn(tmp_path):
    picture = tmp_path / "growth.png"
    sizes = ("--axes", "vocab", "grid", "--most", 512, "--smoke")
    told = run("tests/benchmarks/growth.py", *sizes, "--plot", picture)
    assert "| vocabulary | 512 |" in told and "rows of 160 tokens |" in told
    assert picture.stat().st_size > 10_000


def test_seconds_go_to_kinds_of_operations():
    told = run("tests/benchmarks/operations.py", "--only", "rollout", "--workload", "smoke")
    assert "| matrix products |" in told and "| waiting |" in told


def test_rollouts_of_several_turns_are_timed():
    _, _, *rows = run("tests/benchmarks/turns.py", "--smoke").splitlines()
    assert [row.split("|")[3].strip() for row in rows] == ["prefilled", "kept"]
    assert [float(row.split("|")[7].split()[0]) > 0 for row in rows] == [True, False]


def test_router_replay_is_measured(tmp_path, run_here):
    sizes = ("--base_steps", 2, "--prompts", 1, "--arithmetic", "float32")
    told = run_here("experts", "ratios", "--folder", tmp_path, *sizes)
    assert told.splitlines()[-1].startswith("| float32 | 0.00 % | 0.00 % | 0.00 % |")


def test_fused_products_are_timed():
    assert run("tests/benchmarks/fused.py", "--calls", 2).count("x)") == 4


def test_the_real_workload_has_the_law_that_it_says(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "tests/benchmarks")
    ours = importlib.import_module("ours")
    real, normal = ours.WORKLOADS["real"], np.random.default_rng(0).normal(size=100_000)
    limits = np.asarray(real.limits(normal))
    assert limits.max() == 512 and limits.min() > 0 and abs(limits.mean() - 128) < 2
    assert set(np.asarray(ours.WORKLOADS["uniform"].limits(normal))) == {128}


@pytest.mark.slow
def test_seconds_of_other_settings_are_predicted(base, tmp_path):
    sizes = ("--steps", 4, "--prompts", 8, "--slots", 32, 16, "--samples", 4, 3, "--terms", 3)
    told = run("tests/benchmarks/simulate.py", "--base", base, "--folder", tmp_path, *sizes)
    off = json.loads(told.splitlines()[-1])
    assert abs(off["16/4/decode_steps"]) < 0.5 and abs(off["32/3/tokens"]) < 0.5
    assert off["costs"]["update_token"] > 0 and "| 16 | 4 | seconds_step |" in told


@pytest.fixture
def run_here(monkeypatch, capsys, alone):
    """Calls a benchmark of whole runs, whose commands run in this process too: what it prints."""
    family = importlib.import_module("family")
    monkeypatch.setattr(family, "python", family.here)
    monkeypatch.chdir(ROOT)

    def call(name: str, *arguments: object) -> str:
        monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
        importlib.import_module(name).main()
        return capsys.readouterr().out

    return call


TINY = [
    "--config.total_steps=2",
    "--config.compute.scan_unroll=1",
    "--config.rollout.prompts_per_step=4",
    "--config.rollout.samples_per_prompt=4",
    "--config.rollout.updates_per_rollout=2",
    "--config.data.min_terms=2",
    "--config.data.max_terms=3",
    "--config.data.heldout_problems=4",
    "--config.evaluation.every_steps=0",
    "--config.evaluation.samples_per_problem=1",
    "--config.sampler.slots=16",
    "--config.sampler.max_response_tokens=24",
    "--config.packing.row_tokens=64",
    "--config.packing.rows_per_microbatch=4",
    "--config.log.report=false",
    "--config.log.tensorboard=false",
]


def test_ways_to_learn_from_a_teacher_are_compared(tmp_path, run_here):
    table = run_here("distil", "--smoke", "--folder", tmp_path).splitlines()[2:]
    arms = [line.split("|")[1].strip() for line in table[2:]]
    assert arms[2:] == ["dapo", "distilled", "both", "imitated"] and len(arms) == 6


@pytest.mark.parametrize(
    ("script", "arguments", "row"),
    [
        ("family", ["--presets", "dapo"], "| `dapo` |"),
        ("carry_over", ["--kinds", "all"], "| all |"),
    ],
)
def test_tables_of_runs_are_made(script, arguments, row, base, tmp_path, run_here):
    shutil.copytree(base, tmp_path / "base_0")
    assert row in run_here(script, "--seeds", 1, "--folder", tmp_path, *arguments, *TINY)
