"""Generation server: OpenAI's HTTP API over the engine that samples in training."""
