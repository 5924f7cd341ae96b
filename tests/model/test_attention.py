"""Attention without a [T, T] array equals plain attention, on rows whole or cut over devices."""

import contextlib
import dataclasses
import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import TINY
from jax._src.cudnn import fused_attention_stablehlo as cudnn
from row_files import read_table

from dapo_jax.config.experiment import Compute, Mesh
from dapo_jax.model import (
    blockwise_attention,
    cudnn_attention,
    decoder,
    splash_attention,
    training_attention,
)
from dapo_jax.model.blockwise_attention import RowIds
from dapo_jax.model.training_attention import Window
from dapo_jax.run.build import attention_notice, numerics, open_mesh
from dapo_jax.runtime import sharding
from dapo_jax.runtime.sharding import make_mesh
from dapo_jax.types.errors import ConfigError

MIXED = dataclasses.replace(TINY, window=3, sliding=(True, False))
GEMMA = dataclasses.replace(  # every switch of the family
    MIXED,
    sliding_rope_theta=10.0,
    query_scalar=5,
    out_norms=True,
    norm_offset=True,
    scale_embeddings=True,
    activation="gelu_tanh",
)
RNG = np.random.default_rng(3)
DOCUMENTED = cudnn.MaskType.PADDING_CAUSAL
ROWS, LENGTH, HEADS, KV_HEADS, WIDTH = 4, 384, 4, 2, 16


def reference(queries, keys, values, *, q_seqlen, q_offsets, scale, mask_type, **options):
    """Return plain attention in segments; NaN outside of them, which the kernel doesn't write."""
    assert mask_type == DOCUMENTED and q_offsets.shape[1] == q_seqlen.shape[1] + 1
    assert q_offsets.dtype == q_seqlen.dtype == jnp.int32 and scale == queries.shape[-1] ** -0.5
    window = options.pop("sliding_window_length")
    assert options["kv_seqlen"] is q_seqlen and options["kv_offsets"] is q_offsets
    starts, lengths = q_offsets[:, :-1, None], q_seqlen[:, :, None]
    place = jnp.arange(queries.shape[1]) - starts
    inside = (starts >= 0) & (place >= 0) & (place < lengths)
    segment = (inside * jnp.arange(1, lengths.shape[1] + 1)[:, None]).sum(axis=1)
    context = training_attention.Context(segment, segment)
    options = training_attention.AttentionOptions(window and Window(window))
    mixed, _ = training_attention.attend_plain(queries, keys, values, context, None, options)
    return jnp.where((segment > 0)[:, :, None, None], mixed, jnp.nan)


@pytest.fixture
def cudnn_reference(monkeypatch):
    """Replace the kernel by the reference, in float32; return the windows of its calls."""
    windows = []

    def call(*arrays, **options):
        windows.append(options["sliding_window_length"])
        return reference(*arrays, **options)

    monkeypatch.setattr(cudnn, "dot_product_attention", call)
    monkeypatch.setattr(cudnn_attention, "DTYPE", jnp.float32)
    return windows


@pytest.fixture
def cudnn_found(monkeypatch):
    """Let programs be lowered as on a machine with an H100 and cuDNN."""
    monkeypatch.setattr(cudnn, "check_cudnn_version", lambda: cudnn_attention.CUDNN_VERSION)
    monkeypatch.setattr(cudnn, "check_compute_capability", lambda capability: True)
    monkeypatch.setattr(cudnn_attention, "JAX_VERSION", (0, 10))


def ragged_ids(length: int, rows: int = ROWS) -> np.ndarray:
    """Rows of segments of very different lengths; the first is full, the last nearly empty."""
    ids = np.zeros((rows, length), np.int32)
    for row in range(rows):
        end = length - row * (length // rows)
        is_cut = row and end > 5
        cuts = np.sort(RNG.choice(np.arange(1, end), 5, replace=False)) if is_cut else []
        ids[row, :end] = 1 + np.searchsorted(cuts, np.arange(end), side="right")
    return ids


def inputs(length: int = LENGTH):
    """Queries, keys, values, and the weights of a loss that tells every output apart."""
    shapes = [(ROWS, length, heads, WIDTH) for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)]
    return [jnp.asarray(RNG.normal(size=shape), jnp.float32) for shape in shapes]


