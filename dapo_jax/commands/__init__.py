"""Commands of the console and the Python API."""
