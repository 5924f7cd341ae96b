"""Flex-start, models, data, compiled programs and new commits on TPU VMs; `gcloud` is a stub."""

import subprocess

import pytest


def test_flex_start_takes_the_command_that_has_it(cloud):
    cloud.plays(runs=[{"preempt": 3}, {}])
    output = cloud.runs("--flex-start=4h", "--tries=2")
    create, again = cloud.calls("queued-resources", "create")
    flags = {"--provisioning-model=flex-start", "--max-run-duration=4h", "--node-id=dapo"}
    assert flags | {"--valid-until-duration=24h"} <= set(create) and create == again
    assert "flex-start for 4h" in output and "from step 3" in output and not cloud.exists()


def test_flex_start_is_paid_for_once_unless_more_tries_are_asked_for(cloud):
    cloud.plays(runs=[{"preempt": 3}, {}])
    assert "no tries are left" in cloud.runs("--flex-start=4h", expect=1)
    assert len(cloud.calls("queued-resources", "create")) == 1


def test_a_model_and_data_are_downloaded_by_every_worker_with_a_token_that_is_said_nowhere(cloud):
    token = cloud.folder / "hub"
    token.write_text("hf_secret")
    words = ("--model=Qwen/Qwen2.5-0.5B", "--data=openai/gsm8k", f"--token-file={token}")
    output = cloud.runs("--keep", *words)
    for worker in (0, 1):
        asked, held = (cloud.folder / f"downloads.{worker}").read_text().splitlines()
        assert asked.startswith("launch/download.py --model=Qwen/Qwen2.5-0.5B --data=openai/gsm8k")
        assert held == "hf_secret" and len(cloud.starts(worker)) == 1
        (there,) = (cloud.folder / f"workers/{worker}").glob("dapo_jax_token")
        assert there.stat().st_mode & 0o077 == 0
        there.unlink()  # what the real script does
    token.unlink()
    assert "hf_secret" not in output
    records = [p for p in cloud.folder.rglob("*") if p.is_file() and "downloads" not in p.name]
    assert not [path for path in records if b"hf_secret" in path.read_bytes()]


def test_a_model_of_a_bucket_is_a_setting_and_nothing_is_downloaded_unasked(cloud):
    token = cloud.folder / "hub"
    token.write_text("hf_secret")
    places = "--model=gs://b/models/Qwen", "--data=gs://b/data"
    cloud.runs("--keep", *places, f"--token-file={token}")
    assert not list(cloud.folder.glob("workers/*/dapo_jax_token"))  # nobody there needs it
    arguments = set(cloud.starts()[0]["arguments"])
    assert "--config.model.folder=gs://b/models/Qwen" in arguments
    assert "--config.data.folder=gs://b/data" in arguments
    assert not list(cloud.folder.glob("downloads.*"))


def test_programs_are_kept_in_the_runs_bucket(cloud):
    cloud.runs("--keep")
    cloud.runs("--env=JAX_COMPILATION_CACHE_DIR=gs://own/place")
    caches = [start["env"]["JAX_COMPILATION_CACHE_DIR"] for start in cloud.starts()]
    assert caches == ["gs://b/jax_cache", "gs://own/place"]


@pytest.mark.parametrize("interrupted", [False, True])
def test_models_on_a_worker_outlive_a_new_commit(cloud, interrupted):
    cloud.plays(workers=1)
    cloud.runs("--keep")
    base = cloud.folder / "workers/0/dapo_jax_run"
    tree = base / "tree"
    (tree / "models/Qwen").mkdir(parents=True)
    (tree / "models/Qwen/model.safetensors").write_text("weights")
    (tree / ".hidden").write_text("mine")
    if interrupted:  # between the two renames of an installation
        (base / "tree.id").unlink()
        tree.rename(base / "tree.old")
    (cloud.tree / "setup.py").write_text("new")
    git = ["git", "-C", str(cloud.tree), "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run([*git, "commit", "-qam", "b"], check=True)
    cloud.runs()
    assert (tree / "models/Qwen/model.safetensors").read_text() == "weights"
    assert (tree / ".hidden").read_text() == "mine" and (tree / "setup.py").read_text() == "new"
    assert (tree / ".venv/bin/python").exists() and not (base / "tree.old").exists()
