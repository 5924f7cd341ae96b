"""Quantiles of a step's importance ratios, from a histogram that is summed over microbatches."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from dapo_jax.learner.batches import Mean

RATIO_HISTOGRAM = "ratio_histogram"
QUANTILES = {"ratio_p01": 0.01, "ratio_p50": 0.5, "ratio_p99": 0.99}
_SIZES = np.geomspace(1e-4, 20.0, 80)  # log-ratios in steps of 16 %
EDGES = np.concatenate([-_SIZES[::-1], _SIZES])


def histogram(ratio: Float[Array, "R T"], trained: Float[Array, "R T"]) -> Mean:
    """Count the log-ratios of trained tokens between the edges: [len(EDGES) + 1]."""
    place = jnp.searchsorted(jnp.asarray(EDGES, ratio.dtype), jnp.log(ratio).ravel())
    counts = jax.ops.segment_sum(trained.ravel(), place, len(EDGES) + 1)
    return Mean(counts, trained.sum())


def quantiles(counts: np.ndarray) -> dict[str, float]:
    """Return the quantiles of the ratios by name, accurate to a bin; 1 if there is no token."""
    if not counts.sum():
        return dict.fromkeys(QUANTILES, 1.0)
    # The outermost bins have one edge, which stands for their middle.
    middles = np.concatenate([EDGES[:1], (EDGES[1:] + EDGES[:-1]) / 2, EDGES[-1:]])
    reached = np.cumsum(counts) / counts.sum()
    places = {name: np.searchsorted(reached, share) for name, share in QUANTILES.items()}
    return {name: float(np.exp(middles[place])) for name, place in places.items()}
