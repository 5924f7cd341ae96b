"""vLLM's servers as a run's sampler."""
