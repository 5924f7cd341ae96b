"""Model folders in a bucket, served here (fake_gcs.py), are read like those of a disk."""

import dataclasses
import json
import os
import pathlib
import shutil
import subprocess
import sys

import fake_gcs
import pytest
from small_runs import make_quick_config, read_rows

from dapo_jax.config.experiment import Data

ROOT = pathlib.Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(not shutil.which("openssl"), reason="no openssl")
READ = """
import hashlib, json, sys
import jax
import numpy as np
from dapo_jax.data.prompts.tokenizer import Tokenizer
from dapo_jax.model.load_huggingface import fingerprint, load_params, read_config
from dapo_jax.model.save_huggingface import save_settings_of
from dapo_jax.runtime.settings import ConfigError
from dapo_jax.runtime.sharding import make_mesh

for folder in sys.argv[1:]:
    try:
        config = read_config(folder)
        params = load_params(folder, config, make_mesh(1, -1, 1))
        leaves = [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(params)]
        ids = Tokenizer.from_folder(folder).encode("1+2=")
        digests = [hashlib.sha256(leaf).hexdigest() for leaf in leaves]
        print(json.dumps([repr(config), digests, ids, fingerprint(folder)]))
    except ConfigError as error:
        print(json.dumps(str(error)))
"""


@pytest.fixture
def store(tmp_path):
    with fake_gcs.serve(tmp_path, "bucket") as found:
        yield found


def upload(store, folder: pathlib.Path, name: str) -> None:
    for path in folder.iterdir():
        if path.is_file() and not path.name.startswith("."):
            store.write("bucket", f"{name}/{path.name}", path.read_bytes())


def read(store, cache: pathlib.Path, *folders: object, code: int = 0) -> list:
    """What a process that takes the store for Google's reads of each folder, or its error."""
    done = subprocess.run(
        [sys.executable, "-c", READ, *map(str, folders)],
        env=os.environ | store.environment | {"XDG_CACHE_HOME": str(cache)},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == code, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def contents_read(store) -> list[str]:
    """Weight files whose content was asked for since the last question, once for each piece."""
    names = [name for method, name, size in store.asked if method == "GET" and size > 10_000]
    store.asked.clear()
    return [name.rpartition("/")[2] for name in names if name.endswith("tensors")]


def test_a_folder_of_a_bucket_is_read_as_its_files_are_and_downloaded_once(store, base, tmp_path):
    upload(store, base, "models/base")
    name = "gs://bucket/models/base"
    remote, again, local = read(store, tmp_path / "cache", name, f"{name}/", base)
    assert remote == again == local and isinstance(local, list)
    assert contents_read(store) == ["model.safetensors"]


@pytest.mark.slow
def test_a_copy_cut_off_or_of_an_older_model_is_not_taken_for_the_model(store, base, tmp_path):
    upload(store, base, "models/base")
    name = "gs://bucket/models/base"
    remote, local = read(store, tmp_path / "cache", name, base)
    store.asked.clear()
    (copy,) = (tmp_path / "cache/dapo_jax_models").glob("*/base/model.safetensors")
    copy.write_bytes(copy.read_bytes()[:1000])
    assert read(store, tmp_path / "cache", name) == [remote]
    assert contents_read(store) == ["model.safetensors"]
    other = bytearray((base / "model.safetensors").read_bytes())
    other[-1] ^= 1
    store.write("bucket", "models/base/model.safetensors", bytes(other))
    (changed,) = read(store, tmp_path / "cache", name)
    assert changed[3] != local[3]


@pytest.mark.slow
def test_what_is_wrong_with_a_folder_of_a_bucket_is_said_in_its_name(store, base, tmp_path):
    upload(store, base, "half")
    del store.objects["bucket"]["half/config.json"]
    upload(store, base, "broken")
    store.write("bucket", "broken/model.safetensors", b"version https://git-lfs")
    names = "gs://bucket/half", "gs://bucket/none", "gs://others/model", "gs://bucket/broken"
    errors = read(store, tmp_path / "cache", *names)
    for name, error in zip(names, errors, strict=True):
        assert error.startswith(f"config.model.folder = '{name}': "), error
    assert "must hold a config.json; it holds" in errors[0] and "is empty" in errors[1]
    assert not (tmp_path / "cache/dapo_jax_models").exists() or not [
        path for path in (tmp_path / "cache/dapo_jax_models").rglob("*.unfinished")
    ]
    store.faults = fake_gcs.Faults(forbidden=("GET",))
    (error,) = read(store, tmp_path / "other", "gs://bucket/broken")
    assert error.startswith("config.model.folder = 'gs://bucket/broken': "), error


COMPILE = """
import jax, jax.numpy as jnp
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
def twice(x):
    return jnp.sin(x) @ x
jax.jit(twice)(jnp.ones((8, 8))).block_until_ready()
jax.clear_caches()  # as in a new process
jax.jit(twice)(jnp.ones((8, 8))).block_until_ready()
"""


@pytest.mark.slow
def test_programs_that_are_kept_in_a_bucket_are_not_compiled_again(store):
    variables = {"JAX_COMPILATION_CACHE_DIR": "gs://bucket/jax_cache", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", COMPILE],
        env=os.environ | store.environment | variables,
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and "Error" not in done.stderr, done.stderr
    (kept,) = [name for name in store.objects["bucket"] if "twice" in name]
    size = len(store.objects["bucket"][kept].content)
    assert [method for method, name, sent in store.asked if sent == size and method == "GET"]


@pytest.mark.slow
def test_a_run_on_model_and_data_of_a_bucket_is_that_on_a_disk(store, base, tmp_path):
    data = tmp_path / "data"
    data.mkdir()
    rows = [{"question": f"{i}+{i + 1}=", "answer": str(2 * i + 1)} for i in range(40)]
    (data / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    upload(store, base, "base")
    upload(store, data, "data")
    found = []
    for number, places in enumerate([("gs://bucket/base", "gs://bucket/data"), (base, data)]):
        model, folder = map(str, places)
        run_dir = tmp_path / f"run_{number}"
        own = Data(source="sums", folder=folder, max_prompt_tokens=8, heldout_problems=8)
        config = make_quick_config(model, str(run_dir), total_steps=1, data=own)
        path = tmp_path / f"config_{number}.json"
        path.write_text(json.dumps(dataclasses.asdict(config)))
        done = subprocess.run(
            [sys.executable, "-m", "dapo_jax", "train", f"--config={path}"],
            env=os.environ | store.environment | {"XDG_CACHE_HOME": str(tmp_path), "XLA_FLAGS": ""},
            cwd=ROOT,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        found.append(read_rows(run_dir))
    assert found[0] == found[1] and found[0]
