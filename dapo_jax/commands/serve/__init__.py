"""Generation server: OpenAI's HTTP API and JetStream's gRPC API over one engine."""
