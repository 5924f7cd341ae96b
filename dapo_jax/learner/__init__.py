"""From judged groups to an updated policy."""
