"""Decoder-only transformer as a Flax Linen module, for all families of `model/families`.

A family sets switches of `DecoderConfig`. Training scans one `Block` over stacked layers;
`inference.py` applies it layer by layer.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.traverse_util import unflatten_dict
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int

from dapo_jax.model.blockwise_attention import ATTENTION_RESIDUALS
from dapo_jax.model.experts import RECORDS, Experts
from dapo_jax.model.layers import ACTIVATIONS, Adapters, OffsetNorm, look_up, named, projection
from dapo_jax.model.rotary import RopeScaling, query_growth, rope_frequencies, rotate
from dapo_jax.model.training_attention import TRAINING_ATTENTION, AttentionOptions, Context, Window
from dapo_jax.runtime.registry import feature
from dapo_jax.runtime.sharding import constrain

LAYER_INPUT = "layer_input"
REMAT_POLICIES = {
    "full": jax.checkpoint_policies.nothing_saveable,
    "dots": jax.checkpoint_policies.save_from_both_policies(
        jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
        jax.checkpoint_policies.save_only_these_names(ATTENTION_RESIDUALS),
    ),
    "attention": jax.checkpoint_policies.save_only_these_names(ATTENTION_RESIDUALS),
    "offload": jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=[LAYER_INPUT],
        offload_src="device",
        offload_dst="pinned_host",
    ),
}


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """Shape of a decoder (from config.json) and its numerics (from settings).

    It is flat, since each field is one switch of the computation and a key of compiled programs.
    """

    # Sizes
    vocab: int
    layers: int
    embed: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    family: str = "qwen2"  # `model_type` of config.json, one of `family_names`
    # Rotations and windows
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    window: int | None = None  # tokens that a token of a sliding layer sees, itself included
    sliding: tuple[bool, ...] = ()  # for each layer; empty: all slide if there is a window
    sliding_rope_theta: float | None = None  # separate base of sliding layers
    rotated: tuple[bool, ...] = ()  # for each layer, whether it rotates; empty: all do
    rotary_dim: int | None = None  # first dimensions of a head that rotate; None: all
    # Norms, embeddings, projections and attention
    norm_eps: float = 1e-6
    tie_embeddings: bool = True
    qkv_bias: bool = True
    out_bias: bool = False  # in the attention's last projection
    mlp_bias: bool = False
    sinks: bool = False  # each head adds a learned logit to its softmax's sum
    qk_norm: bool = False  # an RMS norm of each head's query and key before rotation
    whole_qk_norm: bool = False  # that norm is over all heads together
    in_norms: bool = True  # norms of the inputs of attention and MLP
    out_norms: bool = False  # norms of the outputs of attention and MLP too
    norm_offset: bool = False  # norms multiply by 1 + scale
    query_scalar: int | None = None  # scores are divided by its root; None: head_dim
    scale_embeddings: bool = False  # by the root of `embed`
    activation: str = "silu"  # a key of ACTIVATIONS
    output_gate: bool = False  # the query projection also gives gates of the attention's output
    # Gated delta-net layers
    recurrent: tuple[bool, ...] = ()  # for each layer, whether it is one; empty: none is
    delta_key_heads: int = 0
    delta_value_heads: int = 0
    delta_key_dim: int = 0
    delta_value_dim: int = 0
    delta_kernel: int = 0  # tokens that the convolution covers
    delta_fused: bool = False  # one projection gives queries, keys, values and gates
    logit_cap: float | None = None  # logits x become cap tanh(x / cap)
    # Layers with attention of several shapes (Gemma 4)
    full_head_dim: int | None = None  # of layers that don't slide; None: all layers are alike
    full_kv_heads: int | None = None  # of layers that don't slide; None: `kv_heads`
    keys_as_values: bool = False  # layers that don't slide take keys before their norm as values
    value_norm: bool = False  # an RMS norm of each head's value, without a scale
    sharing_layers: int = 0  # last layers with the keys and values of the last one before of a kind
    shares_keys: bool = False  # set by `of_layer`: all layers are such layers
    wide_sharing_mlp: bool = False  # the MLPs of these layers are twice as wide
    layer_inputs: int = 0  # width of inputs that each layer has besides the residual stream
    multiplied: bool = False  # each layer's output is multiplied by a fixed number
    # Mixture of experts
    experts: int = 0  # MLPs of width `mlp` in each layer; 0: one MLP that all tokens take
    experts_per_token: int = 0
    normalise_experts: bool = False  # the weights of a token's experts add up to one
    expert_bias: bool = False  # in the router and in every expert's matrices
    shared_mlp: int = 0  # width of a gated MLP that all tokens take beside their experts
    # Numerics and training
    dtype: Any = jnp.float32
    attention: str = "plain"  # a key of TRAINING_ATTENTION
    remat: str = "none"
    scan_unroll: int = 1  # layers per iteration of the training scan
    frozen_layers: int = 0  # number of first layers, in the subtree `frozen_layers`
    adapters: Adapters | None = None  # if set, only they are trained
    records_routes: bool = False  # decoding records the experts that tokens take
    int8_products: bool = False  # round the inputs of int8 matrices too
    scalar_head: bool = False  # a scalar per token instead of logits: critics, reward models

    @property
    def active_mlp(self) -> int:
        """Total width of the MLPs that a token takes."""
        return self.shared_mlp + self.mlp * (self.experts_per_token if self.experts else 1)

    @property
    def is_recurrent(self) -> bool:
        """True for the decoder of one gated delta-net layer, as `of_layer` returns it."""
        return self.recurrent == (True,)

    @property
    def mixes_layers(self) -> bool:
        """True if layers have several shapes, each with a stack of parameters."""
        return bool(self.recurrent) or self.full_head_dim is not None

    def of_layer(self, number: int) -> "DecoderConfig":
        """Return the config of a decoder with all layers like this one."""
        layer = self.all_sliding(self.sliding[number]) if self.sliding else self
        flags = {"rotated": self.rotated, "recurrent": self.recurrent}
        changes: dict[str, Any] = {
            name: (values[number],) for name, values in flags.items() if values
        }
        if self.full_head_dim is not None:
            changes |= {"full_head_dim": None, "sharing_layers": 0}
            if layer.window is None:
                changes["head_dim"] = self.full_head_dim
                changes["kv_heads"] = self.full_kv_heads or self.kv_heads
            else:
                changes["keys_as_values"] = False
            if number >= self.cached_layers:
                changes |= {"shares_keys": True, "mlp": self.mlp * (1 + self.wide_sharing_mlp)}
        return dataclasses.replace(layer, **changes) if changes else layer

    @property
    def each_layer(self) -> list["DecoderConfig"]:
        """Configs by `of_layer`, first layer first."""
        return [self.of_layer(number) for number in range(self.layers)]

    @property
    def cached_layers(self) -> int:
        """Number of first layers that have a cache, of keys and values or of a state."""
        return self.layers - self.sharing_layers

    def cache_of(self, number: int) -> int:
        """Return the number of the layer that computes the keys and values of layer `number`."""
        kinds = self.sliding or (False,) * self.layers
        same_kind = (i for i in range(self.cached_layers) if kinds[i] == kinds[number])
        return number if number < self.cached_layers else max(same_kind)

    @property
    def reaches(self) -> list[int | None]:
        """Tokens that each layer with a cache sees through its window; None: all."""
        return [layer.window for layer in self.each_layer[: self.cached_layers]]

    def all_sliding(self, slides: bool) -> "DecoderConfig":
        """Return the config of a decoder with only sliding or only full layers."""
        changes: dict[str, Any] = {"sliding": (), "sliding_rope_theta": None}
        if not slides:
            changes["window"] = None
        elif self.sliding_rope_theta is not None:
            changes |= {"rope_theta": self.sliding_rope_theta, "rope_scaling": None}
        return dataclasses.replace(self, **changes)


def rms_norm(config: DecoderConfig, name: str | None = None) -> nn.RMSNorm | OffsetNorm:
    """Return an RMS norm with float32 statistics in every compute dtype."""
    if config.norm_offset:
        return OffsetNorm(config.norm_eps, config.dtype, name=name)
    scale = named(nn.initializers.ones, ("norm",))
    return nn.RMSNorm(config.norm_eps, dtype=config.dtype, scale_init=scale, name=name)


def _kind_rotation(config: DecoderConfig, slides: Bool[Array, ""] | None) -> tuple[Any, Any]:
    """Return frequencies and the factor of rotated vectors; `slides` is set if layers differ."""

    def of(kind: DecoderConfig) -> tuple[Any, float]:
        scaling, width = kind.rope_scaling, kind.rotary_dim or kind.head_dim
        factor = 1.0 if scaling is None else scaling.attention_factor
        return rope_frequencies(kind.rope_theta, width, scaling), factor

    if slides is None or config.sliding_rope_theta is None:
        return of(config)
    (full, factor), (sliding, sliding_factor) = (of(config.all_sliding(s)) for s in (False, True))
    if factor != sliding_factor:
        factor = jnp.where(slides, sliding_factor, factor)
    return jnp.where(slides, sliding, full), factor


def _rotation(config: DecoderConfig, slides: Any, rotates: Any) -> tuple[Any, Any]:
    """Return `_kind_rotation`, or for a layer without rotations frequencies of 0 and factor 1."""
    frequencies, factor = _kind_rotation(config, slides)
    if config.rotated:
        rotates = config.rotated[0] if rotates is None else rotates
        frequencies, factor = jnp.where(rotates, frequencies, 0.0), jnp.where(rotates, factor, 1.0)
    return frequencies, factor


class Block(nn.Module):
    """Transformer layer: attention and gated MLP with RMS norms around them.

    With `in_norms` each has a norm before it, with `out_norms` one after it.
    """

    config: DecoderConfig
    attend: Callable  # see model/training_attention.py and model/decode_attention.py

    def _heads(self, name: str, count: int, axis: str, parts: int = 1):
        features, axes = (count, parts * self.config.head_dim), ("embed", axis, "head_dim")
        return projection(self.config, name, features, axes, use_bias=self.config.qkv_bias)

    def _whole(self, name: str, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """Return the input of projections, normed and no longer sharded by length over tensor."""
        normed = rms_norm(self.config, name)(x) if self.config.in_norms else x
        return constrain(normed, "batch", "sequence", None)

    def _head_norm(self, name: str, x: Float[Array, "B T H E"]) -> Float[Array, "B T H E"]:
        together = x.reshape(*x.shape[:2], -1) if self.config.whole_qk_norm else x
        return rms_norm(self.config, name)(together).reshape(x.shape)

    def _add(self, x: Float[Array, "B T D"], more: Float[Array, "B T D"]):
        """Return the residual stream after an addition, sharded by length again.

        `more` is constrained to the sharding inside the block first. Otherwise its gradient, which
        has that sharding, would be gathered over the batch too.
        """
        return constrain(x + constrain(more, "batch", "sequence", None), "batch", "length", None)

    def _rotated(self, queries: Array, keys: Any, positions: Int[Array, "B T"], kind: tuple):
        c = self.config
        frequencies, factor = _rotation(c, *kind)
        query_factor = factor
        if c.query_scalar is not None:  # attention divides by the root of head_dim
            query_factor *= (c.head_dim / c.query_scalar) ** 0.5
        if c.rope_scaling is not None and c.rope_scaling.query_growth:
            query_factor *= query_growth(positions, c.rope_scaling)
        queries = rotate(queries, positions, frequencies, query_factor)
        return queries, None if keys is None else rotate(keys, positions, frequencies, factor)

    def _keys_and_values(self, h: Float[Array, "B T D"]) -> tuple[Any, Any]:
        """Return normed keys and values; None if the layer reads those of another layer."""
        c = self.config
        if c.shares_keys:
            return None, None
        keys = self._heads("key", c.kv_heads, "kv_heads")(h)
        values = keys if c.keys_as_values else self._heads("value", c.kv_heads, "kv_heads")(h)
        if c.qk_norm:
            keys = self._head_norm("key_norm", keys)
        if c.value_norm:
            values = nn.RMSNorm(c.norm_eps, dtype=c.dtype, use_scale=False)(values)
        return keys, values

    def _add_input(self, x: Float[Array, "B T D"], layer_input: Any) -> Float[Array, "B T D"]:
        """Return the residual stream after adding the layer's input, gated by the stream."""
        c = self.config
        whole, layer_input = (constrain(a, "batch", "sequence", None) for a in (x, layer_input))
        gate = projection(c, "input_gate", (c.layer_inputs,), ("embed", "norm"))(whole)
        gated = ACTIVATIONS[c.activation](gate, layer_input)
        more = projection(c, "input_out", (c.embed,), ("norm", "embed"))(gated)
        return self._add(x, rms_norm(c, "input_out_norm")(more))

    def _mlp(self, h: Float[Array, "B T D"], width: int, prefix: str = "") -> Array:
        c = self.config

        def linear(name: str, features: int, axes: tuple[str, str]):
            options = {"target": name, "use_bias": c.mlp_bias}
            return projection(c, prefix + name, (features,), axes, **options)

        gate = linear("gate", width, ("embed", "mlp"))(h)
        up = linear("up", width, ("embed", "mlp"))(h)
        product = constrain(ACTIVATIONS[c.activation](gate, up), "batch", "sequence", "mlp")
        return linear("down", c.embed, ("mlp", "embed"))(product)

    def _experts(self, h: Float[Array, "B T D"], context: Any, routes: Any) -> Array:
        c = self.config
        mixed = Experts(c, name="moe")(h, context, routes)
        if not c.shared_mlp:
            return mixed
        gate = projection(c, "shared_router", (1,), ("embed", "norm"))(h)
        return mixed + nn.sigmoid(gate) * self._mlp(h, c.shared_mlp, "shared_")

    def _attention(self, h: Float[Array, "B T D"], context: Any, cache: Any, slides, rotates):
        """Return output and cache of the layer's attention."""
        c = self.config
        queries = self._heads("query", c.heads, "heads", 1 + c.output_gate)(h)
        queries, gates = queries[..., : c.head_dim], queries[..., c.head_dim :]
        keys, values = self._keys_and_values(h)
        if c.qk_norm:
            queries = self._head_norm("query_norm", queries)
        queries, keys = self._rotated(queries, keys, context.positions, (slides, rotates))
        window = None if c.window is None else Window(c.window, slides)
        sinks = None
        if c.sinks:
            sinks = self.param("sinks", named(nn.initializers.zeros, ("heads",)), (c.heads,))
        mixed, cache = self.attend(
            queries, keys, values, context, cache, AttentionOptions(window, sinks)
        )
        if c.output_gate:
            mixed *= nn.sigmoid(gates)
        mixed = constrain(mixed, "batch", "sequence", "heads", None)
        axes = ("heads", "head_dim", "embed")
        linear = projection(c, "out", (c.embed,), axes, contracted=2, use_bias=c.out_bias)
        return linear(mixed), cache

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "B T D"],
        context: Any,
        cache: Any,
        slides: Bool[Array, ""] | None = None,  # whether this layer slides, if layers differ
        routes: Int[Array, "B T k"] | None = None,  # experts to take; None: the likeliest
        rotates: Bool[Array, ""] | None = None,  # whether this layer rotates, if layers differ
        layer_input: Float[Array, "B T P"] | None = None,  # if the config has `layer_inputs`
    ):
        """Return output and cache of the layer."""
        c = self.config
        x = checkpoint_name(x, LAYER_INPUT)
        h = self._whole("attention_norm", x)
        if c.is_recurrent:
            out, cache = feature("delta_net").GatedDeltaNet(c, name="delta")(h, context, cache)
        else:
            out, cache = self._attention(h, context, cache, slides, rotates)
        x = self._add(x, rms_norm(c, "attention_out_norm")(out) if c.out_norms else out)
        h = self._whole("mlp_norm", x)
        down = self._experts(h, context, routes) if c.experts else self._mlp(h, c.mlp)
        x = self._add(x, rms_norm(c, "mlp_out_norm")(down) if c.out_norms else down)
        if c.layer_inputs:
            x = self._add_input(x, layer_input)
        if c.multiplied:  # not trained, as published
            multiplier = self.param("multiplier", named(nn.initializers.ones, ("norm",)), (1,))
            x *= jax.lax.stop_gradient(multiplier).astype(x.dtype)
        return x, cache


