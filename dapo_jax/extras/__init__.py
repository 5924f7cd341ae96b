"""Extras: what a setting, a name or a command asks for; the core imports none of them."""
