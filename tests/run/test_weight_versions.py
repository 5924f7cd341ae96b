"""Versions of the policy in a folder: files that their digests name, so that none is half read."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import TINY
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from small_runs import equal

from dapo_jax.config.experiment import Lora, Sampler
from dapo_jax.extras.samplers.weight_versions import KEPT, WeightVersions
from dapo_jax.model.trainable import choose_trained, fresh_adapters
from dapo_jax.rollout.weight_transfer import DecodingWeights
from dapo_jax.run.build import load_frozen

ARRAYS = {
    "layers/0/kernel": jnp.arange(6, dtype=jnp.bfloat16).reshape(2, 3) / 7,
    "layers/0/scale": jnp.ones((), jnp.float32),
    "layers/1/kernel": jnp.arange(-3, 3, dtype=jnp.int8),
}


@pytest.fixture
def versions(tmp_path):
    return WeightVersions(str(tmp_path))


def files_of(tmp_path) -> list[pathlib.Path]:
    return sorted((tmp_path / "weights").iterdir())


def test_arrays_are_read_as_they_were_written(versions, tmp_path):
    version = versions.write(ARRAYS)
    arrays = WeightVersions(str(tmp_path)).read(version)
    assert arrays.keys() == ARRAYS.keys()
    for name, array in ARRAYS.items():
        assert arrays[name].dtype == array.dtype
        np.testing.assert_array_equal(arrays[name], array)


def test_each_shard_is_written_once_and_arrays_are_whole_again(versions, tmp_path):
    """By turns of the devices that hold it, so that all processes of a trainer write."""
    mesh = jax.make_mesh((2, 2, 2), ("a", "b", "c"))
    specs = {"rows": P("a"), "columns": P(None, ("b", "c")), "all": P(), "both": P("c", "a")}
    arrays = {
        name: jax.device_put(np.random.rand(40, 80).astype("float32"), NamedSharding(mesh, spec))
        for name, spec in specs.items()
    }
    read = versions.read(versions.write(arrays))
    assert equal(dict(read), {name: np.asarray(array) for name, array in arrays.items()})
    size = sum(path.stat().st_size for path in files_of(tmp_path))
    assert 0 <= size - sum(array.nbytes for array in arrays.values()) < 4096  # names and shapes


def test_of_a_run_with_adapters_only_they_are_written(versions, tiny_folder, one_device):
    decoder = choose_trained(TINY, 0.0, Lora(rank=2, alpha=4.0))
    adapters = fresh_adapters(decoder, one_device, 0)
    frozen = load_frozen(str(tiny_folder), decoder, one_device)
    weights = DecodingWeights(decoder, one_device, one_device, Sampler(), frozen)
    arrays = versions.read(versions.write(weights.load_trained(adapters)))
    assert arrays and not arrays.keys() & weights.frozen().keys()
    assert equal(weights.load(adapters), weights.load(arrays))
    arrays.popitem()
    with pytest.raises(ValueError, match="not those of this model"):
        weights.load(arrays)


def test_the_newest_versions_are_kept_and_a_resumed_run_writes_the_same(versions, tmp_path):
    written = [versions.write({"a": jnp.full(4, step)}) for step in range(4)]
    assert [path.name for path in files_of(tmp_path)] == sorted(written[-KEPT:])
    with pytest.raises(OSError, match="No such file"):
        versions.read(written[1])
    resumed = WeightVersions(str(tmp_path))
    assert resumed.write({"a": jnp.full(4, 3)}) == written[3]
    assert [path.name for path in files_of(tmp_path)] == [written[3]]


@pytest.mark.parametrize("damage", ["flipped", "torn", "deleted"])
def test_a_damaged_version_is_not_read_and_is_written_again(damage, versions, tmp_path):
    version = versions.write(ARRAYS)
    (file,) = files_of(tmp_path)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 4
    file.write_bytes(content[: len(content) // 2] if damage == "torn" else content)
    if damage == "deleted":
        file.unlink()
    with pytest.raises(OSError):
        versions.read(version)
    assert versions.write(ARRAYS) == version
    assert versions.read(version).keys() == ARRAYS.keys()
