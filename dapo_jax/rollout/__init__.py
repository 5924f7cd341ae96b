"""Rollouts: engine, caches, scheduler, dynamic sampling, carry-over."""
