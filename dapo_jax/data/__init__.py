"""Data: problems, prompts and supervised rows."""
