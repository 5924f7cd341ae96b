"""Every script of the repository works on something small."""

import importlib
import json
import pathlib
import random
import re
import shutil
import sys

import bench
import forked
import pytest

ROOT = pathlib.Path(__file__).parents[2]


def run(script: str, *arguments: object) -> str:
    done = forked.run(ROOT / "tests" / script, *arguments, XLA_FLAGS=forked.one_device())
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


FEW = (  # replaces what a benchmark sets itself
    "evaluation.samples_per_problem=1 compute.scan_unroll=1 rollout.prompts_per_step=4 "
    "rollout.samples_per_prompt=4"
)


@pytest.fixture
def run_here(monkeypatch, capsys, alone):
    monkeypatch.chdir(ROOT)

    def call(name: str, *arguments: object) -> str:
        monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
        importlib.import_module(name).main()
        return capsys.readouterr().out

    return call


def test_attacks_on_the_verifier_are_refused():
    output = run("extras/math/attack_verifier.py", "--golds", 12, "--every", 5)
    totals = json.loads(output.splitlines()[-1])
    assert totals["attacks"] > 500 and totals["accepted"] == totals["killed"] == 0


def test_the_fuzzer_finds_nothing():
    assert "nothing did harm" in run("extras/math/fuzz_verifier.py", "--minutes", 0.02)


def test_gold_answers_equal_themselves(tmp_path):
    rows = [
        {"problem": "Add $1+1$.", "answer": "2", "solution": r"It is \boxed{2}."},
        {"problem": "Factor $x^2-1$.", "answer": "(x-1)(x+1)", "solution": r"\boxed{(x+1)(x-1)}"},
    ]
    path = tmp_path / "few.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    output = run("benchmarks/gold.py", path)
    assert "| 2 | 0 | 2 of 2 | 2 of 2 | 2 of 2 |" in output


def test_the_verifier_is_timed():
    output = run("benchmarks/verifier.py", "--responses", 64, "--characters", 500, "--workers", 1)
    lines = [json.loads(line) for line in output.splitlines() if line[0] == "{"]
    assert {line["kind"] for line in lines} == {"dapo-like", "math-like"}


def test_verdicts_are_compared_with_another_verifier(tmp_path):
    path = tmp_path / "few.jsonl"
    path.write_text("".join(f'{{"problem": "{i}?", "answer": "{i}"}}\n' for i in range(9)))
    output = run("benchmarks/agreement.py", path, "--different", 2)
    assert "| core | dapo_jax | 469 of 469 | 0 of 529 |" in output
    assert "| few | dapo_jax | 9 of 9 | 0 of " in output


def test_rules_of_the_verifier_are_switched_off():
    rows = run("benchmarks/ablation.py", "--every", 23).splitlines()
    changes = {row.split(" | ")[0]: row.split(" | ")[1:] for row in rows[2:]}
    assert int(changes["| unfinished answers"][0]) > 0
    assert int(changes["| intervals and inequalities"][1].rstrip(" |")) > 0


def test_loading_is_measured_on_a_folder():
    folder = ROOT / "tests/fixtures/models/qwen3"
    assert json.loads(run("benchmarks/loading.py", folder, "measure"))["files"] > 0


def test_what_shared_prompts_save_is_computed_and_timed(run_here):
    output = run_here("shared_prompts")
    saved = {
        row.split("|")[1].strip(): row.split("|")[-2].strip() for row in output.splitlines()[2:]
    }
    assert saved["GSM8K, 8 examples in the prompt"] > "70%" and saved["32B's config"] == "0%"
    rounds = run_here("shared_prompts", "--seconds", "--smoke", "--rounds", 1).splitlines()
    separate, shared = (json.loads(rounds[-1])[name] for name in ("separate", "shared"))
    assert shared["positions"] < separate["positions"] and min(shared.values()) > 0


def test_our_benchmark_and_the_comparison_run():
    sizes = ("--only", "update", "--workload", "smoke")
    output = run("benchmarks/compare.py", "--rounds", 1, "--repeats", 1, *sizes)
    first, *table = output.splitlines()
    step = json.loads(first)["dapo_jax"]["update"]
    assert step["median_s"] > 0 and 0 < step["gflops"] < step["matmul_gflops"]
    assert len(table) == 3 and table[-1].startswith("| smoke | update |")


