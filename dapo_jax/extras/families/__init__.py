"""Newer model families, and the layers that only they have."""
