"""Scoring of finished groups: verdicts of the pool, scores of a reward model, rewards."""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

import numpy as np

from dapo_jax.config.experiment import Config
from dapo_jax.rewards.group_rewards import reward_group
from dapo_jax.rewards.pool import RewardPool
from dapo_jax.runtime import processes
from dapo_jax.runtime.workers.pool import gather_results
from dapo_jax.types.structs import Completion, Group, Prompt, Verdict, with_texts

NOTICE_SECONDS = 20.0  # of waiting for rewards until a line names the function
# Returns float32 scores of each group's responses, such as `learner.critic.RewardModel.score`.
ScoreGroups = Callable[[Sequence[tuple[Prompt, Sequence[Completion]]]], list[np.ndarray]]


class Pending(NamedTuple):
    """Finished group; the process that scores it has its texts and its future verdicts."""

    prompt: Prompt
    completions: tuple[Completion, ...]
    verdicts: Future[list[Verdict]] | None


def _with_results(
    group: Pending, verdicts: list[dict[str, Any]], texts: list[str]
) -> tuple[Prompt, tuple[Completion, ...], tuple[Verdict, ...]]:
    """Return prompt, responses and verdicts; only the process that scored them had the texts."""
    pairs = zip(group.completions, texts, strict=True)
    missing = [text for completion, text in pairs if not completion.text]
    completions = with_texts(group.completions, lambda _: missing)
    return group.prompt, completions, tuple(map(Verdict.from_json, verdicts))


class Judge:
    """Background scorer of groups: `submit` returns at once, `read` the results that are there.

    Args:
        should_abort: called while verdicts are missing; if true, `read` raises `Interrupted`.
        decode_all: decodes responses that have no text yet; by default their text stays empty.
    """

    def __init__(
        self,
        config: Config,
        pool: RewardPool,
        score_groups: ScoreGroups | None = None,
        should_abort: Callable[[], bool] = lambda: False,
        decode_all: Callable[[list[list[int]]], list[str]] = lambda rows: [""] * len(rows),
    ):
        self._config = config
        self._pool = pool
        self._score_groups = score_groups
        self._should_abort = should_abort
        self._decode_all = decode_all
        self._notice_seconds = NOTICE_SECONDS

    def submit(self, prompt: Prompt, completions: tuple[Completion, ...]) -> Pending:
        """If this process scores the prompt, decode its responses and submit them."""
        if prompt.index % processes.count() != processes.index():
            return Pending(prompt, completions, None)
        completions = with_texts(completions, self._decode_all)
        return Pending(prompt, completions, self._pool.submit_group(prompt, completions))

    def cancel(self, pending: Sequence[Pending]) -> None:
        """Call no further reward functions for groups that nobody will read."""
        for group in pending:
            if group.verdicts is not None:
                group.verdicts.cancel()

    def groups(self, pending: Sequence[Pending]) -> list[Group]:
        """Return the rewarded groups, in order, on every process. Raises `Interrupted`."""
        return self.read(pending, len(pending))[0]

    def read(self, pending: Sequence[Pending], least: int) -> tuple[list[Group], list[Pending]]:
        """Return the groups that are rewarded, at least so many, and those still pending."""

        def encode(i: int, verdicts: list[Verdict]) -> list[Any]:
            texts = [completion.text for completion in pending[i].completions]
            return [list(map(vars, verdicts)), texts]

        futures = [[group.verdicts] if group.verdicts else [] for group in pending]
        results = gather_results(futures, encode, self._watch(pending), "verdicts", least)
        done = [_with_results(pending[i], *own) for i, (own,) in results.items()]
        scores: Sequence[np.ndarray | None] = [None] * len(done)
        if self._score_groups is not None and done:
            scores = self._score_groups([(prompt, completions) for prompt, completions, _ in done])
        pairs = zip(done, scores, strict=True)
        groups = [reward_group(self._config, *own, score) for own, score in pairs]
        return groups, [group for i, group in enumerate(pending) if i not in results]

    def _watch(self, pending: Sequence[Pending]) -> Callable[[], bool]:
        """Return `should_abort`; it also prints a line if rewards take long, then rarer ones."""
        start = time.monotonic()

        def should_abort() -> bool:
            seconds = time.monotonic() - start
            if seconds >= self._notice_seconds:
                self._notice_seconds = 2 * seconds
                waiting = sum(
                    len(group.completions)
                    for group in pending
                    if group.verdicts and not group.verdicts.done()
                )
                reward = self._config.reward
                processes.print_error(
                    f"warning: waiting {seconds:.0f} s for rewards, {waiting} responses left: "
                    f"{', '.join(self._pool.running) or 'the verifier'} is running "
                    f"(reward.workers = {reward.workers}, "
                    f"reward.timeout_seconds = {reward.timeout_seconds:g})"
                )
            return self._should_abort()

        return should_abort

    def close(self) -> None:
        """End the worker processes."""
        self._pool.close()
