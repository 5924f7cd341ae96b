"""Mixture of experts: each token takes the gated MLPs with the highest logits; none is dropped.

Tokens are sorted by expert and multiplied in groups, so no array has an entry for each pair of
token and expert. On a mesh each device computes its own experts: tokens are gathered over the mesh
axis that cuts experts, and the weighted sums are scattered back.

Routes are the experts that tokens took. One pass can record them and another one replay them.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dapo_jax.model.grouped_products import grouped_product
from dapo_jax.model.layers import ACTIVATIONS, ADAPTER_NAMES, BIAS, SCALE, Adapters, named
from dapo_jax.runtime import sharding

NAMES = ("expert_gate", "expert_up", "expert_down")  # parameters with one matrix per expert
# Flax collections of the fields of RouterRecords, also names of metrics. A layer fills the
# collections that its caller requests.
ROUTES = "routes"
REPLACED = "replaced_routes"
BALANCE = "router_balance"
RECORDS = (ROUTES, REPLACED, BALANCE)


class RouterRecords(NamedTuple):
    """Decisions of all routers in a forward pass; None if they were not requested."""

    routes: Int[Array, "R T L k"] | None = None  # numbers of experts
    replaced: Float[Array, "L R T"] | None = None  # fraction of replayed experts not its own choice
    balance: Float[Array, "L R T"] | None = None  # probabilities times load; 1 if that is even


def route_dtype(experts: int) -> Any:
    """Return the smallest integer type for numbers of experts, and -1 for unknown routes."""
    return jnp.int8 if experts <= 128 else jnp.int16


def route(
    logits: Float[Array, "B T X"],
    count: int,
    normalise: bool,
    replayed: Int[Array, "B T k"] | None = None,  # experts to take; -1 means the likeliest
) -> tuple[Float[Array, "B T k"], Int[Array, "B T k"], Int[Array, "B T k"]]:
    """Return weights (float32) and numbers of each token's experts, and its `count` likeliest."""
    probabilities = jax.nn.softmax(logits, axis=-1)
    weights, likeliest = jax.lax.top_k(probabilities, count)
    chosen = likeliest
    if replayed is not None:
        chosen = jnp.where(replayed < 0, likeliest, replayed)
        weights = jnp.take_along_axis(probabilities, chosen, axis=-1)
    if normalise:
        weights /= weights.sum(axis=-1, keepdims=True)
    return weights, chosen, likeliest


def _balance(
    logits: Float[Array, "B T X"], chosen: Int[Array, "B T k"], copies: Float[Array, "B T"]
) -> Float[Array, "B T"]:
    """Return the sum of a token's probabilities times the relative loads of the experts.

    Its mean over tokens is the load-balance loss of Switch Transformers (2101.03961, equation 4);
    loads have no gradient.
    """
    experts = logits.shape[-1]
    counts = jnp.broadcast_to(copies[..., None], chosen.shape)
    loads = jnp.zeros(experts).at[chosen.reshape(-1)].add(counts.reshape(-1))
    relative = loads * experts / jnp.maximum(loads.sum(), 1.0)
    return jax.nn.softmax(logits, axis=-1) @ relative


def _grouped(
    rows: Float[Array, "n I"], matrices: dict[str, Array], name: str, sizes: Array, group: Array
) -> Float[Array, "n O"]:
    """Return the product of sorted rows with the matrices of their experts."""
    product = grouped_product(rows, matrices[name].astype(rows.dtype), sizes)
    scale, bias = matrices.get(name + SCALE), matrices.get(name + BIAS)
    own = jnp.minimum(group, len(sizes) - 1)
    if scale is not None:
        product = (product * scale[own]).astype(rows.dtype)
    if name + ADAPTER_NAMES[0] in matrices:
        for part in ADAPTER_NAMES:
            rows = grouped_product(rows, matrices[name + part].astype(rows.dtype), sizes)
        product += rows
    return product if bias is None else product + bias.astype(product.dtype)[own]


