"""Training pass through layers of two kinds, each kind with a stack of parameters.

The kinds repeat, as in Qwen3.5: three gated delta-net layers and one with attention. A scan goes
over periods; its body applies the layers of a period one after another.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


class Pass(NamedTuple):
    """What all layers share: context of the tokens, recomputation, requested router records."""

    context: Any  # Context
    policy: Callable | None  # of recomputation; None: nothing is recomputed
    unroll: int  # layers per iteration of the scan
    record: Sequence[str]  # flax collections


def shortest_period(kinds: tuple[Any, ...]) -> int:
    """Return the length of the shortest run of kinds that gives all of them if it is repeated."""
    total = len(kinds)
    divisors = (length for length in range(1, total + 1) if total % length == 0)
    return next(n for n in divisors if kinds == kinds[:n] * (total // n))


def init_stack(
    block: nn.Module, count: int, x: Float[Array, "R T D"], context: Any, key: jax.Array
) -> Any:
    """Return random parameters of `count` layers like `block`, boxed with their axis names."""
    init = jax.vmap(lambda key: block.init(key, x, context, None)["params"])
    return nn.meta.add_axis(init(jax.random.split(key, count)), 0, {nn.PARTITION_NAME: "layers"})


def run_periods(
    blocks: Sequence[nn.Module],  # of the layers of a period
    names: Sequence[str],  # of their stacks
    stacks: dict[str, Any],
    x: Float[Array, "R T D"],
    routes: Any,  # [L, R, T, k], or None
    shared: Pass,
) -> tuple[Float[Array, "R T D"], dict[str, Any]]:
    """Return the residual stream after all layers, and the records of all layers [L, ...]."""

    def split(tree: Any, length: int) -> Any:
        return jax.tree.map(lambda leaf: leaf.reshape(-1, length, *leaf.shape[1:]), tree)

    def run(block: nn.Module, params: Any, x: Array, routes: Any) -> tuple[Array, Any]:
        arguments = x, shared.context, None, None, routes
        (x, _), record = block.apply({"params": params}, *arguments, mutable=list(shared.record))
        return x, record

    if shared.policy is not None:
        run = jax.checkpoint(run, policy=shared.policy, prevent_cse=False, static_argnums=0)

    def run_period(x: Array, inputs: tuple) -> tuple[Array, Any]:
        stacks, routes = inputs
        records = []
        for number, (name, block) in enumerate(zip(names, blocks, strict=True)):
            place = names[:number].count(name)
            params = jax.tree.map(lambda leaf, place=place: leaf[place], stacks[name])
            x, record = run(block, params, x, None if routes is None else routes[number])
            records.append(record)
        return x, jax.tree.map(lambda *layers: jnp.stack(layers), *records)

    cut = {name: split(stack, names.count(name)) for name, stack in stacks.items()}
    unroll = max(1, shared.unroll // len(blocks))
    x, records = jax.lax.scan(run_period, x, (cut, split(routes, len(blocks))), unroll=unroll)
    return x, jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), records)
