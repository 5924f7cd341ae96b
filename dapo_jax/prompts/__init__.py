"""From problems to tokens: tokenizers, chat templates, the papers' templates."""
