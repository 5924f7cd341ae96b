"""Interface of environments, which a user's class has and the ready ones have too.

An environment is made anew for each trajectory. It may have

    reset(problem)   text or messages of the prompt; without it, the problem's own prompt
    step(text)       `Observation` of a turn of the policy; None ends the trajectory

A class whose constructor takes `seed` gets that of the trajectory, for what it draws in `step`;
`reset` may depend on the problem alone, since all responses to a prompt begin alike.
"""

import dataclasses
import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

Messages = Sequence[dict[str, Any]]  # each with role and content


class Problem(NamedTuple):
    """Fields of a problem that an environment may read. Workers import this, and not jax."""

    id: str
    text: str
    answer: str
    source: str
    metadata: str


@dataclasses.dataclass(frozen=True)
class Observation:
    """Reply of an environment to a turn.

    Attributes:
        text: shown to the policy before its next turn; with a chat template a message of `role`.
        messages: of a chat, in the place of `text`.
        reward: for this step.
        done: whether the trajectory ends; it does also where there is nothing to show.
        role: whose message `text` is.
        failure: error that the policy is told of, for the count of failed steps.
    """

    text: str = ""
    messages: Messages = ()
    reward: float = 0.0
    done: bool = False
    role: str = "user"
    failure: str = ""


def make_environment(factory: Callable[..., Any], seed: int) -> Any:
    """Environment of a trajectory."""
    takes_seed = "seed" in inspect.signature(factory).parameters
    return factory(seed=seed) if takes_seed else factory()


def reset(environment: Any, problem: Problem) -> str | Messages | None:
    """Prompt that an environment begins with; None: the problem's own."""
    begin = getattr(environment, "reset", None)
    return None if begin is None else begin(problem)


def check_observation(given: Any) -> Observation:
    """Observation that `step` returned. Raises TypeError, ValueError for anything else."""
    if given is None:
        return Observation(done=True)
    if not isinstance(given, Observation):
        raise TypeError(f"step returned {given!r:.80}: must be an Observation or None")
    if not isinstance(given.text, str):
        raise TypeError(f"the observation's text is {given.text!r:.80}: must be text")
    if not all(isinstance(one, dict) and "role" in one for one in given.messages):
        raise TypeError(f"a message in {given.messages!r:.80} has no role")
    reward = float(given.reward)
    if not abs(reward) < 1e30:
        raise ValueError(f"the observation's reward is {given.reward!r}: must be a finite number")
    return dataclasses.replace(given, reward=reward, done=bool(given.done))