def mix(
    x: Float[Array, "N D"],
    weights: Float[Array, "N k"],
    chosen: Int[Array, "N k"],
    matrices: dict[str, Array],
    activation: Callable,  # function of gate and up, as in ACTIVATIONS
    first: Array | int = 0,
) -> Float[Array, "N D"]:
    """Return the weighted sum of each token's experts with numbers from `first` in `matrices`."""
    (tokens, per_token), count = chosen.shape, matrices[NAMES[0]].shape[0]
    local = chosen.reshape(-1) - first
    local = jnp.where((local >= 0) & (local < count), local, count)  # `count`: another device's
    order = jnp.argsort(local, stable=True)
    group = local[order]
    sizes = jnp.bincount(local, length=count).astype(jnp.int32)
    rows = x[order // per_token]
    gate, up = (_grouped(rows, matrices, name, sizes, group) for name in NAMES[:2])
    out = _grouped(activation(gate, up), matrices, NAMES[2], sizes, group)
    # Rows past the groups belong to other devices; kernels leave them undefined.
    out = jnp.where((group < count)[:, None], out, 0)
    back = out[jnp.argsort(order)].reshape(tokens, per_token, -1)
    return jnp.sum(back * weights[:, :, None], axis=1).astype(x.dtype)


def _mix_on_mesh(x, weights, chosen, matrices: dict[str, Array], activation: Callable) -> Array:
    """Return the weighted sums of the experts of all devices; arrays are [B, T, ...]."""

    def flat(x, weights, chosen, matrices, first):
        by_token = (array.reshape(-1, array.shape[-1]) for array in (x, weights, chosen))
        tokens, weights, chosen = by_token
        return mix(tokens, weights, chosen, matrices, activation, first).reshape(x.shape)

    if sharding.active_mesh() is None:
        return flat(x, weights, chosen, matrices, 0)
    rows = sharding.dividing_spec(x.shape, "batch", "sequence", None)
    names = {name: ("experts", None, "mlp") for name in NAMES[:2]}
    names |= {NAMES[2]: ("experts", "mlp", None)}
    down, up = ADAPTER_NAMES
    for name, (experts, inner, outer) in list(names.items()):
        names |= {name + SCALE: (experts, outer), name + BIAS: (experts, outer)}
        names |= {name + down: (experts, inner, None), name + up: (experts, None, outer)}
    specs = {
        name: sharding.dividing_spec(array.shape, *names[name]) for name, array in matrices.items()
    }
    expert_axes, mlp_axes = (sharding.entry_axes(specs[NAMES[0]][i]) for i in (0, 2))
    shared = tuple(axis for axis in expert_axes if axis in sharding.entry_axes(rows[0]))
    rest = tuple(axis for axis in expert_axes if axis not in shared) + mlp_axes

    def on_device(x, weights, chosen, matrices):
        first: Array | int = 0
        last = NAMES[2] + BIAS
        if mlp_axes and last in matrices:  # all parts of `mlp` are summed: add the bias once
            once = jax.lax.axis_index(mlp_axes) == 0
            matrices = matrices | {last: jnp.where(once, matrices[last], 0)}
        if expert_axes:
            first = jax.lax.axis_index(expert_axes) * matrices[NAMES[0]].shape[0]
        if shared:
            x, weights, chosen = (
                jax.lax.all_gather(array, shared, tiled=True) for array in (x, weights, chosen)
            )
        mixed = flat(x, weights, chosen, matrices, first)
        if shared:
            mixed = jax.lax.psum_scatter(mixed, shared, tiled=True)
        return jax.lax.psum(mixed, rest) if rest else mixed

    return jax.shard_map(
        on_device, in_specs=(rows, rows, rows, specs), out_specs=rows, check_vma=False
    )(x, weights, chosen, matrices)


class Experts(nn.Module):
    """Router and experts of a layer, in place of its MLP."""

    config: Any  # DecoderConfig with `experts` matrices of width `mlp`

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "B T D"],
        context: Any = None,
        replayed: Int[Array, "B T k"] | None = None,
    ) -> Float[Array, "B T D"]:
        """Return the weighted sum of each token's experts: likeliest or `replayed` ones."""
        c = self.config
        router = self._matrix("router", (c.embed, c.experts), ("embed", None), c.embed)
        kernel, bias = router["router"].astype(c.dtype), router.get("router" + BIAS)
        logits = jnp.dot(x, kernel, preferred_element_type=jnp.float32)
        if bias is not None:
            logits += bias.astype(c.dtype).astype(jnp.float32)
        weights, chosen, likeliest = route(
            logits, c.experts_per_token, c.normalise_experts, replayed
        )
        self._record(ROUTES, lambda: chosen.astype(route_dtype(c.experts)))
        same = chosen[..., :, None] == likeliest[..., None, :]
        self._record(REPLACED, lambda: 1.0 - same.any(axis=-1).mean(axis=-1))
        self._record(BALANCE, lambda: _balance(logits, chosen, context.copies()))
        inward = ("experts", "expert_embed", "mlp")
        outward = ("experts", "mlp", "expert_embed")
        matrices: dict[str, Array] = {}
        for name in NAMES[:2]:
            matrices |= self._matrix(name, (c.experts, c.embed, c.mlp), inward, c.embed)
        matrices |= self._matrix(NAMES[2], (c.experts, c.mlp, c.embed), outward, c.mlp)
        return _mix_on_mesh(x, weights, chosen, matrices, ACTIVATIONS[c.activation])

    def _record(self, name: str, value: Callable[[], Array]) -> None:
        if self.is_mutable_collection(name) and not self.is_initializing():
            self.variable(name, "layer", value)

    def _matrix(
        self, name: str, shape: tuple[int, ...], axes: tuple[str | None, ...], summed: int
    ) -> dict[str, Array]:
        """Return the kernel of that name, and its scale, bias and adapters if it has them."""
        adapters = self.config.adapters
        if adapters and name.removeprefix("expert_") not in adapters.targets:
            adapters = None
        kernel = _Kernel(shape, axes, summed, adapters, self.config.expert_bias, name=name)
        return {name + suffix: array for suffix, array in kernel().items()}


