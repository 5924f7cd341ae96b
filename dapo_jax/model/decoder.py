"""Decoder-only transformer as a Flax Linen module, for the families of model/families.py.

Families are switches of `DecoderConfig`. Training scans one `Block` over
stacked layers; `inference.py` applies the same `Block` layer by layer.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.traverse_util import unflatten_dict
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int

from dapo_jax.model.blockwise_attention import ATTENTION_RESIDUALS
from dapo_jax.model.rotary import RopeScaling, query_growth, rope_frequencies, rotate
from dapo_jax.model.training_attention import TRAINING_ATTENTION, Context, Window
from dapo_jax.runtime.sharding import constrain

ADAPTER_NAMES = ("lora_a", "lora_b")  # parameters beside the kernel that they add to
SCALE = "_scale"  # suffix of the parameter that holds an int8 matrix's scales

LAYER_INPUT = "layer_input"
REMAT_POLICIES = {
    "full": jax.checkpoint_policies.nothing_saveable,
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "attention": jax.checkpoint_policies.save_only_these_names(ATTENTION_RESIDUALS),
    "offload": jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=[LAYER_INPUT],
        offload_src="device",
        offload_dst="pinned_host",
    ),
}


@dataclasses.dataclass(frozen=True)
class Adapters:
    """Low-rank adapters of matrices: y = x W + scale (x A) B (LoRA, arXiv 2106.09685)."""

    rank: int
    scale: float  # alpha / rank
    targets: tuple[str, ...]  # names of projections


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """Shape and numerics of a decoder, from config.json of a model folder and from settings."""

    vocab: int
    layers: int
    embed: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    family: str = "qwen2"  # `model_type` of config.json, a row of model/families.py
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    window: int | None = None  # tokens that a token of a sliding layer sees, itself counted
    sliding: tuple[bool, ...] = ()  # of each layer; empty: all slide where there is a window
    norm_eps: float = 1e-6
    tie_embeddings: bool = True
    qkv_bias: bool = True
    out_bias: bool = False  # of the attention's last projection
    mlp_bias: bool = False
    qk_norm: bool = False  # an RMS norm over every head's query and key, before they are rotated
    dtype: Any = jnp.float32
    attention: str = "plain"  # a key of TRAINING_ATTENTION
    remat: str = "none"
    scan_unroll: int = 1  # layers per iteration of the training scan
    frozen_layers: int = 0  # number of first layers in the subtree `frozen_layers`
    adapters: Adapters | None = None  # if any, only they are trained (see model/trainable.py)
    scalar_head: bool = False  # one scalar per token instead of logits: critics, reward models

    def of_layer(self, number: int) -> "DecoderConfig":
        """Config of a decoder whose layers are all as this one."""
        return self._all_sliding(self.sliding[number]) if self.sliding else self

    def _all_sliding(self, slides: bool) -> "DecoderConfig":
        return dataclasses.replace(self, sliding=(), window=self.window if slides else None)

    def window_of(self, slides: Bool[Array, ""] | None) -> Window | None:
        """Window of a layer; `slides` is for configs whose layers differ."""
        return None if self.window is None else Window(self.window, slides)


def named(init: Callable, axes: tuple[str, ...]) -> Callable[..., Any]:
    """Initialiser whose parameter carries these logical axis names; `self.param` unboxes it."""
    return nn.with_logical_partitioning(init, axes)


def rms_norm(config: DecoderConfig, name: str | None = None) -> nn.RMSNorm:
    """RMS norm with float32 statistics in every compute dtype."""
    scale = named(nn.initializers.ones, ("norm",))
    return nn.RMSNorm(config.norm_eps, dtype=config.dtype, scale_init=scale, name=name)


class Projection(nn.Module):
    """Linear layer over the last `contracted` axes of x, as one product of two matrices.

    The axes are merged because XLA:CPU transposes and recomputes the gradient of a product over
    several axes, which took a third of the backward pass.
    """

    features: tuple[int, ...]
    axes: tuple[str, ...]  # logical names of the kernel's dimensions
    dtype: Any
    contracted: int = 1
    use_bias: bool = False
    adapters: Adapters | None = None

    @nn.compact
    def __call__(self, x: Float[Array, "B T ..."]) -> Float[Array, "B T ..."]:
        inputs = x.shape[-self.contracted :]
        inner = math.prod(inputs)
        init = named(nn.initializers.normal(inner**-0.5), self.axes)
        kernel = self.param("kernel", init, (*inputs, *self.features)).astype(self.dtype)
        flat = x.reshape(-1, inner)
        product = flat @ kernel.reshape(inner, -1)
        if self.has_variable("params", "kernel" + SCALE):
            scale = self.get_variable("params", "kernel" + SCALE)
            product = (product * scale.reshape(1, -1)).astype(self.dtype)
        if self.adapters:
            product += self._low_rank(self.adapters, flat, inputs)
        product = product.reshape(*x.shape[: -self.contracted], *self.features)
        if self.use_bias:
            axes = self.axes[self.contracted :]
            init = named(nn.initializers.zeros, axes)
            product += self.param("bias", init, self.features).astype(self.dtype)
        return product

    def _low_rank(
        self, adapters: Adapters, flat: Float[Array, "N I"], inputs: tuple[int, ...]
    ) -> Array:
        """The adapters' term, scale (x A) B; B starts at zero, so training starts at the base."""
        rank, inner, into = adapters.rank, flat.shape[1], self.axes[: self.contracted]
        init = named(nn.initializers.normal(inner**-0.5), (*into, "rank"))
        down = self.param(ADAPTER_NAMES[0], init, (*inputs, rank)).astype(self.dtype)
        axes = ("rank", *self.axes[self.contracted :])
        init = named(nn.initializers.zeros, axes)
        up = self.param(ADAPTER_NAMES[1], init, (rank, *self.features)).astype(self.dtype)
        return adapters.scale * (flat @ down.reshape(inner, rank)) @ up.reshape(rank, -1)


