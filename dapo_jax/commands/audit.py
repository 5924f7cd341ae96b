"""Score a run's recorded responses again, and compare the verdicts.

    dapo-jax audit runs/arithmetic_dapo
    dapo-jax audit runs/mine --verifier=mine:judge --max_steps=6 --timeout_seconds=60

prints agreement, false-positive and false-negative rates with 95 % intervals, by kind of gold
answer and over the steps, and the most rewarded disagreements; RUN/audit.json has them too. It
exits with code 1 if an error rate is above --max_disagreement by more than chance. A function of
yours is called as a reward function; from the run's reward.threshold on, a response is correct.
"""

from dapo_jax.commands import command_line
from dapo_jax.config.experiment import AuditConfig


def work(config: AuditConfig) -> int:
    """Audit a run and return the exit code. Raises `ConfigError`."""
    from dapo_jax.run.audit import audit

    return int(audit(config))


def main() -> int:
    """Run the command. Exit code 0: within the limit; 1: above it; 2: wrong settings."""
    return command_line.run(AuditConfig, __doc__, work, single_process="dapo-jax audit")
