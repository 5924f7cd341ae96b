"""Training pass through layers of several shapes: a stack of parameters for each kind of layer.

Layers repeat in periods (Gemma 4: five that slide and a full one). A period is one iteration of a
scan. Layers that share keys and values read those of the last layer of their kind before them.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from dapo_jax.model.training_attention import CAUSAL, TRAINING_ATTENTION, AttentionOptions, Context

SHARING = "sharing_"  # prefix of stacks that read the keys and values of others


def _attend_kept(attend: Callable) -> Callable:
    """Return training attention whose cache is the row's keys and values."""

    def attend_kept(
        queries, keys, values, context, cache, options: AttentionOptions = CAUSAL
    ) -> tuple[Array, tuple[Array, Array]]:
        kept = cache if keys is None else (keys, values)
        return attend(queries, *kept, context, None, options)[0], kept

    return attend_kept


def init_stack(make_block: Callable, layer: Any, count: int, key: jax.Array) -> Any:
    """Return random parameters of `count` equal layers, boxed with their logical axis names."""
    x, ids = jnp.zeros((1, 1, layer.embed)), jnp.zeros((1, 1), jnp.int32)
    row = jnp.zeros((1, 1, layer.kv_heads, layer.head_dim))
    layer_input = jnp.zeros((1, 1, layer.layer_inputs))
    block = make_block(layer, _attend_kept(TRAINING_ATTENTION["plain"]))

    def init(key: jax.Array) -> Any:
        context = Context(ids, ids)
        return block.init(key, x, context, (row, row), layer_input=layer_input)["params"]

    def add_axis(box: Any) -> Any:
        return box.add_axis(0, {nn.PARTITION_NAME: "layers"})

    boxed = jax.vmap(init)(jax.random.split(key, count))
    return jax.tree.map(add_axis, boxed, is_leaf=lambda x: isinstance(x, nn.meta.AxisMetadata))


def periods(names: Sequence[str]) -> list[tuple[int, int]]:
    """Return lengths of periods and how often each repeats; together they cover the names."""
    found, first = [], 0
    while first < len(names):
        best = (1, 1)
        for length in range(1, (len(names) - first) // 2 + 1):
            period, count = names[first : first + length], 1
            while names[first + count * length :][:length] == period:
                count += 1
            if count > 1 and count * length > best[0] * best[1]:
                best = (length, count)
        found.append(best)
        first += best[0] * best[1]
    return found


def run_stacks(
    make_block: Callable,
    layers: Sequence[tuple[str, Any]],  # stack and config of each layer
    policy: Callable | None,  # of recomputation; None: nothing is recomputed
    stacks: dict[str, Any],
    x: Float[Array, "R T D"],
    given: tuple[Context, Float[Array, "L R T P"] | None],  # context, inputs of layers
) -> Float[Array, "R T D"]:
    """Return the residual stream after all layers."""
    context, inputs = given
    names = [name for name, _ in layers]
    shares = any(name.startswith(SHARING) for name in names)
    kept: dict[str, Any] = {}
    if shares:  # of the last layer of each stack: keys and values
        for name, layer in layers:
            row = jnp.zeros((*x.shape[:2], layer.kv_heads, layer.head_dim), x.dtype)
            kept.setdefault(name.removeprefix(SHARING), (row, row))

    def apply(layer: Any, params: Any, x: Array, cache: Any, layer_input: Any) -> tuple[Array, Any]:
        block = make_block(layer, _attend_kept(TRAINING_ATTENTION[layer.attention]))
        return block.apply({"params": params}, x, context, cache, layer_input=layer_input)

    def run_period(period: Sequence[tuple[str, Any]], x: Array, kept: Any, slices: Any) -> Any:
        params, layer_inputs = slices
        used = dict.fromkeys(params, 0)
        for i, (name, layer) in enumerate(period):
            own = jax.tree.map(lambda leaf, at=used[name]: leaf[at], params[name])
            used[name] += 1
            source = name.removeprefix(SHARING)
            cache = kept[source] if name.startswith(SHARING) else None
            call = functools.partial(apply, layer)
            if policy is not None:
                call = jax.checkpoint(call, policy=policy, prevent_cse=False)
            x, row = call(own, x, cache, None if layer_inputs is None else layer_inputs[i])
            kept = kept | {source: row} if shares else kept
        return x, kept

    first, done = 0, dict.fromkeys(stacks, 0)
    for length, count in periods(names):
        period = layers[first : first + length]
        params = {}
        for name in dict.fromkeys(name for name, _ in period):
            size = sum(other == name for other, _ in period)
            part = slice(done[name], done[name] + count * size)
            params[name] = jax.tree.map(
                lambda leaf, part=part, size=size: leaf[part].reshape(-1, size, *leaf.shape[1:]),
                stacks[name],
            )
            done[name] = part.stop
        part = slice(first, first + count * length)
        own = None if inputs is None else inputs[part].reshape(-1, length, *inputs.shape[1:])
        first = part.stop
        x, kept = _repeat(functools.partial(run_period, period), count, x, kept, (params, own))
    return x


def _repeat(run: Callable, count: int, x: Array, kept: dict, slices: Any) -> tuple[Array, dict]:
    """Return `run` of every slice in turn; what all of them share is no part of the carry."""
    if count == 1:
        return run(x, kept, jax.tree.map(lambda leaf: leaf[0], slices))
    params, _ = slices
    if all(name.startswith(SHARING) for name in params):

        def step(x: Array, slices: Any) -> tuple[Array, None]:
            return run(x, kept, slices)[0], None

        return jax.lax.scan(step, x, slices)[0], kept

    def keep(carry: Any, slices: Any) -> tuple[Any, None]:
        return run(*carry, slices), None

    return jax.lax.scan(keep, (x, kept), slices)[0]
