"""A run: its components, state, files and loop."""
