"""Python API for notebooks and scripts: train, evaluate, sample; public as `dapo_jax.train`, ...

Heavy modules are imported when a function is called.
"""

import contextlib
import dataclasses
import functools
import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from dapo_jax.commands import checks
from dapo_jax.commands.api_folders import File, load, read_metrics
from dapo_jax.commands.evaluate import SHORT_NAMES
from dapo_jax.config.experiment import Config, Data, Log, Model, Packing, Rollout, Sampler
from dapo_jax.config.files import read_config
from dapo_jax.rewards.functions import RewardFunction
from dapo_jax.rewards.given import name_of
from dapo_jax.runtime import processes
from dapo_jax.runtime.settings import ConfigError, nearest, require

if TYPE_CHECKING:
    import pyarrow

    from dapo_jax.structs import Completion, Prompt

AT_LEAST = {
    "samples": "a whole number above 0",
    "top_k": "a whole number, at least 0",
    "temperature": "0, or from 0.001 to 100",
    "top_p": "a number above 0 and at most 1",
}
Messages = Sequence[Mapping[str, str]]
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
        return Policy(self.run_dir)


def _with_rewards(config: Config, reward: Rewards | None, in_process: bool) -> Config:
    if reward is None:
        return config
    weights = reward if isinstance(reward, Mapping) else {reward: 1.0}
    named: dict[str, float] = {}
    for part, weight in weights.items():
        require(type(weight) in (int, float), "reward.parts", weight, "a number as weight")
        name = part if isinstance(part, str) else name_of(part, in_process, taken=named)
        named[name] = float(weight)
    parts = ",".join(f"{name}={weight!r}" for name, weight in named.items())
    return dataclasses.replace(config, reward=dataclasses.replace(config.reward, parts=parts))


