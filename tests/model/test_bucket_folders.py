"""Model folders in a bucket, served here (fake_gcs.py), are read like those of a disk."""

import json
import os
import pathlib
import subprocess
import sys

import fake_gcs
import pytest

ROOT = pathlib.Path(__file__).parents[2]
READ = """
import hashlib, json, sys
import jax
import numpy as np
from dapo_jax.data.prompts.tokenizer import Tokenizer
from dapo_jax.model.load_huggingface import fingerprint, load_params, read_config
from dapo_jax.model.save_huggingface import save_settings_of
from dapo_jax.types.errors import ConfigError
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
def store():
    with fake_gcs.serve("bucket") as store:
        yield store


def upload(store, folder: pathlib.Path, name: str) -> None:
    for path in folder.iterdir():
        if path.is_file() and not path.name.startswith("."):
            store.write("bucket", f"{name}/{path.name}", path.read_bytes())


def read(store, cache: pathlib.Path, *folders: object) -> list:
    """Return what a process reads of each folder, or its error; it takes the store for Google's."""
    done = subprocess.run(
        [sys.executable, "-c", READ, *map(str, folders)],
        env=os.environ | store.environment | {"XDG_CACHE_HOME": str(cache)},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def contents_read(store) -> list[str]:
    """Return the weight files read since the last call, once for each piece."""
    names = [name for method, name, size in store.asked if method == "GET" and size > 10_000]
    store.asked.clear()
    return [name.rpartition("/")[2] for name in names if name.endswith("tensors")]


@pytest.mark.slow
def test_a_folder_of_a_bucket_is_downloaded_once_unless_it_was_cut_off_or_changed(
    store, base, tmp_path
):
    upload(store, base, "models/base")
    name = "gs://bucket/models/base"
    remote, again, local = read(store, tmp_path / "cache", name, f"{name}/", base)
    assert remote == again == local and isinstance(local, list)
    assert contents_read(store) == ["model.safetensors"]
    (copy,) = (tmp_path / "cache/dapo_jax_models").glob("*/base/model.safetensors")
    copy.write_bytes(copy.read_bytes()[:1000])
    assert read(store, tmp_path / "cache", name) == [remote]
    assert contents_read(store) == ["model.safetensors"]
    other = bytearray((base / "model.safetensors").read_bytes())
    other[-1] ^= 1
    store.write("bucket", "models/base/model.safetensors", bytes(other))
    (changed,) = read(store, tmp_path / "cache", name)
    assert changed[3] != local[3]
