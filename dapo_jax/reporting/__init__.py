"""Metrics, console, files and reports of a run."""
