"""Generation server: JetStream's gRPC and OpenAI's HTTP protocol over one engine."""
