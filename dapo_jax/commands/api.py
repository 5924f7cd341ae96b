"""Python API for notebooks and scripts: train, evaluate; public as `dapo_jax.train`, ...

Heavy modules are imported when a function is called.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from dapo_jax.commands import checks
from dapo_jax.commands.api_environments import Environment, Tools, with_environment
from dapo_jax.commands.api_folders import File, load, read_metrics
from dapo_jax.commands.evaluate import SHORT_NAMES
from dapo_jax.config.experiment import Config
from dapo_jax.rewards.functions import RewardFunction
from dapo_jax.runtime import processes
from dapo_jax.runtime.settings import ConfigError, nearest, require
from dapo_jax.runtime.workers.pickled_functions import register_function

if TYPE_CHECKING:
    import pyarrow

    from dapo_jax.commands.api_policy import Policy

Rewards = RewardFunction | Mapping[RewardFunction | str, float]


@dataclasses.dataclass(frozen=True)
class Result:
    """Result of a training run.

    Attributes:
        run_dir: the folder with checkpoints, rollouts and metrics.
        summary: steps, held-out accuracy before and after, seconds; None where the run was
            stopped early. Training again with the same config then goes on.
        stopped: what stopped it early: "on_step", or the name of a signal that the program's own
            handler took; empty for a run that ended.
    """

    run_dir: str
    summary: dict[str, Any] | None
    stopped: str = ""

    @functools.cached_property
    def metrics(self) -> "pyarrow.Table":
        """Table with a row per step; step 0 is the policy before training; None: not measured.

        Columns are explained in docs/metrics.md; `.to_pandas()` where pandas is installed.
        """
        return read_metrics(self.run_dir)

    @functools.cached_property
    def policy(self) -> "Policy":
        """Policy of the newest checkpoint, read at first use."""
        from dapo_jax.commands.api_policy import Policy

        return Policy(self.run_dir)


def _with_rewards(config: Config, reward: Rewards | None, in_process: bool) -> Config:
    if reward is None:
        return config
    weights = reward if isinstance(reward, Mapping) else {reward: 1.0}
    named: dict[str, float] = {}
    for part, weight in weights.items():
        require(type(weight) in (int, float), "reward.parts", weight, "a number as weight")
        name = part if isinstance(part, str) else register_function(part, in_process, taken=named)
        named[name] = float(weight)
    parts = ",".join(f"{name}={weight!r}" for name, weight in named.items())
    return dataclasses.replace(config, reward=dataclasses.replace(config.reward, parts=parts))


def train(
    config: Config | File,
    *,
    on_step: Callable[[int, dict[str, float]], Any] | None = None,
    reward: Rewards | None = None,
    in_process: bool = False,
    environment: Environment | None = None,
    tools: Tools = (),
) -> Result:
    """Trains as `dapo-jax train` does, from the newest checkpoint where there is one.

    >>> config = dapo_jax.Config(
    ...     run_dir=run_dir,
    ...     total_steps=2,
    ...     model=dapo_jax.Model(folder=base),
    ...     data=dapo_jax.Data(max_terms=3, max_prompt_tokens=8, heldout_problems=0),
    ...     rollout=dapo_jax.Rollout(prompts_per_step=4, samples_per_prompt=4),
    ...     sampler=dapo_jax.Sampler(slots=16, max_response_tokens=24),
    ...     packing=dapo_jax.Packing(row_tokens=64, rows_per_microbatch=8),
    ...     log=dapo_jax.Log(console=False),
    ... )
    >>> result = dapo_jax.train(config, on_step=lambda step, values: print(step))
    1
    2
    >>> result.metrics["accuracy"].null_count
    0

    Args:
        config: an experiment, or the file that holds one, as `configs/arithmetic.py:grpo`.
        on_step: is called with the number of each finished step and its metrics (the names of
            docs/metrics.md). True ends the run there, saved. Of several processes each calls it.
        reward: takes the place of `config.reward.parts`: a function `(prompt, response, answer)
            -> float`, or weights by function and by name (`{"rule": 1, score: 0.5}`); of a group
            or of tokens as in docs/rewards.md. It runs in worker processes: one of a module is
            imported there by its name, any other one (a lambda, a function of a notebook) is
            copied with its variables as they are now. Calls of an `async def` wait side by side.
        in_process: run the functions in this process instead, so that they may change variables
            of the program, or hold what can't be copied. One that hangs then hangs the run.
        environment, tools: take the place of `config.environment`'s: a class with `step(text)`, or
            functions that the policy may call (docs/environments.md). Workers run them too.

    Raises:
        ConfigError: settings and folders don't fit together, or a worker can't have a copy.
        Starved (rollout.dynamic_sampling): no signal was left, and the config says to stop then.
        NotSaved (runtime.storage.retries): the last checkpoint could not be written.
        NotFinite (runtime.nonfinite): parameters, moments or every update are NaN or infinite.
        KeyboardInterrupt: Ctrl-C, once the run is saved; a second Ctrl-C: at once, unsaved. Other
            signals act after the save as they would without a run.
    """
    config = _with_rewards(load(config, Config), reward, in_process)
    config = with_environment(config, environment, tools)
    checks.check(config)
    checks.check_run(config)
    processes.set_compilation_cache()
    from dapo_jax.run.run import train as run
    from dapo_jax.runtime.signals import Signals

    signals = Signals(config.checkpoint.leave_seconds)
    summary = run(config, on_step, signals)
    return Result(config.run_dir, summary, "" if summary else signals.received)


def evaluate(
    config: Config | File,
    *,
    model: str = "",
    reward: Rewards | None = None,
    in_process: bool = False,
    environment: Environment | None = None,
    tools: Tools = (),
    **flags: Any,
) -> dict[str, Any] | None:
    """Evaluates on the held-out problems, with the files of `dapo-jax evaluate`.

    >>> config = dapo_jax.Config(
    ...     run_dir=run_dir,
    ...     data=dapo_jax.Data(max_terms=3, max_prompt_tokens=8, heldout_problems=4),
    ...     sampler=dapo_jax.Sampler(slots=16, max_response_tokens=24),
    ...     packing=dapo_jax.Packing(row_tokens=64),
    ...     log=dapo_jax.Log(console=False),
    ... )
    >>> scores = dapo_jax.evaluate(config, model=base)
    >>> 0 <= scores["heldout_accuracy"] <= 1, scores["problems"]
    (True, 4)

    Args:
        config: an experiment, or the file that holds one.
        model: a model folder; empty: the newest checkpoint of `config.run_dir`.
        reward, in_process, environment, tools: as for `train`; a run that was given functions needs
            them again.
        flags: in place of the config's values: `data`, `k`, `temperature`, `top_p`, `template`,
            `out`, as of `dapo-jax evaluate --help`.

    Returns:
        the main figures (those of `heldout_...` are explained in docs/metrics.md); None where a
        signal ended it that the program's own handler took. The same call then goes on.

    Raises:
        ConfigError: there is no such checkpoint, or settings and folders don't fit together.
    """
    config = _with_rewards(load(config, Config), reward, in_process)
    config = with_environment(config, environment, tools)
    for flag, value in (flags | ({"model": model} if model else {})).items():
        if flag not in SHORT_NAMES:
            raise ConfigError(f"evaluate has no argument {flag!r}{nearest(flag, SHORT_NAMES)}")
        section, _, name = SHORT_NAMES[flag].partition(".")
        changed = dataclasses.replace(getattr(config, section), **{name: value})
        config = dataclasses.replace(config, **{section: changed})
    checks.check(config)
    processes.set_compilation_cache()
    from dapo_jax.run.evaluation.evaluate import evaluate as score

    return score(config, from_folder=bool(model))
