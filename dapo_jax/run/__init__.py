"""A run: its parts, loop, checkpoints, evaluation and export."""
