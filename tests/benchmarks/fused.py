"""Time one product with concatenated matrices against separate products.

    python tests/benchmarks/fused.py

Query, key and value, and gate and up, of the model of ours.py, for 32 and 64 slots: microseconds of
processor time, the best of some repeats, and the ratio. It is why the package fuses nothing.
"""

import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
from arguments import read_arguments

EMBED, MLP, HEADS = 256, 1024, (256, 128, 128)


def microseconds(run: Callable, arguments: tuple, calls: int) -> float:
    """Return the processor time of a call over all threads."""
    jax.block_until_ready(run(*arguments))
    best = float("inf")
    for _ in range(5):
        began = time.process_time()
        for _ in range(calls):
            result = run(*arguments)
        jax.block_until_ready(result)
        best = min(best, (time.process_time() - began) / calls)
    return best * 1e6


def gated(x, gate, up, down):
    return (jax.nn.silu(x @ gate) * (x @ up)) @ down


def gated_at_once(x, both, down):
    gate, up = jnp.split(x @ both, 2, axis=-1)
    return (jax.nn.silu(gate) * up) @ down


def apart(x, *matrices):
    return [2 * (x @ matrix) for matrix in matrices]


def at_once(x, matrix):
    ends = [HEADS[0], HEADS[0] + HEADS[1]]
    return [2 * part for part in jnp.split(x @ matrix, ends, axis=-1)]


def main() -> None:
    calls = read_arguments(__doc__, calls=200).calls
    keys = iter(jax.random.split(jax.random.key(0), 16))
    gate, up = (jax.random.normal(next(keys), (EMBED, MLP)) for _ in range(2))
    down = jax.random.normal(next(keys), (MLP, EMBED))
    matrices = [jax.random.normal(next(keys), (EMBED, width)) for width in HEADS]
    for slots in (32, 64):
        x = jax.random.normal(next(keys), (slots, EMBED))
        for name, many, one, several, fused in (
            ("gate, up, down", gated, gated_at_once, (gate, up), jnp.hstack([gate, up])),
            ("query, key, value", apart, at_once, matrices, jnp.hstack(matrices)),
        ):
            rest = (down,) if many is gated else ()
            before = microseconds(jax.jit(many), (x, *several, *rest), calls)
            after = microseconds(jax.jit(one), (x, fused, *rest), calls)
            print(
                f"{slots} slots, {name}: {before:.0f} and fused {after:.0f} ({before / after:.2f}x)"
            )


if __name__ == "__main__":
    main()
