"""Decoder-only language models: families, attention, output head, loading and saving of weights."""