def train(
    config: Config | File,
    *,
    on_step: Callable[[int, dict[str, float]], Any] | None = None,
    reward: Rewards | None = None,
    in_process: bool = False,
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
    >>> seen = []
    >>> result = dapo_jax.train(config, on_step=lambda step, values: seen.append(step))
    >>> seen
    [1, 2]
    >>> result.metrics["accuracy"].null_count
    0

    Args:
        config: an experiment, or the file that holds one: `configs/arithmetic.py:grpo`, a run's
            config.json.
        on_step: is called with the number of each finished step and its metrics (the names of
            docs/metrics.md). True ends the run there, saved. Of several processes each calls it.
        reward: takes the place of `config.reward.parts`: a function `(prompt, response, answer)
            -> float`, or weights by function and by name (`{"rule": 1, score: 0.5}`); of a group
            or of tokens as in docs/rewards.md. It runs in worker processes: one of a module is
            imported there by its name, any other one (a lambda, a function of a notebook) is
            copied with its variables as they are now. Calls of an `async def` wait side by side.
            What counts as right goes by `config.reward.correct` as ever.
        in_process: run the functions in this process instead, so that they may change variables
            of the program, or hold what can't be copied. One that hangs then hangs the run.

    Raises:
        ConfigError: settings, model folder and run folder don't fit together, or a worker can't
            have a copy of a function; its variable is named.
        Starved (rollout.dynamic_sampling): no signal was left, and the config says to stop then.
        NotSaved (runtime.storage.retries): the last checkpoint could not be written.
        NotFinite (runtime.nonfinite): parameters, moments or every update are NaN or infinite.
        KeyboardInterrupt: Ctrl-C, once the run is saved; a second Ctrl-C: at once, unsaved. Other
            signals act after the save as they would without a run.
    """
    config = _with_rewards(load(config, Config), reward, in_process)
    checks.check(config)
    checks.check_run(config)
    processes.keep_programs()
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
        reward, in_process: as for `train`; a run that was given functions needs them again.
        flags: in place of the config's values: `data`, `k`, `temperature`, `top_p`, `template`,
            `out`, as of `dapo-jax evaluate --help`.

    Returns:
        the main figures (those of `heldout_...` are explained in docs/metrics.md); None where a
        signal ended it that the program's own handler took. The same call then goes on.

    Raises:
        ConfigError: there is no such checkpoint, or settings and folders don't fit together.
    """
    config = _with_rewards(load(config, Config), reward, in_process)
    for flag, value in (flags | ({"model": model} if model else {})).items():
        if flag not in SHORT_NAMES:
            raise ConfigError(f"evaluate has no argument {flag!r}{nearest(flag, SHORT_NAMES)}")
        section, _, name = SHORT_NAMES[flag].partition(".")
        changed = dataclasses.replace(getattr(config, section), **{name: value})
        config = dataclasses.replace(config, **{section: changed})
    checks.check(config)
    processes.keep_programs()
    from dapo_jax.run.evaluation.evaluate import evaluate as score

    return score(config, from_folder=bool(model))


class Policy:
    """Policy in memory, for sampling.

    >>> policy = dapo_jax.Policy(base, max_prompt_tokens=8, max_response_tokens=24, slots=8)
    >>> [len(responses) for responses in policy.sample(["1+2=", "3+3="], samples=4)]
    [4, 4]

    Args:
        model: a model folder, or the run_dir of a run, whose newest checkpoint is taken.
        max_prompt_tokens, max_response_tokens: longest prompt and response.
        slots: responses decoded side by side.
        seed: key of the draws.

    Raises:
        ConfigError: no such folder, or one that can't be read.
    """

    def __init__(
        self,
        model: File,
        *,
        max_prompt_tokens: int = 512,
        max_response_tokens: int = 512,
        slots: int = 16,
        seed: int = 0,
    ):
        from dapo_jax.run.components import build
        from dapo_jax.run.evaluation.evaluate import open_checkpoints, open_policy

        model = os.fspath(model)
        run = (pathlib.Path(model) / "checkpoints").is_dir()
        source = read_config(Config, model) if run else Config(model=Model(folder=model))
        # Settings of the checkpoint's content and place; training and rewards are not needed.
        config = Config(
            run_dir=model,
            seed=seed,
            model=dataclasses.replace(source.model, reference_folder=""),
            lora=source.lora,
            compute=dataclasses.replace(source.compute, attention="auto"),
            mesh=source.mesh,
            optimizer=source.optimizer,
            data=Data(max_prompt_tokens=max_prompt_tokens, heldout_problems=0),
            rollout=Rollout(samples_per_prompt=max(slots, 2)),
            packing=Packing(
                row_tokens=max_prompt_tokens + max_response_tokens,
                rows_per_microbatch=source.packing.rows_per_microbatch,
            ),
            log=Log(console=False),
            sampler=Sampler(
                slots=slots,
                max_response_tokens=max_response_tokens,
                first_window_tokens=max_prompt_tokens,
            ),
        )
        checks.check(config)
        processes.keep_programs()
        with contextlib.ExitStack() as stack:
            checkpoints = open_checkpoints(config, not run, stack)
            self._components = build(config, training=False)
            stack.callback(self._components.close)  # nothing is judged here
            self.name, self._params = open_policy(config, self._components, checkpoints)
        self.tokenizer = self._components.tokenizer

    def __repr__(self) -> str:
        config = self._components.config
        return (
            f"<Policy {self.name}: prompts of at most {config.data.max_prompt_tokens} tokens, "
            f"responses of at most {config.sampler.max_response_tokens}>"
        )

    def _prompt(self, index: int, text: str | Messages) -> "Prompt":
        from dapo_jax.structs import Prompt, present

        chat = self.tokenizer.chat
        if not isinstance(text, str):
            require(chat is not None, "model", self.name, "a folder with a chat template")
            text = present(chat, "chat template").render([dict(message) for message in text])
        tokens = self.tokenizer.encode_prompt(text)
        limit = self._components.config.data.max_prompt_tokens
        require(
            0 < len(tokens) <= limit,
            f"prompts[{index}]",
            f"{len(tokens)} tokens",
            f"from 1 to max_prompt_tokens = {limit} tokens long",
        )
        return Prompt(index, str(index), text, np.asarray(tokens, np.int32), "", "")

    def sample(
        self,
        prompts: Sequence[str | Messages],
        *,
        samples: int = 1,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = 0,
    ) -> "list[list[Completion]]":
        """Samples responses to each prompt; arguments as for `dapo_jax.sample`."""
        from dapo_jax.rollout.sampling import SAMPLE_FOR_SERVING, SamplingRule

        require(not isinstance(prompts, str), "prompts", prompts, "a list of prompts")
        for name, value in {"samples": samples, "top_k": top_k}.items():
            require(
                type(value) is int and value >= (name == "samples"), name, value, AT_LEAST[name]
            )
        for name, value in {"temperature": temperature, "top_p": top_p}.items():
            fits = type(value) in (int, float) and (
                0 < value <= 1 if name == "top_p" else value == 0 or 0.001 <= value <= 100
            )
            require(fits, name, value, AT_LEAST[name])
        sampler, rule = self._components.sampler, SamplingRule(temperature, top_p, top_k)
        requests = [self._prompt(i, text) for i, text in enumerate(prompts)]
        sampler.begin(self._params, purpose=SAMPLE_FOR_SERVING, step=0, rule=rule)
        for prompt in requests:
            sampler.submit(prompt, samples)
        responses: dict[int, list[Completion]] = {}
        while not sampler.idle:
            responses |= {prompt.index: list(done) for prompt, done in sampler.decode_burst()}
        sampler.release()
        return [responses[prompt.index] for prompt in requests]


def sample(
    model: File,
    prompts: Sequence[str | Messages],
    *,
    samples: int = 1,
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int = 0,
    **limits: int,
) -> "list[list[Completion]]":
    """Samples responses of a policy to prompts. `Policy` reads the model once for several calls.

    >>> answers = dapo_jax.sample(base, ["1+2="], temperature=0, max_response_tokens=24)
    >>> answers[0][0].text.startswith("1+2=")
    True

    Args:
        model: a model folder, or the run_dir of a run.
        prompts: texts as the policy sees them, or lists of messages (`role` and `content`), which
            go through the folder's chat template.
        samples: responses to each prompt.
        temperature: 0 takes the likeliest token.
        top_p, top_k: what of the distribution is drawn from; 1 and 0: all.
        limits: `max_prompt_tokens`, `max_response_tokens`, `slots`, `seed` of `Policy`.

    Returns:
        per prompt a list of responses, each with `text`, `tokens`, `sampler_logprobs` and
        `truncated` (whether the limit cut it off).

    Raises:
        ConfigError: an argument makes no sense, or the model can't be read.
    """
    policy = Policy(model, **limits)
    return policy.sample(
        prompts, samples=samples, temperature=temperature, top_p=top_p, top_k=top_k
    )
