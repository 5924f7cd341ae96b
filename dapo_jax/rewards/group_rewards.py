"""Rewards of a group: the rule, other parts, and the sum of all."""

import dataclasses
from collections.abc import Callable

import numpy as np

from dapo_jax.config.experiment import Config
from dapo_jax.config.sections import SHAPING
from dapo_jax.structs import Completion, Group, Prompt, Verdict

REPEATED_WINDOW_TOKENS = 8  # a power of two


def overlong_punishment(
    response_tokens: np.ndarray, max_response_tokens: int, buffer_tokens: int
) -> np.ndarray:
    """Soft overlong punishment (DAPO, arXiv 2503.14476, equation 13), in [-1, 0].

    0 up to `max_response_tokens - buffer_tokens`, then falling linearly to -1 at the maximum.
    Counts response tokens: never characters, never the prompt.
    """
    beyond = np.asarray(response_tokens) - (max_response_tokens - buffer_tokens)
    return -np.clip(beyond / buffer_tokens, 0.0, 1.0)


def repetition(tokens: np.ndarray) -> float:
    """Fraction of the windows of 8 tokens that occurred before in the same response."""
    if len(tokens) <= REPEATED_WINDOW_TOKENS:
        return 0.0
    # Windows are numbered, equal ones alike, by the numbers of their halves: ten times as fast as
    # to sort whole ones, of every response of a step.
    numbers, seen, half = np.asarray(tokens, np.uint64), (), 1
    while half < REPEATED_WINDOW_TOKENS:
        both = numbers[:-half] << np.uint64(32) | numbers[half:]
        seen, numbers = np.unique(both, return_inverse=True)
        numbers, half = numbers.astype(np.uint64), 2 * half
    return 1.0 - len(seen) / len(numbers)


# Parts that the trainer computes: (config, completion, verdict) -> unweighted reward.
RULES: dict[str, Callable[[Config, Completion, Verdict], float]] = {
    "rule": lambda config, completion, verdict: (
        config.algorithm.reward_correct if verdict.correct else config.algorithm.reward_wrong
    ),
    "format": lambda config, completion, verdict: float(verdict.extracted is not None),
    "repetition": lambda config, completion, verdict: -repetition(completion.drawn_tokens),
    "environment": lambda config, completion, verdict: sum(
        completion.rewards[-1:] if config.environment.rewards == "last" else completion.rewards
    ),
}


def reward_parts(
    config: Config,
    completions: tuple[Completion, ...],
    verdicts: tuple[Verdict, ...],
    model_scores: np.ndarray | None,
) -> dict[str, np.ndarray]:
    """Weighted parts by name, each [G] float64; NaN where a worker's part gave no number."""
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
        budget = config.drawn_budget()
        buffer = max(1, round(config.algorithm.overlong_buffer_share * budget))
        parts["overlong"] = overlong_punishment(lengths, budget, buffer)
    return parts


def _with_steps(verdict: Verdict, completion: Completion, weight: float) -> Verdict:
    """Verdict whose token rewards hold those of the environment's steps, on their turns' ends."""
    if not len(completion):
        return verdict
    turns = [turn.tokens for turn in completion.turns if turn.drawn] or [len(completion)]
    ends, rewards = np.cumsum(turns)[: len(completion.rewards)], np.zeros(len(completion))
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
    """Group with rewards, their parts and correctness; an empty response can't be right.

    Args:
        model_scores: [G] of the learned reward model, where the config asks for one.
    """
    verdicts = tuple(
        verdict if len(completion) else dataclasses.replace(verdict, correct=False, extracted=None)
        for completion, verdict in zip(completions, verdicts, strict=True)
    )
    weight = config.reward.weights().get("environment")
    if weight is not None and config.environment.rewards == "steps":
        pairs = zip(verdicts, completions, strict=True)
        verdicts = tuple(_with_steps(*pair, weight) for pair in pairs)
    parts = reward_parts(config, completions, verdicts, model_scores)
    nothing = np.zeros(len(verdicts))
    raw = sum((v for name, v in parts.items() if name not in SHAPING), nothing)
    correct = np.array([verdict.correct for verdict in verdicts], bool)
    if config.reward.correct == "threshold":
        tokens = np.array([len(completion) for completion in completions])
        correct = (raw >= config.reward.threshold) & (tokens > 0)
    rewards = sum(parts.values(), nothing)
    return Group(prompt, completions, verdicts, parts, rewards, raw, correct)
