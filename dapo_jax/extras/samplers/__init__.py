"""Samplers in other processes: leases of groups, versions of weights."""
