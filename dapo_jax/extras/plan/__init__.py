"""The plan of a run: memory, compile checks, estimated times."""