def results(attend, arrays, ids, mesh=None, window=None, sinks=None):
    """Return output and gradients of training attention, by its name or as a function.

    The window is an array of the program. Padding, whose output nothing reads, is 0.
    """
    attend = training_attention.TRAINING_ATTENTION.get(attend, attend)
    *arrays, weights = arrays
    ids = jnp.asarray(ids)
    context = training_attention.Context(jnp.zeros_like(ids), ids)

    def loss(queries, keys, values, sinks, window):
        options = training_attention.AttentionOptions(window, sinks)
        mixed, _ = attend(queries, keys, values, context, None, options)
        mixed = jnp.where(ids[..., None, None] > 0, mixed, 0)
        return jnp.sum(jnp.sin(mixed) * weights), mixed

    run = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3), has_aux=True))
    with contextlib.nullcontext() if mesh is None else sharding.activate(mesh):
        return run(*arrays, sinks, window)


def assert_equal(actual, expected, tolerance=2e-6):
    def check(a, b):
        assert np.abs(np.asarray(a) - b).max() <= tolerance * max(np.abs(b).max(), 1)

    jax.tree.map(check, jax.device_get(actual), jax.device_get(expected))


SINKS = jnp.array([0.5, -1.0, 3.0, 0.0])


@functools.cache
def by_plain(length: int = LENGTH, tokens: int | None = None, sinks: bool = False):
    """Return arrays, segments, and what plain attention makes of them."""
    arrays, ids, window = inputs(length), ragged_ids(length), tokens and Window(tokens)
    return arrays, ids, results("plain", arrays, ids, None, window, SINKS if sinks else None)


# Kind, length, axes of eight devices, block, window (a tuple: one of a program with full layers
# too), sinks. Blocks of 5 divide no piece of a row that is cut over devices.
AS_PLAIN = read_table(__file__, "as plain") + [
    pytest.param(*row, marks=pytest.mark.slow) for row in read_table(__file__, "as plain, slow")
]


@pytest.mark.parametrize(("name", "length", "sizes", "block", "window", "sinks"), AS_PLAIN)
@pytest.mark.usefixtures("cudnn_reference")
def test_attention_and_its_gradients_equal_plain(
    name, length, sizes, block, window, sinks, monkeypatch
):
    monkeypatch.setattr(blockwise_attention, "BLOCK", block)
    monkeypatch.setattr(splash_attention, "MAX_BLOCK", 128)
    monkeypatch.setattr(cudnn_attention, "SEGMENTS", (8,))
    mesh = sizes and make_mesh(**({"data": 1, "fsdp": 1, "tensor": 1} | sizes))
    cases = {window: window and Window(window)}
    if isinstance(window, tuple):
        (tokens,) = window
        cases = {tokens: Window(tokens, jnp.array(True)), None: Window(tokens, jnp.array(False))}
    for tokens, options in cases.items():
        arrays, ids, expected = by_plain(length, tokens, sinks)
        actual = results(name, arrays, ids, mesh, options, SINKS if sinks else None)
        assert_equal(actual, expected)


@pytest.mark.parametrize("tokens", [1, 5, 40])
@pytest.mark.parametrize("slides", [None, True, False])
def test_a_window_masks_what_a_loop_masks(slides, tokens):
    """Keys of the query's segment are seen, at most `tokens` - 1 before it."""
    ids, seen = ragged_ids(32), 32 if slides is False else tokens
    mask = np.zeros((*ids.shape, ids.shape[1]), bool)
    for row, query, key in np.ndindex(mask.shape):
        mask[row, query, key] = 0 <= query - key < seen and ids[row, query] == ids[row, key]
    window = training_attention.Window(tokens, None if slides is None else jnp.array(slides))
    np.testing.assert_array_equal(
        training_attention.packed_mask(RowIds(jnp.asarray(ids)), window), mask
    )


