"""cuDNN's packed attention as JAX documents it, by plain products; runs on any platform."""

import jax
import jax.numpy as jnp
import pytest
from jax._src.cudnn import fused_attention_stablehlo as cudnn

from dapo_jax.model import cudnn_attention

DOCUMENTED = cudnn.MaskType.PADDING_CAUSAL


def segment_and_place(offsets, lengths, tokens: int):
    """Return each token's segment (-1: none) and its place in it; -1 marks missing segments."""
    starts, lengths = offsets[:, :-1, None], lengths[:, :, None]
    place = jnp.arange(tokens) - starts
    inside = (starts >= 0) & (place >= 0) & (place < lengths)
    number = jnp.arange(lengths.shape[1])[:, None]
    return (inside * (number + 1)).sum(axis=1) - 1, (inside * place).sum(axis=1)


def reference(
    queries,
    keys,
    values,
    *,
    q_seqlen,
    kv_seqlen,
    q_offsets,
    kv_offsets,
    scale,
    mask_type,
    sliding_window_length,
):
    """Return the output; NaN for tokens outside of segments, which the kernel doesn't write."""
    assert mask_type == DOCUMENTED and q_offsets.shape[1] == q_seqlen.shape[1] + 1
    assert all(a.dtype == jnp.int32 for a in (q_seqlen, kv_seqlen, q_offsets, kv_offsets))
    segment, place = segment_and_place(q_offsets, q_seqlen, queries.shape[1])
    key_segment, key_place = segment_and_place(kv_offsets, kv_seqlen, keys.shape[1])
    distance = place[:, :, None] - key_place[:, None, :]
    seen = (segment[:, :, None] == key_segment[:, None, :]) & (distance >= 0)
    if sliding_window_length is not None:
        seen &= distance < sliding_window_length
    keys, values = (jnp.repeat(x, queries.shape[2] // x.shape[2], axis=2) for x in (keys, values))
    scores = jnp.einsum("bqhe,bkhe->bhqk", queries, keys).astype(jnp.float32) * scale
    weights = jax.nn.softmax(jnp.where(seen[:, None], scores, -1e30))
    mixed = jnp.einsum("bhqk,bkhe->bqhe", weights.astype(values.dtype), values)
    return jnp.where((segment >= 0)[:, :, None, None], mixed, jnp.nan)


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
