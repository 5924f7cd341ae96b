"""Environments of other packages: OpenEnv, Gymnasium, verifiers."""
