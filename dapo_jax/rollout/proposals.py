"""Proposed tokens: what followed the last tokens of a text where they occurred before.

A decode step feeds a slot's last token and its proposals at once. Those that equal the tokens which
the key of their position samples save a step each; the others leave no trace.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from dapo_jax.model.caches import Texts

MAX_MATCH = 4  # last tokens that are looked up


def sibling_texts(
    texts: Texts, lengths: Int[Array, "S"]
) -> tuple[Int[Array, "S T"], Int[Array, "S"]]:
    """Return each slot's longest other response to the same prompt, and its tokens (0: none).

    A response that has ended counts until its slot is used again.
    """
    same = texts.prompts[:, None] == texts.prompts
    ends = jnp.where(same & ~jnp.eye(len(lengths), dtype=bool), lengths + 1, 0)
    return texts.tokens[jnp.argmax(ends, axis=1)], jnp.max(ends, axis=1)


def propose(
    texts: Int[Array, "S T"],
    lengths: Int[Array, "S"],  # position of the last token of each
    others: tuple[Int[Array, "S T"], Int[Array, "S"]],  # see `sibling_texts`
    count: int,
) -> Int[Array, "S m"]:
    """Return the tokens that may follow each text: any tokens if its last one is new.

    They followed the longest match with its end, the latest if there are several, its own before
    those of the other text. Past the end of its own text they repeat what follows the match.
    """

    def look(text, length, other, other_end):
        size = len(text)
        both, last = jnp.concatenate([other, text]), size + length
        place, run = jnp.arange(2 * size), jnp.ones(2 * size, jnp.int32)
        matched = jnp.zeros_like(run)
        for back in range(MAX_MATCH):
            run *= jnp.roll(both, back) == both[last - back]
            matched += run
        is_past = (place < other_end - 1) | (place >= size) & (place < last)
        best = jnp.argmax(jnp.where(is_past, matched * 2 * size + place, -1))
        return both[best + 1 + jnp.arange(count) % (last - best)]

    return jax.vmap(look)(texts, lengths, *others)
