"""DAPO and its family for JAX: sample groups, keep those that carry signal, update the policy."""

__version__ = "0.1.0"
