"""Training pass through layers of several shapes: a stack of parameters for each kind of layer.

Layers repeat in periods (Gemma 4: five that slide and a full one; Qwen3.5: three gated delta-net
layers and one with attention). A period is one iteration of a scan. Layers that share keys and
values read those of the last layer of their kind before them.
"""

import collections
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from dapo_jax.model.training_attention import CAUSAL, TRAINING_ATTENTION, AttentionOptions, Context

SHARING = "sharing_"  # prefix of stacks that read the keys and values of others


class Pass(NamedTuple):
    """Settings of a pass that are the same in all layers."""

    context: Context
    policy: Callable | None  # of recomputation; None: nothing is recomputed
    unroll: int  # layers per iteration of a scan
    record: Sequence[str]  # flax collections


def _attend_kept(attend: Callable) -> Callable:
    """Return training attention that also returns keys and values, for layers that share them."""

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
    cache = (row, row) if layer.shares_keys else None
    layer_input = jnp.zeros((1, 1, layer.layer_inputs))
    block = make_block(layer, _attend_kept(TRAINING_ATTENTION["plain"]))

    def init(key: jax.Array) -> Any:
        return block.init(key, x, Context(ids, ids), cache, layer_input=layer_input)["params"]

    # Not `vmap`: `ragged_dot` lacks it for matrices of experts that have adapters.
    boxed = jax.lax.map(init, jax.random.split(key, count))
    return nn.meta.add_axis(boxed, 0, {nn.PARTITION_NAME: "layers"})


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


def _cut(tree: Any, first: int, count: int, length: int) -> Any:
    """Return `count` parts of `length` layers each, from layer `first` on."""
    part = slice(first, first + count * length)
    return jax.tree.map(lambda leaf: leaf[part].reshape(count, length, *leaf.shape[1:]), tree)


def run_stacks(
    make_block: Callable,
    layers: Sequence[tuple[str, Any]],  # stack and config of each layer
    stacks: dict[str, Any],
    x: Float[Array, "R T D"],
    inputs: dict[str, Array],  # further arguments of all layers [L, ...]
    shared: Pass,
) -> tuple[Float[Array, "R T D"], dict[str, Any]]:
    """Return the residual stream after all layers, and the records of all layers [L, ...]."""
    names = [name for name, _ in layers]
    shares = any(name.startswith(SHARING) for name in names)
    kept: dict[str, Any] = {}
    if shares:  # of the last layer of each stack: keys and values
        for name, layer in layers:
            row = jnp.zeros((*x.shape[:2], layer.kv_heads, layer.head_dim), x.dtype)
            kept.setdefault(name.removeprefix(SHARING), (row, row))

    def apply(layer: Any, params: Any, x: Array, cache: Any, inputs: dict[str, Array]) -> Any:
        attend = TRAINING_ATTENTION[layer.attention]
        block = make_block(layer, _attend_kept(attend) if shares else attend)
        arguments = {"params": params}, x, shared.context, cache
        return block.apply(*arguments, mutable=list(shared.record), **inputs)

    def run(layers: Sequence[tuple[str, Any]], kept: Any, x: Array, params: Any, inputs: Any):
        """Return stream, keys and values of each stack's last layer, and records [L, ...]."""
        names = [name for name, _ in layers]
        if len(layers) == 1:
            [(name, layer)] = layers
            own, more = jax.tree.map(lambda leaf: leaf[0], (params[name], inputs))
            cache = kept[name.removeprefix(SHARING)] if name.startswith(SHARING) else None
            call = functools.partial(apply, layer)
            if shared.policy is not None:
                call = jax.checkpoint(call, policy=shared.policy, prevent_cse=False)
            (x, row), record = call(own, x, cache, more)
            changed = {name: row} if name in kept else {}
            return x, kept | changed, jax.tree.map(lambda leaf: leaf[None], record)

        records, first, done = [], 0, collections.Counter()
        for length, count in periods(names):
            period = layers[first : first + length]
            sizes = collections.Counter(name for name, _ in period)

            def step(carry: Any, slices: Any, period: Any = period, kept: Any = kept) -> Any:
                x, after, record = run(period, kept | carry[1], carry[0], *slices)
                return (x, {name: after[name] for name in carry[1]}), record

            slices = {name: _cut(params[name], done[name], count, n) for name, n in sizes.items()}
            carry = x, {name: kept[name] for name in sizes if name in kept}
            unroll = min(count, max(1, shared.unroll // length))
            slices = slices, _cut(inputs, first, count, length)
            (x, changed), record = jax.lax.scan(step, carry, slices, unroll=unroll)
            kept = kept | changed
            records.append(jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), record))
            first += count * length
            done.update({name: count * n for name, n in sizes.items()})
        return x, kept, jax.tree.map(lambda *parts: jnp.concatenate(parts), *records)

    x, _, records = run(layers, kept, x, stacks, inputs)
    return x, records
