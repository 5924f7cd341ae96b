"""What an experiment is: settings, their defaults, and what makes no sense."""