def test_a_real_models_step_is_timed(tmp_path):
    ours = importlib.import_module("ours")
    ours.write_folder(str(tmp_path), ours.SMOKE_DECODER)
    sizes = ("--repeats", 1, "--prompts", 2, "--group", 2, "--new_tokens", 8)
    output = run("benchmarks/real_model.py", "--model", tmp_path, *sizes)
    first, *table = output.splitlines()
    assert json.loads(first)["dapo_jax"][0]["tokens"] > 0
    assert [row.split("|")[1].strip() for row in table[2:5]] == ["rollout", "update", "step"]


@pytest.mark.slow
def test_a_real_models_learning_is_timed(tmp_path):
    ours = importlib.import_module("ours")
    ours.write_folder(str(tmp_path), ours.SMOKE_DECODER)
    output = run("benchmarks/real_model.py", "--model", tmp_path, "--learn", 1, "--every", 1)
    assert [row.split("|")[2].strip() for row in output.splitlines()[3:]] == ["0", "1"]


def test_growth_is_measured_and_drawn(tmp_path):
    picture = tmp_path / "growth.png"
    sizes = ("--axes", "vocab", "grid", "--most", 512, "--smoke")
    output = run("benchmarks/growth.py", *sizes, "--plot", picture)
    assert "| vocabulary | 512 |" in output and "rows of 160 tokens |" in output
    assert picture.stat().st_size > 10_000


def test_accuracy_is_measured_against_staleness(run_here, tmp_path):
    picture = tmp_path / "staleness.png"
    sizes = ("--folder", tmp_path, "--staleness", 0, "--steps", 1, "--plot", picture)
    output = run_here("staleness", *sizes, *bench.flags(FEW))
    assert output.count("heldout_accuracy") == 1 and "| old_logprobs=sampler |" in output
    assert picture.stat().st_size > 10_000


@pytest.mark.parametrize("task", ["arithmetic", pytest.param("calculator", marks=pytest.mark.slow)])
def test_samples_are_counted_until_an_accuracy(run_here, tmp_path, task):
    (tmp_path / task).mkdir()
    (tmp_path / task / "base").symlink_to(ROOT / "dapo_jax/data/policies/arithmetic_base")
    target = 0.01 if task == "arithmetic" else 0
    sizes = ("--task", task, "--folder", tmp_path, "--steps", 2, "--target", target)
    sizes += ("--arms", "pools")
    (row,) = [line for line in run_here("difficulty", *sizes).splitlines() if "| pools |" in line]
    *_, samples, until, _ = row.split("|")
    assert 0 < int(until) <= int(samples)


@pytest.mark.skipif(not shutil.which("bwrap"), reason="needs bubblewrap")
def test_a_policy_over_bytes_writes_programs(run_here, tmp_path):
    sizes = ("--folder", tmp_path, "--sft_steps", 12, "--steps", 2)
    output = run_here("programs", *sizes, *bench.flags(FEW))
    assert [line.split("|")[1].strip() for line in output.splitlines() if "0." in line] == [
        "0",
        "1",
        "2",
    ]


def test_half_of_the_answers_that_a_start_for_a_package_learns_from_are_wrong():
    packages = importlib.import_module("packages")
    random.seed(0)
    names = ["AnnaBell", "BobClark"]
    info = {"user_turns": ["Sort", "Sort all"], "ground_truths": [names[:1], names]}
    tasks = {
        "3412": {"prompt": "2143", "answer": "3412", "system_prompt": "Reverse"},
        "\n".join(names): {"prompt": None, "info": info, "system_prompt": None},
    }
    for right, task in tasks.items():
        kept = json.dumps(task)
        answers = [packages.solve(json.loads(kept))[-1]["content"] for _ in range(400)]
        assert 160 < sum(right in answer for answer in answers) < 240


