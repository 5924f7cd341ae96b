"""Learning rates and warm-ups that the settings leave to the program ('auto').

Full fine-tuning by RL takes 1e-6 for billions of parameters (DAPO, arXiv 2503.14476; TRL's
default), supervised training ten times that, a critic twice (VAPO, arXiv 2504.05118), and adapters
ten times the rate of all parameters (Tinker's cookbook, whose rates also fall with the model's
size). Below 1e9 parameters, rates grow as in this package's runs from 0.6 to 135 million.
"""

import copy
from collections.abc import Mapping
from typing import Any

from dapo_jax.config.experiment import Config
from dapo_jax.config.settings import AUTO

FULL_SIZE, EXPONENT, MAX_RATE = 1e9, 0.75, 3e-3
OF_ADAPTERS, OF_CRITIC = 10, 2  # times the rate of a policy with all its parameters
MAX_WARMUP, WARMUP_DIVISOR = 20, 10  # DAPO's steps, in short runs a tenth of them
FAR = 15  # times the usual rate


def usual_rate(base: float, parameters: int, adapters: bool = False) -> float:
    """Return the usual peak learning rate for a model of `parameters`, without its adapters."""
    rate = base * max(1.0, FULL_SIZE / parameters) ** EXPONENT
    return float(f"{min(MAX_RATE, rate * (OF_ADAPTERS if adapters else 1)):.2g}")


def choose_rates(
    config: Any, parameters: int, steps: int, saved: Mapping[str, Any] | None = None
) -> tuple[Any, list[str], list[str]]:
    """Return the config with a number for each 'auto', lines about them, and warnings.

    Args:
        parameters: of the policy, without its adapters.
        steps: of the run.
        saved: settings of the run that resumes; it keeps its numbers.
    """
    config = copy.deepcopy(config)
    base, adapters = config.usual_rate, config.lora.rank > 0
    usual = usual_rate(base, parameters, adapters)
    why = f"{parameters:,} parameters{', adapters' * adapters}"
    optimizers = {"optimizer": (config.optimizer, usual, steps)}
    if isinstance(config, Config) and (saved or config.algorithm.critic):
        critic = config.critic.optimizer, usual_rate(base * OF_CRITIC, parameters), steps
        alone = config.critic_pretrain_steps()
        optimizers = {"optimizer": (config.optimizer, usual, steps - alone)}
        optimizers["critic.optimizer"] = critic
    lines = []
    for section, (optimizer, rate, length) in optimizers.items():
        chosen = {"learning_rate": (rate, why)}
        chosen["warmup_steps"] = (min(MAX_WARMUP, length // WARMUP_DIVISOR), f"{length:,} steps")
        for name, (value, reason) in chosen.items():
            if getattr(optimizer, name) == AUTO:
                if saved:
                    value, reason = saved[f"{section}.{name}"], "as the run began"
                setattr(optimizer, name, value)
                lines += [f"{section}.{name} = {value:g} (auto: {reason})"] * (value != AUTO)
    rate, warnings = config.optimizer.learning_rate, []
    if not usual / FAR <= rate <= usual * FAR:
        far, end = ("above", "diverge") if rate > usual else ("below", "learn nothing visible")
        warnings.append(
            f"config.optimizer.learning_rate = {rate:g} is far {far} the usual {usual:g} for {why}"
            f": training will probably {end}; 'auto' takes that rate"
        )
    return config, lines, warnings
