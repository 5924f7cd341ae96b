"""Sampled scores on held-out problems."""
