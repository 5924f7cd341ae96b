"""Prompts: templates, chat templates and tokenizers."""
