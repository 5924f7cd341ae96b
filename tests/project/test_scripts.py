"""Every script of the repository works on something small."""

import importlib
import json
import pathlib
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


@pytest.fixture
def run_here(monkeypatch, capsys, alone):
    monkeypatch.chdir(ROOT)

    def call(name: str, *arguments: object) -> str:
        monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
        importlib.import_module(name).main()
        return capsys.readouterr().out

    return call


@pytest.mark.slow
def test_verdicts_are_compared_with_another_verifier(tmp_path):
    path = tmp_path / "few.jsonl"
    path.write_text("".join(f'{{"problem": "{i}?", "answer": "{i}"}}\n' for i in range(9)))
    output = run("benchmarks/agreement.py", path, "--pairs", 600)
    assert "| core | dapo_jax | 469 of 469 | 0 of 529 |" in output
    assert "| few | dapo_jax | 9 of 9 | 0 of " in output


@pytest.mark.slow
def test_loading_is_measured_on_a_folder():
    folder = ROOT / "tests/fixtures/models/qwen3"
    assert json.loads(run("benchmarks/loading.py", folder, "measure"))["files"] > 0


@pytest.mark.slow
def test_rollout_update_and_step_are_timed():
    sizes = ("--repeats", 1, "--only", "update", "--workload", "smoke")
    step = json.loads(run("benchmarks/ours.py", *sizes))
    assert step["median_s"] > 0 and step["tokens_per_s"] > 0


@pytest.mark.slow
def test_a_real_models_step_is_timed(tmp_path):
    ours = importlib.import_module("ours")
    ours.write_folder(str(tmp_path), ours.SMOKE_DECODER)
    sizes = ("--repeats", 1, "--prompts", 2, "--group", 2, "--new_tokens", 8)
    output = run("benchmarks/real_model.py", "--model", tmp_path, *sizes)
    first, *table = output.splitlines()
    assert json.loads(first)["dapo_jax"][0]["tokens"] > 0
    assert [row.split("|")[1].strip() for row in table[2:5]] == ["rollout", "update", "step"]
    learnt = run("benchmarks/real_model.py", "--model", tmp_path, *sizes, "--learn", 1)
    assert "| dapo_jax | 1 |" in learnt


@pytest.mark.slow
def test_what_shared_prompts_save_is_counted():
    *_, row = run("benchmarks/shared_prompts.py").splitlines()
    assert row == "| two_strategies | 915 | 627 | 1,280 | 640 | 50% | 26% |"


TINY = (
    "total_steps=2 algorithm.importance_cap=2 compute.scan_unroll=1 rollout.prompts_per_step=4 "
    "rollout.samples_per_prompt=4 rollout.updates_per_rollout=2 data.min_terms=2 data.max_terms=3 "
    "data.heldout_problems=4 evaluation.every_steps=0 evaluation.samples_per_problem=1 "
    "sampler.slots=16 sampler.max_response_tokens=24 packing.row_tokens=64 "
    "packing.rows_per_microbatch=4 log.report=false log.tensorboard=false"
)


@pytest.mark.slow
def test_presets_and_values_of_a_setting_are_compared(base, tmp_path, run_here):
    shutil.copytree(base, tmp_path / "base_0")
    varied = ("--presets", "dapo", "--vary", "rollout.carry_over=none,all")
    output = run_here("family", "--seeds", 1, "--folder", tmp_path, *varied, *bench.flags(TINY))
    assert output.count("| `dapo` none |") == output.count("| `dapo` all |") == 2
    assert "not finite: none" in output