def stack_of(config: DecoderConfig, number: int) -> str:
    """Return the name of the stack that holds a layer's parameters."""
    if config.recurrent and config.recurrent[number]:
        return "delta_layers"
    if config.full_head_dim is None:
        return "frozen_layers" if number < config.frozen_layers else "layers"
    layer = config.of_layer(number)
    return "sharing_" * layer.shares_keys + "full_" * (layer.window is None) + "layers"


def layer_stacks(config: DecoderConfig) -> dict[str, list[int]]:
    """Return the numbers of the layers in each stack of a parameter tree."""
    stacks: dict[str, list[int]] = {}
    for number in range(config.layers):
        stacks.setdefault(stack_of(config, number), []).append(number)
    return stacks


def scaled_embeddings(x: Float[Array, "... D"], config: DecoderConfig) -> Float[Array, "... D"]:
    """Return embeddings as the first layer takes them; the factor is rounded to their dtype."""
    return x * jnp.asarray(config.embed**0.5, x.dtype) if config.scale_embeddings else x


class Decoder(nn.Module):
    """Decoder from tokens of packed rows to final hidden states.

    `model.logprobs` applies the output head.
    """

    config: DecoderConfig

    @nn.compact
    def __call__(
        self,
        tokens: Int[Array, "R T"],
        segment_ids: Int[Array, "R T"],
        positions: Int[Array, "R T"],
        routes: Int[Array, "R T L k"] | None = None,
        prompt_ids: Int[Array, "R T"] | None = None,
    ) -> Float[Array, "R T D"]:
        """Return final hidden states; `model.logprobs.Rows` describes the arguments."""
        c = self.config
        init = named(nn.initializers.normal(0.02), ("vocab", "embed"))
        embedding = self.param("embedding", init, (c.vocab, c.embed))
        if c.scalar_head:
            init = named(nn.initializers.zeros, ("embed",))
            self.param("score", init, (c.embed,))
        elif not c.tie_embeddings:
            init = named(nn.initializers.normal(0.02), ("embed", "vocab"))
            self.param("head", init, (c.embed, c.vocab))
        x = scaled_embeddings(look_up(embedding, tokens, c.dtype), c)
        x = constrain(x, "batch", "length", None)
        context = Context(positions, segment_ids, prompt_ids)
        if c.mixes_layers:
            return rms_norm(c, name="final_norm")(self._mixed(x, tokens, context, routes))
        block = Block
        if c.remat != "none":
            block = nn.remat(Block, policy=REMAT_POLICIES[c.remat], prevent_cse=False)
        # Axes of context, cache, slides, routes and rotates.
        axes = (nn.broadcast, nn.broadcast, 0, 0, 0)
        by_layer = None if routes is None else jnp.moveaxis(routes, 2, 0)
        stacked = dict.fromkeys(("params", *RECORDS), 0)
        for name, numbers in layer_stacks(c).items():
            length, part = len(numbers), slice(numbers[0], numbers[-1] + 1)
            values = None if by_layer is None else by_layer[part]
            slides, rotates = (
                jnp.asarray(flags[part]) if flags else None for flags in (c.sliding, c.rotated)
            )
            layers = nn.scan(
                block,
                variable_axes=stacked,  # pyright: ignore[reportArgumentType]: invariant keys
                split_rngs={"params": True},
                in_axes=axes,  # pyright: ignore[reportArgumentType]: declared as an int
                length=length,
                unroll=min(c.scan_unroll, length),
                metadata_params={nn.PARTITION_NAME: "layers"},
            )(c, TRAINING_ATTENTION[c.attention], name=name)
            x, _ = layers(x, context, None, slides, values, rotates)
        return rms_norm(c, name="final_norm")(x)

    def _mixed(self, x: Float[Array, "R T D"], tokens: Array, context: Context, routes: Any):
        """Return the output of layers of several shapes."""
        c, starts = self.config, self.is_initializing()
        block = functools.partial(Block, parent=None)
        inputs = {} if routes is None else {"routes": jnp.moveaxis(routes, 2, 0)}
        if c.layer_inputs:
            LayerInputs = feature("mixed_layers").LayerInputs
            inputs["layer_input"] = LayerInputs(c, name="layer_inputs")(tokens, x)
        stacks, mixed = {}, feature("mixed_layers")
        for name, numbers in layer_stacks(c).items():
            init = functools.partial(mixed.init_stack, block, c.of_layer(numbers[0]), len(numbers))
            # At `apply`, `self.param` would trace `init` again, inside of the mesh.
            stacks[name] = self.param(name, init) if starts else self.get_variable("params", name)
        layers = [(stack_of(c, number), c.of_layer(number)) for number in range(c.layers)]
        record = [r for r in RECORDS if not starts and self.is_mutable_collection(r)]
        shared = mixed.Pass(context, REMAT_POLICIES.get(c.remat), c.scan_unroll, record)
        x, records = mixed.run_stacks(block, layers, stacks, x, inputs, shared)
        for name in record:
            self.put_variable(name, "layers", records[name])
        return x


