"""Rewards: verifiers, reward functions in worker processes, rewards of groups."""
