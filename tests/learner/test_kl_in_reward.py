"""Which KL estimator pulls towards the reference as a penalty in the reward, computed exactly."""

import numpy as np
import pytest
from command_lines import RL, load

from dapo_jax.config.experiment import Config
from dapo_jax.learner.losses import KL_ESTIMATORS

REFERENCE, START = np.log([0.3, 0.45, 0.25]), np.log([0.05, 0.15, 0.8])
STEPS, RATE = 200, 0.5


def kl_along_the_penalty(name: str) -> list[float]:
    """KL(p, reference) before each step of a softmax over three actions and after the last.

    A step descends E[penalty * grad log p], the policy gradient of the penalty alone, its
    expectation summed over the actions.
    """
    logits, kls = START, []
    for _ in range(STEPS + 1):
        logprobs = logits - np.logaddexp.reduce(logits)
        p = np.exp(logprobs)
        kls.append(p @ (logprobs - REFERENCE))
        penalty = np.float64(KL_ESTIMATORS[name](logprobs, REFERENCE))
        logits = logits - RATE * p * (penalty - p @ penalty)
    return kls


@pytest.mark.parametrize("name", KL_ESTIMATORS)
def test_a_penalty_that_leads_away_from_the_reference_is_rejected_in_the_reward(name, capsys):
    """k2 and k3 also punish actions that are too rare, of which the reference wants more."""
    kls = kl_along_the_penalty(name)
    assert kls[0] == pytest.approx(0.676, abs=1e-3)
    arguments = f"{RL}:rloo", f"--config.algorithm.kl_estimator={name}"
    if name == "k1":
        assert kls[-1] < 1e-6
        load(Config, *arguments)
        return
    assert kls[-1] > 1.37  # nearly ln 4, that of the likeliest action alone
    with pytest.raises(SystemExit):
        load(Config, *arguments)
    message = capsys.readouterr().err
    assert (
        f"algorithm.kl_estimator = '{name}': must be 'k1' with algorithm.kl = 'reward'" in message
    )
    assert "away from the reference" in message
