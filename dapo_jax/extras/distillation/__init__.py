"""Distillation of a teacher: its parameters, the divergence from it."""
