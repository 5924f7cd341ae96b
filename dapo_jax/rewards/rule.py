"""The rule reward: right or wrong, plus the soft punishment of overlong responses."""

import numpy as np

from dapo_jax.algorithms import Algorithm
from dapo_jax.structs import Completion, Group, Prompt, Verdict


def overlong_punishment(
    response_tokens: np.ndarray, max_response_tokens: int, buffer_tokens: int
) -> np.ndarray:
    """Soft overlong punishment (DAPO, arXiv 2503.14476, equation 13), in [-1, 0].

    0 up to `max_response_tokens - buffer_tokens`, then falling linearly to -1 at the maximum.
    Counts response tokens: never characters, never the prompt.
    """
    beyond = np.asarray(response_tokens) - (max_response_tokens - buffer_tokens)
    return -np.clip(beyond / buffer_tokens, 0.0, 1.0)


def reward_group(
    algorithm: Algorithm,
    max_response_tokens: int,
    prompt: Prompt,
    completions: tuple[Completion, ...],
    verdicts: tuple[Verdict, ...],
) -> Group:
    """The group with its reward parts; an empty response can't be right."""
    verdicts = tuple(
        verdict if len(completion) else Verdict(False, None, verdict.failure)
        for completion, verdict in zip(completions, verdicts, strict=True)
    )
    correct = np.array([verdict.correct for verdict in verdicts], bool)
    parts = {"rule": np.where(correct, algorithm.reward_correct, algorithm.reward_wrong)}
    if algorithm.overlong_punishment:
        lengths = np.array([len(completion) for completion in completions])
        buffer = max(1, round(algorithm.overlong_buffer_share * max_response_tokens))
        parts["overlong"] = overlong_punishment(lengths, max_response_tokens, buffer)
    return Group(prompt, completions, verdicts, parts, sum(parts.values()))
