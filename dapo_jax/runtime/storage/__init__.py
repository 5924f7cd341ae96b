"""Files, output folders with their locks, and model folders; local, or in a bucket."""
