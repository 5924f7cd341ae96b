"""Runtime services: mesh and sharding, processes, heartbeat, signals, storage, workers."""