@pytest.mark.slow
@pytest.mark.parametrize("package", ["reverse_text", "alphabet_sort"])
def test_a_policy_is_trained_by_a_package_of_verifiers(run_here, tmp_path, package):
    pytest.importorskip("verifiers.v1")
    sizes = ("--package", package, "--folder", tmp_path, "--examples", 1640, "--steps", 2)
    output = run_here("packages", *sizes, "--config.data.heldout_problems=8")
    rows = [line.split("|")[1].strip() for line in output.splitlines() if " to " in line]
    assert rows == ["0", "1", "2"]


def test_the_judge_of_a_benchmark_reads_the_numbers_to_compare_as_one_token(tmp_path):
    judged = importlib.import_module("judged")
    rows = [judged.make_row(index) for index in range(64)]
    assert {json.loads(row["messages"][-1]["content"])["score"] for row in rows} == {0, 1}
    judged.write_start(tmp_path, rows)
    tokenizer = judged.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    for index, row in enumerate(rows):
        text = row["messages"][1]["content"]
        compared = [piece for piece in tokenizer.encode(text).tokens if '"reference' in piece]
        assert tokenizer.decode(tokenizer.encode(text).ids) == text
        assert [piece[:5] == "#### " for piece in compared] == [index % 8 > 0]  # else cut off


@pytest.mark.slow
def test_a_policy_learns_from_a_judge_alone(run_here, tmp_path):
    sizes = ("--folder", tmp_path, "--steps", 2)
    *rows, agreed = run_here("judged", *sizes, "--config.data.heldout_problems=8").splitlines()
    assert [row.split("|")[1].strip() for row in rows[-3:-1]] == ["0", "2"]
    right, scored = map(int, re.findall(r"(\d+) of (\d+)", agreed)[0])
    assert right > 0.5 * scored > 0


def test_seconds_go_to_kinds_of_operations():
    output = run("benchmarks/ours.py", "--profile", "--only", "rollout", "--workload", "smoke")
    assert "| matrix products |" in output and "| waiting |" in output


def test_rollouts_of_several_turns_are_timed():
    sizes = ("--seconds", 0.01, "--wait", 1, "--prompts", 1, "--samples", 2, "--slots", 2)
    output = run("benchmarks/turns.py", *sizes, "--workers", 1, "--rounds", 1)
    _, _, *rows = output.splitlines()
    assert [row.split("|")[3].strip() for row in rows] == ["prefilled", "kept"]
    assert [float(row.split("|")[7].split()[0]) > 0 for row in rows] == [True, False]


def test_router_replay_is_measured(tmp_path, run_here):
    sizes = ("--base_steps", 0, "--prompts", 1, "--unroll", 1, "--arithmetic", "float32")
    output = run_here("experts", "--folder", tmp_path, *sizes)
    assert output.splitlines()[-1].startswith("| float32 | 0.00 % | 0.00 % | 0.00 % |")


def test_ways_to_learn_from_a_teacher_are_compared(tmp_path, run_here):
    table = run_here("distil", "--smoke", "--folder", tmp_path).splitlines()[4:]
    arms = [line.split("|")[1].strip() for line in table]
    assert arms[2:] == ["dapo", "distilled", "both", "imitated"] and len(arms) == 6


TINY = (
    "total_steps=2 algorithm.importance_cap=2 compute.scan_unroll=1 rollout.prompts_per_step=4 "
    "rollout.samples_per_prompt=4 rollout.updates_per_rollout=2 data.min_terms=2 data.max_terms=3 "
    "data.heldout_problems=4 evaluation.every_steps=0 evaluation.samples_per_problem=1 "
    "sampler.slots=16 sampler.max_response_tokens=24 packing.row_tokens=64 "
    "packing.rows_per_microbatch=4 log.report=false log.tensorboard=false"
)


def test_presets_and_values_of_a_setting_are_compared(base, tmp_path, run_here):
    shutil.copytree(base, tmp_path / "base_0")
    varied = ("--presets", "dapo", "--vary", "rollout.carry_over=none,all")
    output = run_here("family", "--seeds", 1, "--folder", tmp_path, *varied, *bench.flags(TINY))
    assert output.count("| `dapo` none |") == output.count("| `dapo` all |") == 2
    assert "not finite: none" in output