def gradient_program(config: decoder.DecoderConfig, length: int, mesh):
    """Return the traced gradient of a decoder over rows of `length` tokens."""
    params = sharding.unbox(decoder.abstract_params(config))
    rows = jax.ShapeDtypeStruct((2, length), jnp.int32)

    def loss(params, tokens):
        return jnp.sum(decoder.Decoder(config).apply({"params": params}, tokens, tokens, tokens))

    with sharding.activate(mesh):
        return jax.jit(jax.grad(loss)).trace(params, rows)


def test_no_array_of_a_blocked_program_is_as_large_as_length_squared(one_device):
    length = 1536
    blocked, plain = (
        gradient_program(config, length, one_device).lower().as_text()
        for config in (dataclasses.replace(TINY, attention="blocked"), TINY)
    )
    square = f"x{length}x{length}x"
    assert square in plain and square not in blocked


@pytest.mark.parametrize("name", ["splash", pytest.param("blocked", marks=pytest.mark.slow)])
def test_remat_attention_keeps_what_attention_needs(name, one_device):
    """Attention that is recomputed is named once more, and a recomputed product counts twice."""
    names, products = {}, {}
    for remat in ("none", "dots", "attention", "full"):
        config = dataclasses.replace(TINY, attention=name, remat=remat)
        text = str(gradient_program(config, 256, one_device).jaxpr)
        names[remat], products[remat] = text.count("name=attention"), text.count("dot_general[")
    assert names["dots"] == names["attention"] == names["none"] < names["full"]
    assert products["none"] == products["dots"] < products["attention"]


def mesh_of(platform: str):
    """Return a stand-in for a mesh of a device that this machine lacks."""
    device = SimpleNamespace(platform=platform, addressable_memories=list)
    return SimpleNamespace(devices=np.array([device], object), shape={"context": 1})


def test_attention_that_rows_or_devices_do_not_support_is_rejected():
    tpu = mesh_of("tpu")
    for platform, lengths in {
        "tpu": {160: "plain", 256: "splash", 22_528: "splash"},  # rows of 160: few scores
        "gpu": {1024: "plain", 22_528: "blocked"},
        "cpu": {160: "plain", 4096: "blocked"},
    }.items():
        for length, chosen in lengths.items():
            assert numerics(Compute(), mesh_of(platform), length)["attention"] == chosen
    assert numerics(Compute(attention="blocked"), tpu, 22_500)["attention"] == "blocked"
    with pytest.raises(ConfigError, match=r"packing.row_tokens = 22500.*multiple of 128"):
        numerics(Compute(), tpu, 22_500)
    with pytest.raises(ConfigError, match=r"compute.attention = 'splash'.*on gpu"):
        numerics(Compute(attention="splash"), mesh_of("gpu"), 256)
    with pytest.raises(ConfigError, match=r"compute.remat = 'offload'.*pinned_host"):
        numerics(Compute(remat="offload"), tpu, 256)


# --- cuDNN: a reference computes what JAX documents, since the kernel needs a GPU ----------------


@pytest.mark.parametrize(
    ("tokens", "sizes"), [(None, (5, 7)), (40, (8, 64)), (40, (5, 6))]
)  # some rows have 7 segments
def test_packed_rows_by_cudnn_equal_plain_attention(tokens, sizes, monkeypatch, cudnn_reference):
    monkeypatch.setattr(cudnn_attention, "SEGMENTS", sizes)
    monkeypatch.setattr(blockwise_attention, "BLOCK", 64)
    arrays, ids, expected = by_plain(tokens=tokens)
    assert_equal(results("cudnn", arrays, ids, window=tokens and Window(tokens)), expected)
    assert set(cudnn_reference) == {tokens}


def test_a_layer_that_cudnn_can_not_express_is_computed_in_blocks():
    arrays, ids, expected = by_plain()  # float32
    assert_equal(results("cudnn", arrays, ids), expected)


