"""Advantages, losses and the sharded update."""
