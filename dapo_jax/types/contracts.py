"""The interfaces of the four exchangeable parts of a run.

    Sampler      samples responses: the scheduler in this process, a remote engine
    Verifier     decides whether a response is correct
    Environment  replies to the policy between the turns of a trajectory
    RunSink      shows or stores what a run reports: console, files, trackers

The first three are `typing.Protocol`s: a class satisfies one by having its members. A sink inherits
from `RunSink`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

if TYPE_CHECKING:  # verifier processes import this module, and need no arrays
    from dapo_jax.types.structs import (
        CollectedGroups,
        Completion,
        Observation,
        PartialGroup,
        Problem,
        Prompt,
        SamplerCounts,
        SamplingRule,
    )

FinishedResponses: TypeAlias = "tuple[Prompt, tuple[Completion, ...]]"


def do_nothing() -> None:
    """Do nothing: the default of callbacks without arguments."""


class Sampler(Protocol):
    """A source of responses for training steps and evaluations.

    Between `begin` and `release` one version of the policy samples all responses. A
    response is a function of (seed, purpose, step, prompt index, sample index, position) and of
    the policy, so the order of calls, the number of slots and the machine do not change it.

    Attributes:
        counts: tokens, bursts and seconds since `begin`.
        environments: replies between turns; None if every response is one turn.
    """

    counts: SamplerCounts
    environments: Any

    @property
    def idle(self) -> bool:
        """True if nothing waits and nothing is being decoded."""
        ...

    @property
    def room(self) -> int:
        """Number of responses that could start now in addition to those submitted."""
        ...

    def prepare(self, params: Any, policy_step: int) -> None:
        """Load a policy for the next `begin`, ahead of an update that keeps the devices busy."""
        ...

    def begin(
        self,
        params: Any,
        *,
        purpose: int,
        step: int,
        rule: SamplingRule,
        policy_step: int | None = None,
    ) -> None:
        """Load a policy and forget all earlier requests.

        Args:
            params: parameters of the trainer, sharded over its mesh.
            purpose: one of `SAMPLE_FOR_TRAINING`, `SAMPLE_FOR_EVALUATION`; part of the random key.
            step: rollout step; part of the random key.
            rule: temperature and truncation.
            policy_step: number of steps that `params` were trained for; default `step`. It is
                recorded as `Completion.policy_step`.
        """
        ...

    def submit(self, prompt: Prompt, samples: int, carried: PartialGroup | None = None) -> None:
        """Request the responses 0 to samples - 1 to a prompt, returned together.

        Args:
            carried: the part of the group that an earlier step has sampled; sampling resumes.

        Raises:
            ValueError: the prompt has no tokens.
        """
        ...

    def submit_each(self, prompt: Prompt, samples: Sequence[int]) -> None:
        """Request the responses with these sample indices, each returned on its own."""
        ...

    def decode_burst(self, meanwhile: Callable[[], None] = do_nothing) -> list[FinishedResponses]:
        """Advance all running responses by a few tokens and return the requests that finished.

        Args:
            meanwhile: host work to run while the devices decode; called exactly once.
        """
        ...

    def suspend(self) -> list[PartialGroup]:
        """Stop everything and return it, in data order, so that `submit` can resume it."""
        ...

    def abandon(self) -> None:
        """Stop everything, discard it, and add it to `counts`."""
        ...

    def release(self) -> None:
        """Free the memory of caches and decoding weights until the next `begin`."""
        ...

    def resident(self) -> Any:
        """Return the tree of arrays that `release` does not free, for memory reports.

        It is the decoding copy of frozen parameters; the first call makes it.
        """
        ...


class VerifierResult(NamedTuple):
    """The decision of a verifier about one response."""

    correct: bool
    extracted: str | None  # the answer found in the response, None if there is none
    decided: str = ""  # how equality was decided: direct, algebra; or why there was no answer


class Verifier(Protocol):
    """A rule that decides whether a response answers a problem.

    The built-in verifiers run in a worker process of the reward pool, which is killed if it is
    late. An exception makes the response incorrect and is recorded as the verdict's failure.
    """

    def __call__(self, response: str, gold: str, prompt: str) -> VerifierResult:
        """Compare the answer in `response` with `gold`; `prompt` says what was asked for."""
        ...


class Environment(Protocol):
    """A dialogue partner of one trajectory, created for each trajectory in a worker process.

    A user's class may omit `reset`; the prompt is then the problem's own. A constructor that has a
    parameter `seed` receives the trajectory's. `reset` must depend on the problem alone, since all
    responses to a prompt share it.
    """

    def reset(self, problem: Problem) -> str | Sequence[dict[str, Any]] | None:
        """Return the text or chat messages of the prompt; None for the problem's own prompt.

        Args:
            problem: id, text, answer, source and metadata; other fields are empty.
        """
        ...

    def step(self, text: str) -> Observation | None:
        """Reply to a turn of the policy; None ends the trajectory.

        An exception means that the environment is broken: the trajectory ends without a reward.
        """
        ...


class RunSink:
    """A receiver of what a run reports. Only the first process calls it.

    A sink must not stop training: it reports failures of its storage or service as warnings. A
    callback of `dapo_jax.train` may. Its methods do nothing: a sink has those it needs.
    """

    def on_row(self, step: int, values: dict[str, float]) -> None:
        """Receive the metrics of a finished step (0: before training)."""

    def on_rollouts(self, step: int, collected: CollectedGroups) -> None:
        """Receive the scored groups of a step."""

    def on_evaluation(self, step: int, responses: Sequence[Any]) -> None:
        """Receive the scored responses to the held-out problems."""

    def on_summary(self, summary: dict[str, Any]) -> None:
        """Receive the result of the finished run."""

    def close(self, failed: bool) -> None:
        """Flush and disconnect."""
