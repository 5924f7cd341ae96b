"""Training pass through layers of several shapes: a stack of parameters for each kind of layer.

Layers repeat in periods (Gemma 4: five that slide and a full one; Qwen3.5: three gated delta-net
layers and one with attention). A period is one iteration of a scan. Layers that share keys and
values read those of the last layer of their kind before them.
"""

import collections
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


def _cut(tree: Any, first: int, parts: tuple[int, int], total: int) -> Any:
    """Return parts of layers, [count, length, ...], from layer `first` of `total` on.

    Axes of size 1 are missing, here and in `tree`. A whole tree of single layers is not changed: a
    scan keeps its inputs for the backward pass, but copies what an iteration computes of them.
    """
    size = parts[0] * parts[1]
    axes = [number for number in parts if number > 1]

    def cut(leaf: Array) -> Array:
        leaf = leaf if size == total else leaf[first : first + size]
        return leaf.reshape(*axes, *leaf.shape[total > 1 :])

    return jax.tree.map(cut, tree)


def _run(
    apply: Callable,
    layers: Sequence[tuple[str, Any]],
    carry: tuple[Array, dict[str, Any]],
    slices: tuple[dict[str, Any], dict[str, Array]],  # parameters and inputs, see `_cut`
    unroll: int,
    looped: bool = True,  # whether a scan iterates over this run
) -> tuple[tuple[Array, dict[str, Any]], Any]:
    """Return stream, keys and values of each stack's last layer, and records [L, ...]."""
    (x, kept), (params, inputs) = carry, slices
    names = [name for name, _ in layers]
    if len(layers) == 1:
        [(name, layer)] = layers
        cache = kept[name.removeprefix(SHARING)] if name.startswith(SHARING) else None
        (x, row), record = apply(layer, looped, params[name], x, cache, inputs)
        changed = {name: row} if name in kept else {}
        return (x, kept | changed), jax.tree.map(lambda leaf: leaf[None], record)

    records, first, done, totals = [], 0, collections.Counter(), collections.Counter(names)
    for length, count in periods(names):
        period = layers[first : first + length]
        sizes = collections.Counter(name for name, _ in period)
        parts = {
            name: _cut(params[name], done[name], (count, n), totals[name])
            for name, n in sizes.items()
        }
        parts = parts, _cut(inputs, first, (count, length), len(layers))
        first += count * length
        done.update({name: count * n for name, n in sizes.items()})
        if count == 1:
            (x, kept), record = _run(apply, period, (x, kept), parts, unroll, looped)
            records.append(record)
            continue

        def step(carry: Any, slices: Any, period: Any = period, kept: Any = kept) -> Any:
            full = carry[0], kept | carry[1]
            (x, after), record = _run(apply, period, full, slices, unroll)
            return (x, {name: after[name] for name in carry[1]}), record

        carry = x, {name: kept[name] for name in sizes if name in kept}
        number = min(count, max(1, unroll // length))
        (x, changed), record = jax.lax.scan(step, carry, parts, unroll=number)
        kept = kept | changed
        records.append(jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), record))
    return (x, kept), jax.tree.map(lambda *parts: jnp.concatenate(parts), *records)


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

    def apply(
        layer: Any, looped: bool, params: Any, x: Array, cache: Any, inputs: dict[str, Array]
    ) -> Any:
        attend = TRAINING_ATTENTION[layer.attention]
        block = make_block(layer, _attend_kept(attend) if shares else attend)

        def call(params: Any, x: Array, cache: Any, inputs: dict[str, Array]) -> Any:
            arguments = {"params": params}, x, shared.context, cache
            return block.apply(*arguments, mutable=list(shared.record), **inputs)

        if shared.policy is not None:
            call = jax.checkpoint(call, policy=shared.policy, prevent_cse=not looped)
        return call(params, x, cache, inputs)

    def without_axis(tree: Any, total: int) -> Any:
        return jax.tree.map(lambda leaf: leaf[0], tree) if total == 1 else tree

    stacks = {name: without_axis(stack, names.count(name)) for name, stack in stacks.items()}
    slices = stacks, without_axis(inputs, len(layers))
    (x, _), records = _run(apply, layers, (x, kept), slices, shared.unroll, looped=False)
    return x, records
