"""Training attention by cuDNN's fused kernel for NVIDIA GPUs, over packed rows.

cuDNN takes the first token and the length of each segment, so that it skips all other pairs of
tokens. It can express neither prompts that responses share nor attention sinks.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from dapo_jax.model.blockwise_attention import RowIds, Sinks, Span, blocked_attention

# Segments of a row, padding included, that kernels are compiled for: with more the kernel has more
# idle blocks of threads, and its sums are [segments, heads, row]. The first that fits is run.
SEGMENTS = 8, 64
DTYPE = jnp.bfloat16
ROW_UNIT = 64  # tokens
MAX_HEAD_DIM = 256
CAPABILITY = 9.0  # of a GPU: the least with packed rows (H100)
JAX_VERSION = (0, 11, 1)  # older ones read wrong keys if query heads share a key head
CUDNN_VERSION = 90_600


def _cudnn() -> Any:
    """Import JAX's private module only where it is used: the public function has no offsets."""
    from jax._src.cudnn import fused_attention_stablehlo

    return fused_attention_stablehlo


def _has_cudnn() -> bool:
    try:
        return _cudnn().check_cudnn_version() >= CUDNN_VERSION
    except (ImportError, AttributeError, RuntimeError):  # another JAX, or no library
        return False


def missing(device: Any, row_tokens: int, dtype: Any, context: int) -> str:
    """Return what a device or a run lacks for the kernel; empty if nothing."""
    capability = getattr(device, "compute_capability", "")
    is_hopper = capability.replace(".", "", 1).isdigit() and float(capability) >= CAPABILITY
    needs = {
        f"a GPU of compute capability {CAPABILITY}": is_hopper,
        f"JAX {'.'.join(map(str, JAX_VERSION))}": jax.__version_info__ >= JAX_VERSION,
        "cuDNN 9.6": is_hopper and _has_cudnn(),
        "compute.dtype = 'bfloat16'": jnp.dtype(dtype) == DTYPE,
        f"packing.row_tokens a multiple of {ROW_UNIT}": row_tokens % ROW_UNIT == 0,
        "mesh.context = 1": context == 1,
    }
    return ", ".join(name for name, is_met in needs.items() if not is_met)


def supports(width: int, dtype: Any, sinks: bool) -> bool:
    """Return True if the kernel can express a layer with heads of that width."""
    return dtype == DTYPE and width <= MAX_HEAD_DIM and width % 8 == 0 and not sinks


def find_segments(ids: Int[Array, "B T"], size: int) -> tuple[Array, Array]:
    """Return first tokens [B, size + 1] and lengths [B, size] of segments; -1 past the last.

    Padding is a segment, since the kernel writes no output for tokens outside of segments.
    """

    def of_row(begins: Array) -> tuple[Array, Array]:
        [starts] = jnp.nonzero(begins, size=size, fill_value=len(begins))
        lengths = jnp.diff(starts, append=len(begins))
        first, lengths = (jnp.where(lengths > 0, x, -1) for x in (starts, lengths))
        return jnp.append(first, -1).astype(jnp.int32), lengths.astype(jnp.int32)

    return jax.vmap(of_row)(begins_segment(ids))


def begins_segment(ids: Int[Array, "B T"]) -> Bool[Array, "B T"]:
    return jnp.diff(ids, axis=1, prepend=-1) != 0


def cudnn_attention(
    queries: Float[Array, "B T H E"],
    keys: Float[Array, "B T K E"],
    values: Float[Array, "B T K E"],
    ids: RowIds,
    sinks: Sinks = None,
    *,
    window: int | None = None,  # tokens that a token sees, itself included; None: all before it
) -> Float[Array, "B T H E"]:
    """Return causal attention inside segments; adjacent query heads share a key head.

    Rows with more segments than kernels are compiled for are computed in blocks.
    """
    assert ids.prompts is None and sinks is None, "the caller computes blocks then"
    cudnn = _cudnn()

    def fused(size: int) -> Array:
        offsets, lengths = find_segments(ids.segments, size)
        return cudnn.dot_product_attention(
            queries,
            keys,
            values,
            q_seqlen=lengths,
            kv_seqlen=lengths,
            q_offsets=offsets,
            kv_offsets=offsets,
            scale=queries.shape[-1] ** -0.5,
            mask_type=cudnn.MaskType.PADDING_CAUSAL,
            sliding_window_length=window,
        )

    def blocked() -> Array:
        reach = None if window is None else jnp.int32(window)
        return blocked_attention(queries, keys, values, ids, None, Span(reach))

    if queries.size > jnp.iinfo(jnp.int32).max:  # the kernel's offsets are int32
        return blocked()
    count = begins_segment(ids.segments).sum(axis=1).max()
    kernels = [functools.partial(fused, size) for size in SEGMENTS]
    return jax.lax.switch(jnp.searchsorted(jnp.array(SEGMENTS), count), [*kernels, blocked])