class Block(nn.Module):
    """Transformer layer: attention and gated MLP, each after an RMS norm, each added to x."""

    config: DecoderConfig
    attend: Callable  # see model/training_attention.py and model/decode_attention.py

    def _linear(self, name: str, features: tuple[int, ...], axes: tuple[str, ...], **options):
        adapters = self.config.adapters
        if adapters and name not in adapters.targets:
            adapters = None
        return Projection(
            features, axes, self.config.dtype, name=name, adapters=adapters, **options
        )

    def _heads(self, name: str, count: int, axis: str):
        features, axes = (count, self.config.head_dim), ("embed", axis, "head_dim")
        return self._linear(name, features, axes, use_bias=self.config.qkv_bias)

    def _norm(self, name: str):
        return rms_norm(self.config, name=name)

    def _whole(self, name: str, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """Normed input of projections, with a row's whole length on each device."""
        return constrain(self._norm(name)(x), "batch", None, None)

    def _add(self, x: Float[Array, "B T D"], more: Float[Array, "B T D"]):
        """Residual stream after an addition, sharded by length again.

        `more` is constrained to a row's whole length first. Otherwise its gradient, which has the
        whole length, would be gathered over the batch too.
        """
        return constrain(x + constrain(more, "batch", None, None), "batch", "length", None)

    def _rotated(self, queries: Array, keys: Array, positions: Int[Array, "B T"]):
        c, factor = self.config, 1.0
        frequencies = rope_frequencies(c.rope_theta, c.head_dim, c.rope_scaling)
        of_queries: Any = factor
        if c.rope_scaling is not None:
            of_queries = factor = c.rope_scaling.attention_factor
            if c.rope_scaling.query_growth:
                of_queries = factor * query_growth(positions, c.rope_scaling)
        queries = rotate(queries, positions, frequencies, of_queries)
        return queries, rotate(keys, positions, frequencies, factor)

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "B T D"],
        context: Any,
        cache: Any,
        slides: Bool[Array, ""] | None = None,
    ):
        """Output and cache of a layer; `slides` is for configs whose layers differ."""
        c = self.config
        x = checkpoint_name(x, LAYER_INPUT)
        h = self._whole("attention_norm", x)
        queries = self._heads("query", c.heads, "heads")(h)
        keys = self._heads("key", c.kv_heads, "kv_heads")(h)
        values = self._heads("value", c.kv_heads, "kv_heads")(h)
        if c.qk_norm:
            queries, keys = self._norm("query_norm")(queries), self._norm("key_norm")(keys)
        queries, keys = self._rotated(queries, keys, context.positions)
        window = c.window_of(slides)
        mixed, cache = self.attend(queries, keys, values, context, cache, window)
        mixed = constrain(mixed, "batch", None, "heads", None)
        axes, biased = ("heads", "head_dim", "embed"), {"use_bias": c.mlp_bias}
        out = self._linear("out", (c.embed,), axes, contracted=2, use_bias=c.out_bias)(mixed)
        x = self._add(x, out)
        h = self._whole("mlp_norm", x)
        gate = self._linear("gate", (c.mlp,), ("embed", "mlp"), **biased)(h)
        up = self._linear("up", (c.mlp,), ("embed", "mlp"), **biased)(h)
        product = constrain(nn.silu(gate) * up, "batch", None, "mlp")
        down = self._linear("down", (c.embed,), ("mlp", "embed"), **biased)(product)
        return self._add(x, down), cache


