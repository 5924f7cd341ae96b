"""The generation server: gRPC and OpenAI's protocol over one engine."""
