"""Rewards of single tokens: numbers per token, or spans of the text, placed on the tokens drawn."""

import itertools
from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Float


def place_rewards(
    values: list, text: str, tokens: int, split: Callable[[], Sequence[str]]
) -> Float[np.ndarray, "n"]:
    """Reward of each token of a response.

    A span's number stands on the last token that has a character of it.

    Args:
        values: numbers, one per token, or spans [start, end, number], the end exclusive.
        text: of the response.
        tokens: of the response.
        split: gives the texts that its tokens add, which joined are `text`.

    Raises:
        ValueError: another count of numbers, a span beyond the text, or a tokenizer whose tokens
            don't join to it.
    """
    if values and not isinstance(values[0], list):
        if len(values) != tokens:
            raise ValueError(f"returned {len(values)} numbers: must be {tokens}, one per token")
        return np.array(values, np.float64)
    rewards, ends = np.zeros(tokens), list(itertools.accumulate(map(len, split())))
    written = ends[-1] if ends else 0
    if written != len(text):
        raise ValueError(f"spans need tokens that decode to {len(text)} characters, not {written}")
    for start, end, number in values:
        if not 0 <= start < end <= len(text):
            raise ValueError(
                f"returned the span ({start}, {end}): must be 0 <= start < end <= {len(text)}, "
                "characters of the response"
            )
        rewards[np.searchsorted(ends, end)] += number
    return rewards
