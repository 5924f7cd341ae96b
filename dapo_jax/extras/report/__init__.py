"""The run report as an HTML page."""
