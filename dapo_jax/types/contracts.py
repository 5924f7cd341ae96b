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
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:  # verifier processes import this module, and need no arrays
    from dapo_jax.types.structs import (
        CollectedGroups,
        Finished,
        Observation,
        PartialGroup,
        Problem,
        Prompt,
        Request,
        RolloutKey,
        SamplerCounts,
        SamplingRule,
        Stop,
    )


def do_nothing() -> None:
    """Do nothing: the default of callbacks without arguments."""


class Sampler(Protocol):
    """A source of responses for training steps and evaluations.

    Between `begin` and `close` one version of the policy samples all responses. A response is a
    function of (seed, purpose, step, prompt index, sample index, position) and of the policy, so
    the order of calls, the number of slots and the machine do not change it.

    Attributes:
        key: of the rollout since `begin`; None after `close`.
        counts: tokens, bursts and seconds since `begin`.
        environments: replies between turns; None if every response is one turn.
    """

    key: RolloutKey | None
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

    def begin(self, params: Any, key: RolloutKey, rule: SamplingRule) -> None:
        """Load the trainer's sharded parameters, without waiting for them; forget all requests."""
        ...

    def submit(
        self,
        prompt: Prompt,
        samples: int | Sequence[int],
        rule: SamplingRule | None = None,
        budget: int | None = None,
        stop: Stop = ...,
        *,
        carried: PartialGroup | None = None,
    ) -> Request:
        """Request responses to a prompt.

        Args:
            samples: a number of responses, returned together; or the indices of responses that are
                returned one by one.
            rule: temperature and truncation; None: the rule of `begin`.
            budget: maximum tokens of a response; None, or more: the sampler's own limit.
            stop: texts and tokens that end a response besides the tokenizer's end tokens.
            carried: the part of the group that an earlier step has sampled; sampling resumes.

        Raises:
            ValueError: the prompt or the budget has no tokens, or the sampler can't follow `rule`,
                `budget` or `stop`.
        """
        ...

    def cancel(self, request: Request) -> None:
        """Stop a request and discard it; do nothing if it has ended."""
        ...

    def step(self, meanwhile: Callable[[], None] = do_nothing) -> list[Finished]:
        """Advance all running responses by a few tokens and return the requests that finished.

        Args:
            meanwhile: host work to run while the devices decode; called exactly once. (If the next
                burst were dispatched before the last one is read, slots would be filled a burst
                late, and each rollout would end with a burst that nobody reads.)
        """
        ...

    def stop(self, keep: bool) -> list[PartialGroup]:
        """Stop decoding; with `keep`, return unfinished groups in data order, for `submit`."""
        ...

    def close(self) -> None:
        """Discard everything, and free the memory of caches and weights until the next `begin`."""
        ...


class VerifierResult(NamedTuple):
    """The decision of a verifier about one response."""

    correct: bool
    extracted: str | None  # the answer found in the response, None if there is none
    decided: str = ""  # how equality was decided: direct, algebra; or why there was no answer


class Verifier(Protocol):
    """A rule that decides whether a response answers a problem.

    The built-in verifiers run in a worker process of the reward pool, which is killed if it is
    late. After an exception the response has no reward: it is the verdict's failure.
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
