"""Data: problems and prompts."""
