"""Configuration: settings by section, their rules, config files and help."""