def init_params(config: DecoderConfig, key: jax.Array) -> Any:
    """Return random float32 parameters, each boxed with its logical axis names."""
    ids = jnp.zeros((1, 1), jnp.int32)
    return Decoder(config).init(key, ids, ids, ids)["params"]


@functools.lru_cache(maxsize=16)  # called some eight times at start; tracing is slow
def abstract_params(config: DecoderConfig) -> Any:
    """Return shapes and logical axis names of the parameters without computing them."""
    return jax.eval_shape(lambda: init_params(config, jax.random.key(0)))


def head_kernel(params: Any) -> Float[Array, "D V"]:
    """Return the matrix of the output head; if tied, the transposed embedding."""
    return params["head"] if "head" in params else params["embedding"].T


def layer_paths(path: str, config: DecoderConfig) -> list[str]:
    """Return the decoding paths of a stack's layers; the path itself outside layers."""
    stack, _, below = path.partition("/")
    numbers = layer_stacks(config).get(stack)
    return [path] if numbers is None else [f"layers/{number}/{below}" for number in numbers]


def for_decoding(flat: Mapping[str, Array | jax.ShapeDtypeStruct], config: DecoderConfig) -> Any:
    """Return the parameter tree for decoding: `layers` is a tuple of one tree per layer."""
    tree = unflatten_dict(flat, sep="/")
    return tree | {"layers": tuple(tree["layers"][str(i)] for i in range(config.layers))}
