"""Checkpoints: what they hold, when they are saved, whether they fit."""
