"""Plug-ins of every kind, as a user would write them (docs/extending.md)."""

import dataclasses

from dapo_jax.config.settings import Section, setting
from dapo_jax.model.families import QWEN2
from dapo_jax.types.contracts import RunSink, VerifierResult
from dapo_jax.types.rules import Count
from dapo_jax.types.structs import Observation, Problem


def last_digit(response: str, gold: str, prompt: str) -> VerifierResult:
    """Accept a response whose last character is the gold answer's."""
    found = response.strip()[-1:] or None
    return VerifierResult(found == gold[-1], found, "direct")


class BrevitySettings(Section):
    """Lengths of short responses."""

    combinations = "reward.parts!~brevity -> extras.brevity."
    longest: Count = setting(100, "Characters of a response with reward 0.")


class Brevity:
    """Rewards short responses."""

    def __init__(self, settings: BrevitySettings):
        self.longest = settings.longest

    def __call__(self, prompt: str, response: str, answer: str) -> float:
        return 1 - len(response) / self.longest


class Counting:
    """`counting:START`: the sums START + 1, START + 2, ..."""

    @staticmethod
    def open_problems(field, name, data, seed, split) -> tuple[Problem, ...] | None:
        if split == "heldout":
            return None  # they are split off
        start = int(name.partition(":")[2])
        sums = range(1, data.train_problems + 1)
        return tuple(Problem(f"{n}", f"{start}+{n}=", f"{(start + n) % 10}", name) for n in sums)


class Echo:
    """Says the policy's turn again, once."""

    def reset(self, problem: Problem) -> None: ...

    def step(self, text: str) -> Observation | None:
        return Observation(text="+1=", reward=0.5, done=len(text) > 3)


class Counted:
    """Passes all on to the sampler of this process, and counts the requests."""

    def __init__(self, local):
        self._local, self.requests = local, 0

    def __getattr__(self, name):
        return getattr(self._local, name)

    def submit(self, *options, **named):
        self.requests += 1
        return self._local.submit(*options, **named)


def counted(parts):
    sampler = Counted(parts.local)
    return sampler, lambda: parts.warn(f"{sampler.requests} requests")


class Lines(RunSink):
    """Writes the reward of every step to lines.txt."""

    def __init__(self, run_dir, config):
        self._path = run_dir / "lines.txt"
        self._lines: list[str] = []

    def on_row(self, step: int, values: dict[str, float]) -> None:
        if "reward" in values:
            self._lines.append(f"{step} {values['reward']}")
        self._path.write_text("\n".join(self._lines))


OTTER = dataclasses.replace(QWEN2, model_type="otter", class_name="Otter")


def hello() -> int:
    """Say hello."""
    print("hello from another package")
    return 0
