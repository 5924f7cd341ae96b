"""Mathematical equivalence of answers, by itself: it imports nothing above `runtime.workers`."""

from dapo_jax.extras.math.algebra_process import is_equivalent

__all__ = ["is_equivalent"]
