"""Checkpoints: content, schedule, integrity, and the identity of a run."""
