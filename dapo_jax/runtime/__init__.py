"""Settings, mesh and sharding, processes, signals, storage, worker processes."""