def test_segments_cover_every_token_and_no_more_than_the_row():
    """The kernel leaves the output of other tokens unwritten."""
    ids = np.array([[1, 1, 2, 3, 3, 3, 0, 0], [0] * 8, [4] * 8])
    offsets, lengths = cudnn_attention.find_segments(jnp.asarray(ids), 4)
    assert offsets.tolist() == [[0, 2, 3, 6, -1], [0, *[-1] * 4], [0, *[-1] * 4]]
    assert lengths.tolist() == [[2, 1, 3, 2], [8, *[-1] * 3], [8, *[-1] * 3]]


LONG = 16_384
FUSED = dataclasses.replace(TINY, attention="cudnn", dtype=jnp.bfloat16)


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(FUSED, id="full", marks=pytest.mark.slow),
        dataclasses.replace(FUSED, window=128, sliding=(True, False), remat="full"),
    ],
)
@pytest.mark.usefixtures("cudnn_found")
def test_no_array_of_a_program_for_cuda_is_as_large_as_length_squared(config, one_device):
    def lower(config):
        program = gradient_program(config, LONG, one_device)
        return program.lower(lowering_platforms=("cuda",)).as_text()

    square, text = f"x{LONG}x{LONG}x", lower(config)
    assert square not in text
    calls = [text.count(f"__cudnn$fmhaSoftmax{way}(") for way in ("", "Backward")]
    kinds = len(cudnn_attention.SEGMENTS) * (1 + bool(config.sliding))
    assert calls[1] == kinds and calls[0] == kinds * (1 + (config.remat == "full"))
    assert square in lower(dataclasses.replace(config, attention="plain"))


def gpu(capability: str = "9.0"):
    mesh = mesh_of("gpu")
    mesh.devices.flat[0].compute_capability = capability
    return mesh


@pytest.mark.usefixtures("cudnn_found")
def test_a_gpu_takes_cudnn_if_it_can_express_the_rows_and_says_why_not():
    bfloat16, row = Compute("bfloat16"), 16_384
    assert numerics(bfloat16, gpu(), row)["attention"] == "cudnn"
    assert attention_notice(bfloat16, row, FUSED, gpu()) == "attention: cudnn"
    sinks = dataclasses.replace(FUSED, sinks=True)
    assert "blocked in 2 of 2 layers" in attention_notice(bfloat16, row, sinks, gpu())
    cut = gpu()
    cut.shape["context"] = 2
    for compute, tokens, mesh, reason in (
        (Compute(), row, gpu(), "compute.dtype = 'bfloat16'"),
        (bfloat16, row, gpu("8.0"), "compute capability 9.0"),
        (bfloat16, row, gpu("gfx942"), "compute capability 9.0"),
        (bfloat16, row - 4, gpu(), "packing.row_tokens a multiple of 64"),
        (bfloat16, row, cut, "mesh.context = 1"),
    ):
        chosen = numerics(compute, mesh, tokens)
        assert chosen["attention"] == "blocked"
        config = dataclasses.replace(TINY, attention="blocked", dtype=chosen["dtype"])
        notice = attention_notice(compute, tokens, config, mesh)
        assert notice.startswith("attention: blocked, since cudnn needs") and reason in notice
        with pytest.raises(ConfigError, match="compute.attention = 'cudnn'.*without"):
            numerics(dataclasses.replace(compute, attention="cudnn"), mesh, tokens)
    assert attention_notice(bfloat16, row, FUSED, mesh_of("cpu")) == ""


# --- rows cut over devices -----------------------------------------------------------------------


def test_rows_that_the_mesh_can_not_cut_are_rejected():
    mesh = open_mesh(Mesh(context=4), rows_per_microbatch=2)
    with pytest.raises(ConfigError, match="row_tokens = 60: must be a multiple of 8 with mesh.con"):
        numerics(Compute(), mesh, 60)
    assert numerics(Compute(), mesh, 64)["attention"] == "plain"
    with pytest.raises(ConfigError, match="a factorisation of the 8 devices"):
        open_mesh(Mesh(context=3), rows_per_microbatch=8)
    with pytest.raises(ConfigError, match="rows_per_microbatch = 3.*decode_tensor = 2"):
        open_mesh(Mesh(context=4), rows_per_microbatch=3)
