"""Plug-ins by name, mesh and sharding, processes, signals, storage, worker processes."""
