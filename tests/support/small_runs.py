"""What tests of whole runs share: a small base policy, a config around it, and a run's files.

Not in conftest.py because the imports take seconds that most test files don't need.
"""

import contextlib
import dataclasses
import functools
import json
import pathlib
from collections.abc import Iterator

import jax
import numpy as np
from conftest import check_documented, make_completion, make_prompt

from dapo_jax import algorithms
from dapo_jax.config import experiment
from dapo_jax.config.experiment import (
    Checkpoint,
    Config,
    Data,
    Evaluation,
    Log,
    Mesh,
    Rollout,
    Sampler,
)
from dapo_jax.extras.sft.settings import Architecture, SftConfig
from dapo_jax.extras.sft.training import train_supervised
from dapo_jax.learner.update import LearnerStates
from dapo_jax.rewards.group_rewards import reward_group
from dapo_jax.rollout import source
from dapo_jax.run import checks
from dapo_jax.run import loop as runs
from dapo_jax.run.build import Components
from dapo_jax.run.evaluate import evaluate
from dapo_jax.run.metrics import measure
from dapo_jax.run.sinks import Callbacks
from dapo_jax.runtime.clock import Clock
from dapo_jax.runtime.signals import Signals
from dapo_jax.step import StepRecord, TrainerState, train_step
from dapo_jax.types.structs import CollectedGroups, Group, SamplerCounts, Verdict

ROOT = pathlib.Path(__file__).parents[2]
STEPS = 4
# Prefixes of metrics that differ between two runs of the same settings.
CLOCKED = ("time", "seconds_", "sampled_tokens_per_second", "trained_tokens_per_second")


def make_small_base(folder: pathlib.Path) -> pathlib.Path:
    config = SftConfig(
        out=str(folder),
        total_steps=60,
        examples_per_step=32,
        architecture=Architecture(2, 64, heads=4, kv_heads=2, head_dim=16, mlp=128),
        examples=experiment.Examples(min_terms=2, max_terms=3),
        max_response_tokens=24,
        optimizer=experiment.Optimizer(learning_rate=5e-3, warmup_steps=5),
        packing=experiment.Packing(row_tokens=64, rows_per_microbatch=16),
        mesh=Mesh(data=1, fsdp=1, tensor=1),
    )
    return train_supervised(config)


def make_config(folder, run_dir, **changes) -> Config:
    """Four steps of DAPO on eight virtual devices; `changes` replace whole sections."""
    config = Config(
        run_dir=str(run_dir),
        total_steps=STEPS,
        model=experiment.Model(folder=str(folder)),
        data=Data(min_terms=2, max_terms=3, max_prompt_tokens=8, heldout_problems=16),
        rollout=Rollout(prompts_per_step=8, samples_per_prompt=8, updates_per_rollout=2),
        sampler=Sampler(slots=32, burst_tokens=4, max_response_tokens=24, first_window_tokens=32),
        optimizer=experiment.Optimizer(learning_rate=1e-3, warmup_steps=2),
        packing=experiment.Packing(row_tokens=64, rows_per_microbatch=8),
        mesh=Mesh(data=2, fsdp=2, tensor=2),
        checkpoint=Checkpoint(every_steps=1, keep=9),
        evaluation=experiment.Evaluation(every_steps=2, samples_per_problem=2, top_p=1.0),
    )
    for name, value in changes.items():
        setattr(config, name, value)
    if config.rollout.reward_bursts < 0:  # else the surplus would depend on the clock
        config.rollout.reward_bursts = 1
    checks.check(config)
    return config


def make_quick_config(folder, run_dir, preset="dapo", updates=2, **changes) -> Config:
    """Two steps of a preset on one device (see the fixture `alone`); only the steps themselves."""
    algorithm = algorithms.preset(preset)
    updates = 1 if algorithm.ratio == "none" else updates
    quick = {
        "algorithm": algorithm,
        "total_steps": 2,
        "data": Data(min_terms=2, max_terms=3, max_prompt_tokens=8, heldout_problems=0),
        "rollout": Rollout(prompts_per_step=4, samples_per_prompt=4, updates_per_rollout=updates),
        "sampler": Sampler(slots=16, burst_tokens=8, max_response_tokens=24),
        "mesh": Mesh(1, 1, 1),
        "checkpoint": Checkpoint(every_steps=0),
        "critic": experiment.Critic(pretrain_steps=0),
        "log": Log(0, tensorboard=False, rollouts=False, report=False),
    }
    return make_config(folder, run_dir, **quick | changes)