def layer_stacks(config: DecoderConfig) -> dict[str, int]:
    """Number of layers in each stack of a parameter tree, by name, first layers first."""
    frozen = {"frozen_layers": config.frozen_layers} if config.frozen_layers else {}
    return frozen | {"layers": config.layers - config.frozen_layers}


class Decoder(nn.Module):
    """Decoder from the tokens of packed rows to final hidden states.

    `model.logprobs` applies the output head to them.
    """

    config: DecoderConfig

    @nn.compact
    def __call__(
        self,
        tokens: Int[Array, "R T"],
        segment_ids: Int[Array, "R T"],
        positions: Int[Array, "R T"],
    ) -> Float[Array, "R T D"]:
        c = self.config
        init = named(nn.initializers.normal(0.02), ("vocab", "embed"))
        embedding = self.param("embedding", init, (c.vocab, c.embed))
        if c.scalar_head:
            init = named(nn.initializers.zeros, ("embed",))
            self.param("score", init, (c.embed,))
        elif not c.tie_embeddings:
            init = named(nn.initializers.normal(0.02), ("embed", "vocab"))
            self.param("head", init, (c.embed, c.vocab))
        # The table is gathered over fsdp first, and x is sharded by length only afterwards: a
        # lookup in a table sharded both ways replicates the batch, and a lookup of tokens sharded
        # by length in a table sharded by vocabulary gathers the table.
        table = constrain(embedding.astype(c.dtype), "vocab", None)
        x = constrain(table[tokens], "batch", None, None)
        x = constrain(x, "batch", "length", None)
        block = Block
        if c.remat != "none":
            block = nn.remat(Block, policy=REMAT_POLICIES[c.remat], prevent_cse=False)
        context = Context(positions, segment_ids)
        first, axes = 0, (nn.broadcast, nn.broadcast, 0)  # of context, cache and slides
        for name, length in layer_stacks(c).items():
            slides = jnp.asarray(c.sliding[first : first + length]) if c.sliding else None
            first += length
            layers = nn.scan(
                block,
                variable_axes={"params": 0},
                split_rngs={"params": True},
                in_axes=axes,  # pyright: ignore[reportArgumentType]: declared as an int
                length=length,
                unroll=min(c.scan_unroll, length),
                metadata_params={nn.PARTITION_NAME: "layers"},
            )(c, TRAINING_ATTENTION[c.attention], name=name)
            x, _ = layers(x, context, None, slides)
        return rms_norm(c, name="final_norm")(x)


def init_params(config: DecoderConfig, key: jax.Array) -> Any:
    """Random parameters, each boxed with its logical axis names; float32."""
    ids = jnp.zeros((1, 1), jnp.int32)
    return Decoder(config).init(key, ids, ids, ids)["params"]


@functools.lru_cache(maxsize=16)  # a start asks some eight times, and tracing takes long
def abstract_params(config: DecoderConfig) -> Any:
    """Shapes and logical axis names of the parameters; nothing is computed."""
    return jax.eval_shape(lambda: init_params(config, jax.random.key(0)))


def head_kernel(params: Any) -> Float[Array, "D V"]:
    """Matrix of the output head: a parameter, or the transposed embedding where both are tied."""
    return params["head"] if "head" in params else params["embedding"].T


def forward_dtype(path: str, config: DecoderConfig) -> Any:
    """Dtype of a parameter in a forward pass: float32 for norms, else the compute dtype."""
    return jnp.float32 if path.endswith("scale") else config.dtype


def summed_axes(path: str) -> int:
    """Number of leading axes of a parameter that a matrix product sums over.

    0 for a parameter that is in no such product (norms, biases, the embedding) and for adapters.
    """
    if path.endswith("/kernel"):
        return 2 if path.endswith("/out/kernel") else 1
    return int(path == "head")


def layer_paths(path: str, config: DecoderConfig) -> list[str]:
    """Decoding's paths of a stack's layers; the path itself of a parameter outside layers."""
    stack, _, below = path.partition("/")
    first = {"frozen_layers": 0, "layers": config.frozen_layers}
    if stack not in first:
        return [path]
    return [f"layers/{first[stack] + i}/{below}" for i in range(layer_stacks(config)[stack])]


def for_decoding(flat: Mapping[str, Array | jax.ShapeDtypeStruct], config: DecoderConfig) -> Any:
    """Parameter tree for decoding, where `layers` is a tuple with a tree for each layer."""
    tree = unflatten_dict(flat, sep="/")
    return tree | {"layers": tuple(tree["layers"][str(i)] for i in range(config.layers))}
