"""Whether two answers mean the same. Imports nothing of the other rooms."""

from dapo_jax.verifier.algebra_process import is_equivalent

__all__ = ["is_equivalent"]
