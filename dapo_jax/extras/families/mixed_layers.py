"""Layers of several shapes, in training: a stack of parameters for each kind; inputs of layers.

Layers repeat in periods (Gemma 4: five that slide and a full one; Qwen3.5: three gated delta-net
layers and one with attention). A scan iterates over periods, and in it one over each run of equal
layers. Layers that share keys and values read those of the last layer of their kind before them.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dapo_jax.model.layers import look_up, named, projection
from dapo_jax.model.training_attention import CAUSAL, TRAINING_ATTENTION, AttentionOptions, Context
from dapo_jax.runtime import sharding

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


def periods(names: Sequence[str]) -> list[tuple[list[tuple[str, int]], int]]:
    """Return periods, each of runs of layers (name, length), and how often each repeats.

    In a period no name occurs twice, so that its layers are next to each other in their stack.
    """
    runs, found = [(name, len([*same])) for name, same in itertools.groupby(names)], []
    while runs:
        period, most = runs[:1], 1
        for length in range(2, len(runs) // 2 + 1):
            candidate, count = runs[:length], 1
            while runs[count * length :][:length] == candidate:
                count += 1
            is_distinct = len({name for name, _ in candidate}) == length
            if is_distinct and count > 1 and count * length > most * len(period):
                period, most = candidate, count
        found.append((period, most))
        runs = runs[most * len(period) :]
    return found


def _cut(tree: Any, first: int, *axes: int) -> Any:
    """Return the leaves from `first` on, with these sizes as their first axes."""
    total = math.prod(axes)
    return jax.tree.map(
        lambda leaf: leaf[first : first + total].reshape(*axes, *leaf.shape[1:]), tree
    )


def run_stacks(
    make_block: Callable,
    layers: Sequence[tuple[str, Any]],  # stack and config of each layer
    stacks: dict[str, Any],
    x: Float[Array, "R T D"],
    inputs: dict[str, Array],  # further arguments of all layers [L, ...]
    shared: Pass,
) -> tuple[Float[Array, "R T D"], dict[str, Any]]:
    """Return the residual stream after all layers, and the records of all layers [L, ...]."""
    names, configs, kept = [name for name, _ in layers], dict(layers), {}
    if shares := any(name.startswith(SHARING) for name in names):
        for name, layer in layers:  # keys and values of the last layer of each stack
            row = jnp.zeros((*x.shape[:2], layer.kv_heads, layer.head_dim), x.dtype)
            kept.setdefault(name.removeprefix(SHARING), (row, row))

    def run_equal(name: str, x: Array, kept: dict[str, Any], slices: Any, alone: bool) -> Any:
        """Run layers of a stack; their slices are [layers, ...]. No loop is left of one alone."""
        attend = TRAINING_ATTENTION[configs[name].attention]
        block = make_block(configs[name], _attend_kept(attend) if shares else attend)
        source = name.removeprefix(SHARING)

        def call(params: Any, x: Array, cache: Any, inputs: dict[str, Array]) -> Any:
            arguments = {"params": params}, x, shared.context, cache
            return block.apply(*arguments, mutable=list(shared.record), **inputs)

        if shared.policy is not None:
            call = jax.checkpoint(call, policy=shared.policy, prevent_cse=alone)

        def step(carry: tuple[Array, Any], slices: tuple[Any, dict[str, Array]]) -> Any:
            x, row = carry
            return call(slices[0], x, row if name != source else None, slices[1])

        (x, row), records = jax.lax.scan(step, (x, kept.get(source)), slices, unroll=shared.unroll)
        return x, kept | ({source: row} if shares else {}), records

    records, done, first = [], dict.fromkeys(names, 0), 0
    for period, count in periods(names):
        length = sum(number for _, number in period)
        params = [_cut(stacks[name], done[name], count, number) for name, number in period]
        done |= {name: done[name] + count * number for name, number in period}
        slices, first = (params, _cut(inputs, first, count, length)), first + count * length

        def step(carry: Any, slices: Any, period: Any = period, count: int = count) -> Any:
            (x, kept), start, parts = carry, 0, []
            for (name, number), stack in zip(period, slices[0], strict=True):
                layers = stack, _cut(slices[1], start, number)
                x, kept, record = run_equal(name, x, kept, layers, count == number == 1)
                start, parts = start + number, [*parts, record]
            return (x, kept), jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *parts)

        number = max(1, shared.unroll // length)
        (x, kept), record = jax.lax.scan(step, (x, kept), slices, unroll=number)
        records.append(jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), record))
    return x, jax.tree.map(lambda *parts: jnp.concatenate(parts), *records)


class LayerInputs(nn.Module):
    """Inputs as in Gemma 4: (norm(projection of x) + embedding of the token) / sqrt 2."""

    config: Any  # a `DecoderConfig`

    @nn.compact
    def __call__(
        self, tokens: Int[Array, "B T"], x: Float[Array, "B T D"], trains: bool = True
    ) -> Float[Array, "L B T P"]:
        """Return the inputs of all layers; x holds the scaled embeddings."""
        c = self.config
        width, shape = c.layers * c.layer_inputs, (*tokens.shape, c.layers, c.layer_inputs)
        init = named(nn.initializers.normal(0.02), ("vocab", "embed"))
        table = self.param("embedding", init, (c.vocab, width)).astype(c.dtype)
        own = look_up(table, tokens, c.dtype, is_wide=True) if trains else table[tokens]
        whole = sharding.constrain(x, "batch", "sequence", None)
        projected = projection(c, "projection", (width,), ("embed", "norm"))(whole)
        projected = (projected * jnp.asarray(c.embed**-0.5, c.dtype)).reshape(shape)
        scale = named(nn.initializers.ones, ("norm",))
        norm = nn.RMSNorm(c.norm_eps, dtype=c.dtype, scale_init=scale, name="norm")
        own = own.reshape(shape) * jnp.asarray(c.layer_inputs**0.5, c.dtype)
        inputs = (norm(projected) + own) * jnp.asarray(2**-0.5, c.dtype)
        return sharding.constrain(jnp.moveaxis(inputs, 2, 0), None, "batch", "length", None)
