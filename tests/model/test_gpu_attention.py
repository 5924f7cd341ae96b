"""The GPU's kernels compute plain attention, in Pallas' interpreter; a compiler accepts them."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import TINY
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from named_meshes import named_mesh
from test_attention import assert_equal, ragged_ids, results

from dapo_jax.config.experiment import Mesh as MeshSettings
from dapo_jax.config.experiment import Sampler
from dapo_jax.model import decode_attention, gpu_attention, training_attention
from dapo_jax.model.blockwise_attention import RowIds
from dapo_jax.model.caches import KVCache
from dapo_jax.model.decode_attention import SlotAttention, SlotContext
from dapo_jax.model.gpu_attention import rows_attention, slots_attention
from dapo_jax.rollout.cache_layout import CacheLayout
from dapo_jax.runtime.sharding import make_mesh

# NVIDIA's data sheet; CUDA programming guide, compute capability 9.0.
H100 = """
gpu_device_info {
  cuda_compute_capability { major: 9 minor: 0 }
  core_count: 132
  fpus_per_core: 128
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: 2048
  registers_per_block_limit: 65536
  registers_per_core_limit: 65536
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
  l2_cache_size: 52428800
  clock_rate_ghz: 1.98
  device_address_bits: 64
  memory_bandwidth: 3350000000000
  device_memory_size: 84942979072
  device_vendor: "NVIDIA Corporation"
  name: "H100"
  runtime_version: "12.8.0"
  driver_version: "12.8.0"
  compile_time_toolkit_version: "12.8.0"
  dnn_version: "9.10.0"
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 }
device_description_str: "H100"
"""
RNG = np.random.default_rng(5)


def arrays_of(rows: int, length: int, heads: int, kv_heads: int, width: int):
    shapes = [(rows, length, n, width) for n in (heads, kv_heads, kv_heads, heads)]
    return [jnp.asarray(RNG.normal(size=shape), jnp.float32) for shape in shapes]


@pytest.mark.parametrize(
    ("heads", "kv_heads", "cut"), [(4, 2, False), (4, 2, True), (3, 1, False), (2, 2, False)]
)
def test_packed_rows_and_their_gradients(heads, kv_heads, cut):
    """Also on a mesh that cuts rows and heads."""
    arrays, ids = arrays_of(4, 128, heads, kv_heads, 16), ragged_ids(128, 4)
    mesh = make_mesh(data=2, fsdp=2, tensor=2) if cut else None
    assert_equal(results("triton", arrays, ids, mesh), results("plain", arrays, ids))


@pytest.mark.parametrize("case", ["window", "sinks", "length", "width"])
def test_unsupported_cases_run_blockwise(case, monkeypatch):
    monkeypatch.setattr(gpu_attention, "rows_attention", None)  # would fail
    length, width = (100 if case == "length" else 128), (24 if case == "width" else 16)
    arrays, ids = arrays_of(2, length, 4, 2, width), ragged_ids(length, 2)
    window = training_attention.Window(9) if case == "window" else None
    sinks = jnp.ones(4) if case == "sinks" else None
    expected = results("plain", arrays, ids, None, window, sinks)
    assert_equal(results("triton", arrays, ids, None, window, sinks), expected)


def decode(attend, lengths, cache, heads=4, active=None, dtype=jnp.float32):
    """A token for each slot, after `lengths` that are there."""
    slots, kv_heads, _, width = cache.values.shape
    shapes = [(slots, 1, n, width) for n in (heads, kv_heads, kv_heads)]
    rng = np.random.default_rng(1)
    new = (jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes)
    active = jnp.ones(slots, bool) if active is None else active
    context = SlotContext(jnp.asarray(lengths, jnp.int32)[:, None], active, None)
    return jax.jit(attend)(*new, context, cache)


def filled(slots: int, kv_heads: int, length: int, width: int) -> KVCache:
    shape = slots, kv_heads, length, width
    keys, values = (jnp.asarray(RNG.normal(size=shape), jnp.float32) for _ in range(2))
    return KVCache(keys, values, None, None, time_last=False)


@pytest.mark.parametrize("length", [256, 96, 8])  # the last is too short for the kernel
@pytest.mark.parametrize("mesh", ["one_device", "eight_devices"])
def test_only_filled_blocks_of_slots_are_read(length, mesh, request, monkeypatch):
    mesh, cache = request.getfixturevalue(mesh), filled(8, 2, length, 16)
    lengths = [0, 1, length // 2 - 1, length // 2, 5, 3, length - 2, length - 1]
    active = jnp.arange(8) != 5
    expected, written = decode(decode_attention.attend_slots, lengths, cache, active=active)
    # Blocks that nobody may read hold what would spoil every sum.
    _, block = gpu_attention.split_of(length) or (1, length)
    beyond = jnp.arange(length) // block > jnp.array(lengths)[:, None] // block
    if length > 8:
        keys, values = (
            jnp.where(beyond[:, None, :, None], jnp.nan, array)
            for array in (cache.keys, cache.values)
        )
        cache = cache.replace(keys=keys, values=values)
    mixed, after = decode(SlotAttention(mesh, True), lengths, cache, active=active)
    assert_equal(mixed[active], expected[active])
    np.testing.assert_array_equal(after.values[0, :, 0], written.values[0, :, 0])


def test_the_bfloat16_error_matches_plain_attentions(one_device):
    cache, lengths = filled(8, 2, 1536, 64), [1535, 700, 30, 1, 0, 900, 1200, 77]
    exact, _ = decode(decode_attention.attend_slots, lengths, cache)
    half = cache.replace(keys=jnp.bfloat16(cache.keys), values=jnp.bfloat16(cache.values))
    kinds = (decode_attention.attend_slots, SlotAttention(one_device, True))
    rounded = (decode(attend, lengths, half, dtype=jnp.bfloat16)[0] for attend in kinds)
    plain, kernel = (float(np.abs(np.float32(one) - exact).max()) for one in rounded)
    print(f"bfloat16 against float32: plain {plain:.1e}, kernel {kernel:.1e}")
    assert kernel < 3 * plain < 0.1


def test_only_gpu_engines_use_the_kernel(one_device):
    gpu = named_mesh(MeshSettings(), "cuda", 1)

    def takes_it(mesh, dtype=jnp.float32, **shape):
        config = dataclasses.replace(TINY, head_dim=16, **shape)
        return CacheLayout(config, mesh, Sampler(slots=4), 64, dtype).attend.kernel

    assert takes_it(gpu) and not takes_it(one_device)
    assert not takes_it(gpu, sinks=True) and not takes_it(gpu, jnp.int8)
    assert gpu_attention.has_kernels("gpu", 64) and gpu_attention.has_kernels("cuda", 128)
    assert not gpu_attention.has_kernels("gpu", 96) and not gpu_attention.has_kernels("tpu", 128)


@pytest.mark.slow  # needs the cuda extra, no GPU
def test_both_kernels_compile_for_an_h100():
    pytest.importorskip("jax_cuda12_plugin")
    topology = topologies.get_topology_desc(
        platform="cuda", topology_name="1x1x1", topology="1x1x1", target_config=H100
    )
    mesh = Mesh(np.array(topology.devices), ("data",))
    options = {"xla_gpu_autotune_level": 0}  # higher levels time kernels, which needs a device

    def text(function, *shapes):
        place = NamedSharding(mesh, PartitionSpec())
        arrays = (jax.ShapeDtypeStruct(*shape, sharding=place) for shape in shapes)
        lowered = jax.jit(function).lower(*arrays)
        return lowered.compile(compiler_options=options).as_text()

    def loss(queries, keys, values, ids):
        mixed = rows_attention(queries, keys, values, RowIds(ids), None, interpret=False)
        return mixed.astype(jnp.float32).sum()

    rows = [((2, 2048, heads, 128), jnp.bfloat16) for heads in (12, 2, 2)]
    update = text(jax.grad(loss, (0, 1, 2)), *rows, ((2, 2048), jnp.int32))
    cache = ((32, 2, 1536, 128), jnp.bfloat16)
    step = functools.partial(slots_attention, interpret=False)
    decoding = text(step, ((32, 12, 128), jnp.bfloat16), cache, cache, ((32,), jnp.int32))
    assert update.count("xla.gpu.triton") >= 3 and decoding.count("xla.gpu.triton") == 1
    assert "2048,2048" not in update
    # The cache is no operand of anything but the kernel: it is not copied.
    assert not re.search(r"= bf16\[32,2,1536,128\]\S* (copy|transpose|fusion)", decoding)
