"""Rewards: verifiers, the processes they run in, parts and their weights."""

from dapo_jax.verifier.algebra_process import is_equivalent

__all__ = ["is_equivalent"]
