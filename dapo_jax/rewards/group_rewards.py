"""Rewards of groups: built-in parts, parts of workers, their weighted sum; scored in background."""

import dataclasses
import itertools
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

import numpy as np

from dapo_jax.config.experiment import SHAPING, Config
from dapo_jax.rewards.pool import RewardPool
from dapo_jax.runtime import processes
from dapo_jax.runtime.workers.pool import gather_results
from dapo_jax.types.structs import (
    Completion,
    FailedResponse,
    Failure,
    Group,
    Outcome,
    Prompt,
    Verdict,
    reaches,
    repetition,
    with_texts,
)

NOTICE_SECONDS = 20.0  # of waiting for rewards until a line names the function
# Returns float32 scores of each group's responses, such as `learner.critic.RewardModel.score`.
ScoreGroups = Callable[[Sequence[tuple[Prompt, Sequence[Completion]]]], list[np.ndarray]]


def overlong_punishment(
    response_tokens: np.ndarray, max_response_tokens: int, buffer_tokens: int
) -> np.ndarray:
    """Return the soft overlong punishment (DAPO, arXiv 2503.14476, equation 13), in [-1, 0].

    0 up to `max_response_tokens - buffer_tokens`, then falling linearly to -1 at the maximum.
    Only response tokens count, not characters and not the prompt.
    """
    beyond = np.asarray(response_tokens) - (max_response_tokens - buffer_tokens)
    return -np.clip(beyond / buffer_tokens, 0.0, 1.0)


def length_penalties(correct: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Return the pass rate times each response's fraction of the longest one's tokens.

    As the linear penalty of prime-rl for output tokens; a prompt that nothing solves has none.
    """
    return correct.mean() * tokens / max(1, tokens.max())


# Built-in parts from a verdict: (config, completion, verdict) -> unweighted reward.
RULES: dict[str, Callable[[Config, Completion, Verdict], float]] = {
    "rule": lambda config, completion, verdict: (
        config.algorithm.reward_correct if verdict.correct else config.algorithm.reward_wrong
    ),
    "format": lambda config, completion, verdict: float(verdict.extracted is not None),
    "repetition": lambda config, completion, verdict: -repetition(completion.sampled_tokens),
    "environment": lambda config, completion, verdict: sum(
        completion.rewards[-1:] if config.environment.rewards == "last" else completion.rewards
    ),
}
NOT_FINITE = Failure(Outcome.USER_ERROR, "the reward is not a finite number")


def reward_parts(
    config: Config,
    completions: tuple[Completion, ...],
    verdicts: tuple[Verdict, ...],
    model_scores: np.ndarray | None,
) -> dict[str, np.ndarray]:
    """Return the weighted parts by name, each [G] float64; NaN if a function failed."""
    parts = {}
    for name, weight in config.reward.weights().items():
        if name in RULES:
            pairs = zip(completions, verdicts, strict=True)
            values = [RULES[name](config, completion, verdict) for completion, verdict in pairs]
        elif name == "model":
            values = model_scores
        else:
            values = [verdict.parts.get(name, np.nan) for verdict in verdicts]
        parts[name] = weight * np.array(values, np.float64)
    if config.algorithm.overlong_punishment:
        lengths = np.array([len(completion) for completion in completions])
        budget = config.sampled_budget()
        buffer = max(1, round(config.algorithm.overlong_buffer_share * budget))
        parts["overlong"] = overlong_punishment(lengths, budget, buffer)
    return parts


def _add_step_rewards(verdict: Verdict, completion: Completion, weight: float) -> Verdict:
    """Add the rewards of the environment's steps to the last tokens of their turns."""
    if not len(completion):
        return verdict
    turns = [turn.tokens for turn in completion.turns if turn.is_sampled] or [len(completion)]
    ends = np.cumsum(turns)[: len(completion.rewards)]
    rewards = np.zeros(len(completion))
    rewards[ends - 1] = weight * np.array(completion.rewards)
    if verdict.token_rewards is not None:
        rewards += verdict.token_rewards
    return dataclasses.replace(verdict, token_rewards=rewards.tolist())


def reward_group(
    config: Config,
    prompt: Prompt,
    completions: tuple[Completion, ...],
    verdicts: tuple[Verdict, ...],
    model_scores: np.ndarray | None = None,
) -> Group:
    """Return a group with its rewards and correctness; an empty response is never correct.

    Responses without a reward are in `Group.failed` only.

    Args:
        model_scores: [G] scores of the learned reward model, if the config has one.
    """
    verdicts = tuple(
        verdict if len(completion) else dataclasses.replace(verdict, correct=False, extracted=None)
        for completion, verdict in zip(completions, verdicts, strict=True)
    )
    weight = config.reward.weights().get("environment")
    if weight is not None and config.environment.rewards == "steps":
        pairs = zip(verdicts, completions, strict=True)
        verdicts = tuple(_add_step_rewards(verdict, done, weight) for verdict, done in pairs)
    parts = reward_parts(config, completions, verdicts, model_scores)
    zero = np.zeros(len(verdicts))
    raw = sum((v for name, v in parts.items() if name not in SHAPING), zero)
    correct = np.array([verdict.correct for verdict in verdicts], bool)
    if config.reward.correct == "threshold":
        tokens = np.array([len(completion) for completion in completions])
        sizes = sum(map(np.abs, parts.values()), zero)
        correct = reaches(raw, config.reward.threshold, sizes) & (tokens > 0)
    if coefficient := config.algorithm.length_penalty:
        tokens = np.array([len(completion) for completion in completions])
        parts["length"] = -coefficient * length_penalties(correct, tokens)
    rewards = sum(parts.values(), zero)
    has_reward = np.array([verdict.failure is None for verdict in verdicts]) & np.isfinite(rewards)
    pairs = zip(completions, verdicts, has_reward, strict=True)
    return Group(
        prompt,
        tuple(itertools.compress(completions, has_reward)),
        tuple(itertools.compress(verdicts, has_reward)),
        {name: part[has_reward] for name, part in parts.items()},
        rewards[has_reward],
        raw[has_reward],
        correct[has_reward],
        tuple(
            FailedResponse(done, (verdict.failure or NOT_FINITE)._replace(counts=verdict.parts))
            for done, verdict, whole in pairs
            if not whole
        ),
    )


# --- groups that are scored while decoding continues ---------------------------------------------


class Pending(NamedTuple):
    """Finished group that waits for its rewards; only the process that scores it has verdicts."""

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
