"""Versions of the policy in a folder: complete or absent, and read only if nothing is damaged."""

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
from dapo_jax.extras.samplers.weight_versions import KEPT, NoVersion, WeightVersions
from dapo_jax.model.trainable import choose_trained, fresh_adapters
from dapo_jax.rollout.weight_transfer import DecodingWeights, TrainerWeights
from dapo_jax.run.components import load_frozen
from dapo_jax.runtime.sharding import flatten

ARRAYS = {
    "layers/0/kernel": jnp.arange(6, dtype=jnp.bfloat16).reshape(2, 3) / 7,
    "layers/0/scale": jnp.ones((), jnp.float32),
    "layers/1/kernel": jnp.arange(-3, 3, dtype=jnp.int8),
}


@pytest.fixture
def versions(tmp_path):
    return WeightVersions(str(tmp_path))


def files_of(tmp_path) -> list[pathlib.Path]:
    return sorted(path for path in (tmp_path / "weights").rglob("*") if path.is_file())


def test_arrays_are_read_as_they_were_written(versions, tmp_path, monkeypatch):
    monkeypatch.setattr("dapo_jax.extras.samplers.weight_versions.SHARD_BYTES", 8)  # a file each
    digest = versions.write(4, lambda: ARRAYS)
    assert len(files_of(tmp_path)) == 4  # two files of arrays, their index, checksums
    arrays = WeightVersions(str(tmp_path)).read(4, digest)
    assert arrays.keys() == ARRAYS.keys()
    for name, array in ARRAYS.items():
        assert arrays[name].dtype == array.dtype
        np.testing.assert_array_equal(arrays[name], array)


def test_each_shard_is_written_once_and_arrays_are_whole_again(versions, tmp_path):
    """By turns of the devices that hold it, so that all processes of a trainer write."""
    mesh = jax.make_mesh((2, 2, 2), ("a", "b", "c"))
    specs = {"rows": P("a"), "columns": P(None, ("b", "c")), "all": P(), "both": P("c", "a")}
    arrays = {
        name: jax.device_put(np.random.rand(4, 8).astype("float32"), NamedSharding(mesh, spec))
        for name, spec in specs.items()
    }
    read = versions.read(0, versions.write(0, lambda: arrays))
    assert equal(dict(read), {name: np.asarray(array) for name, array in arrays.items()})
    size = sum(path.stat().st_size for path in files_of(tmp_path) if path.suffix == ".bin")
    assert size == sum(array.nbytes for array in arrays.values())


def test_of_a_run_with_adapters_only_they_are_written(versions, tiny_folder, one_device, tmp_path):
    decoder = choose_trained(TINY, 0.0, Lora(rank=2, alpha=4.0))
    adapters = fresh_adapters(decoder, one_device, 0)
    trainer = TrainerWeights(one_device, load_frozen(str(tiny_folder), decoder, one_device))
    weights = DecodingWeights(decoder, one_device, trainer, Sampler())
    digest = versions.write(0, lambda: weights.load_trained(adapters))
    arrays = versions.read(0, digest)
    assert arrays and not arrays.keys() & weights.frozen().keys()
    here, there = weights.load(adapters), weights.load(arrays)
    assert equal(here, there)
    for path, stack in flatten(adapters).items():  # as PEFT's files are made of them
        np.testing.assert_array_equal(arrays.stacks(decoder)[path], stack)
    arrays.popitem()
    with pytest.raises(ValueError, match="not those of this model"):
        weights.load(arrays)


def test_a_version_is_written_once_and_the_newest_are_kept(versions, tmp_path):
    digests = [versions.write(step, lambda: ARRAYS) for step in range(4)]
    assert versions.write(3, lambda: pytest.fail("it is there")) == digests[3]
    names = [path.name for path in sorted((tmp_path / "weights").iterdir())]
    assert names == [f"version_{step:06d}" for step in (2, 3)] and len(names) == KEPT
    with pytest.raises(NoVersion, match="version_000001 can't be read"):
        versions.read(1, digests[1])
    versions.clear()
    assert files_of(tmp_path) == []


def test_what_a_kill_left_is_absent_and_written_again(versions, tmp_path, monkeypatch):
    class Killed(BaseException):
        pass

    def stop():
        yield from list(ARRAYS.items())[:1]
        raise Killed

    class Torn(dict):
        items = staticmethod(stop)

    with pytest.raises(Killed):
        versions.write(1, lambda: Torn(ARRAYS))
    assert files_of(tmp_path)
    with pytest.raises(NoVersion):
        versions.read(1, "0" * 16)
    digest = versions.write(1, lambda: ARRAYS)
    assert versions.read(1, digest).keys() == ARRAYS.keys()


@pytest.mark.parametrize("damage", ["flipped", "torn", "deleted"])
@pytest.mark.parametrize("number", range(3))
def test_a_damaged_version_is_not_read(damage, number, versions, tmp_path):
    digest = versions.write(1, lambda: ARRAYS)
    file = files_of(tmp_path)[number]
    content = bytearray(file.read_bytes())
    if damage == "flipped":
        content[len(content) // 2] ^= 4
    file.write_bytes(content[: len(content) // 2] if damage == "torn" else content)
    if damage == "deleted":
        file.unlink()
    with pytest.raises(NoVersion):
        versions.read(1, digest)


def test_a_version_of_another_digest_is_not_read(versions):
    versions.write(1, lambda: ARRAYS)
    with pytest.raises(NoVersion, match="is not the version that the trainer names"):
        versions.read(1, "0" * 16)
