"""Tasks of reasoning-gym: problems and scorers."""
