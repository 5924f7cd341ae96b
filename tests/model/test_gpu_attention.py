"""The GPU's kernel computes plain attention, in Pallas' interpreter; a compiler accepts it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from test_attention import assert_equal, ragged_ids, results

from dapo_jax.model import gpu_attention, training_attention
from dapo_jax.model.blockwise_attention import RowIds
from dapo_jax.model.gpu_attention import rows_attention
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


@pytest.mark.slow  # needs the cuda extra, no GPU
def test_the_kernel_compiles_for_an_h100():
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
    assert update.count("xla.gpu.triton") >= 3 and "2048,2048" not in update
