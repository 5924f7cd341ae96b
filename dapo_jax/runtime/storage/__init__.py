"""Storage: retries, output folders with their locks, JSON lines."""
