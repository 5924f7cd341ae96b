"""Training attention on GPUs by JAX's Triton kernel, over packed rows.

The kernel was not run on a GPU so far: tests use Pallas' interpreter, and compile it for an H100.
"""

import jax.numpy as jnp
from jaxtyping import Array

from dapo_jax.model.blockwise_attention import RowIds

PLATFORMS = ("gpu", "cuda")  # names of local devices and of compilation targets
ROW_MULTIPLE = 128  # tokens; the kernel's blocks divide it


def supports(head_dim: int) -> bool:
    """Return True if the kernel supports heads of that width."""
    return head_dim >= 16 and head_dim & (head_dim - 1) == 0


def rows_attention(queries, keys, values, ids: RowIds, sinks: None, *, interpret: bool) -> Array:
    """Return causal attention inside segments without a [T, T] array; ROW_MULTIPLE divides T."""
    assert sinks is None and ids.prompts is None, "the kernel has no sinks and no shared prompts"
    from jax.experimental.pallas.ops.gpu.attention import mha

    groups = queries.shape[2] // keys.shape[2]
    keys, values = (jnp.repeat(array, groups, axis=2) for array in (keys, values))
    scale = queries.shape[-1] ** -0.5
    return mha(queries, keys, values, ids.segments, scale, True, interpret=interpret)