class _Kernel(nn.Module):
    """Kernel of a router or of experts below its own name, as in linear layers."""

    shape: tuple[int, ...]
    axes: tuple[Any, ...]
    summed: int
    adapters: Adapters | None
    use_bias: bool

    @nn.compact
    def __call__(self) -> dict[str, Array]:
        """Return kernel (key ""), scale (SCALE), bias (BIAS) and adapters (their names)."""
        init = named(nn.initializers.normal(self.summed**-0.5), self.axes)
        arrays = {"": self.param("kernel", init, self.shape)}
        if self.has_variable("params", "kernel" + SCALE):
            arrays[SCALE] = self.get_variable("params", "kernel" + SCALE)
        if self.use_bias:
            *experts, _, outer = range(len(self.shape))
            axes = tuple(self.axes[i] for i in (*experts, outer))
            shape = tuple(self.shape[i] for i in (*experts, outer))
            arrays[BIAS] = self.param("bias", named(nn.initializers.zeros, axes), shape)
        if self.adapters:
            (down, up), rank = ADAPTER_NAMES, self.adapters.rank
            experts, inner, outer = self.axes
            init = named(nn.initializers.normal(self.summed**-0.5), (experts, inner, "rank"))
            arrays[down] = self.param(down, init, (*self.shape[:2], rank))
            init = named(nn.initializers.zeros, (experts, "rank", outer))
            matrix = self.param(up, init, (self.shape[0], rank, self.shape[2]))
            arrays[up] = self.adapters.scale * matrix
        return arrays