def make_short_config(base, run_dir, **changes) -> Config:
    """Two steps that show a group, and measure before and after."""
    data = Data(min_terms=2, max_terms=3, max_prompt_tokens=8, heldout_problems=4)
    log = Log(show_group_every_steps=1, tensorboard=False, rollouts=False)
    return make_quick_config(base, run_dir, data=data, log=log, **changes)


@contextlib.contextmanager
def open_run(config: Config) -> Iterator[runs.Run]:
    """The run of that config, begun or resumed, for tests that look inside between two steps."""
    with contextlib.ExitStack() as stack:
        yield runs.open_run(config, Callbacks(Signals()), stack)


def make_groups(config: Config) -> list[Group]:
    """Groups in which every other response is right."""
    samples = config.rollout.samples_per_prompt
    verdicts = tuple(Verdict(i % 2 == 0, "1") for i in range(samples))
    groups = []
    for i in range(config.rollout.prompts_per_step):
        tokens = ([5 + (7 * i + 3 * j) % 15, 6, 1] for j in range(samples))
        completions = tuple(map(make_completion, tokens))
        groups.append(reward_group(config, make_prompt(i, [3 + i, 4]), completions, verdicts))
    return groups


def equal(left, right) -> bool:
    return all(jax.tree.leaves(jax.tree.map(np.array_equal, left, right)))


def read_rows(run_dir) -> list[dict]:
    """The lines of metrics.jsonl without what the clock says; every name has a meaning."""
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    check_documented(name for row in rows for name in row)
    return [{k: v for k, v in row.items() if not k.startswith(CLOCKED)} for row in rows]


def read_rollouts(run_dir, folder="rollouts") -> dict[str, str]:
    return {path.name: path.read_text() for path in sorted((run_dir / folder).iterdir())}


class GivenGroups:
    def __init__(self, config: Config, groups: list[Group]):
        self.config = config
        count = len(groups)
        batch = CollectedGroups(groups, groups, [], count, [], count, 1.0, 0, 0, 0, False)
        self._result = source.Rollout(batch, SamplerCounts(), 1.0)

    def collect(self, state, params, step):
        return state, self._result

    def prefetch(self, state, step):
        return state


def start(components: Components, step: int = 0, critic: bool = False) -> TrainerState:
    """The state before `step` with the parameters of the model folder."""
    learners = components.learners
    trained = learners.trained() if critic else {"policy": learners.policy}
    states = {name: own.start(components.first_params(name)) for name, own in trained.items()}
    return TrainerState(step, LearnerStates.of(states), source.SourceState())


def step_on(components: Components, state: TrainerState, groups) -> tuple[TrainerState, StepRecord]:
    given = dataclasses.replace(components.trainer(), source=GivenGroups(components.config, groups))
    return train_step(given, state)


def learn(components: Components, state: TrainerState, groups) -> tuple[TrainerState, dict]:
    """The state after the updates of a rollout batch, its step unchanged, and the metrics."""
    clock = Clock()
    with clock.running():
        after, record = step_on(components, state, groups)
    values = measure(components.config, record, clock)
    return dataclasses.replace(after, step=state.step), values


# --- evaluations ---------------------------------------------------------------------------------

PROBLEMS, SAMPLES = 12, 6
run_evaluation = functools.partial(evaluate, from_folder=True)


def make_evaluation(base, run_dir, samples=SAMPLES, **changes):
    sections = {
        "data": Data(min_terms=2, max_terms=3, max_prompt_tokens=8, heldout_problems=PROBLEMS),
        "evaluation": Evaluation(samples_per_problem=samples, top_p=0.9),
    }
    return make_quick_config(base, run_dir, **sections | changes)
