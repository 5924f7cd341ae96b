"""Reward part `judge`: a language model behind OpenAI's chat endpoint."""
