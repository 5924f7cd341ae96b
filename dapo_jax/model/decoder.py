"""Decoder-only transformer as a Flax Linen module, for Qwen2, Qwen3 and Llama 3.

Families are switches of `DecoderConfig` (see model/families.py). Training scans one `Block` over
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
import numpy as np
from flax.traverse_util import unflatten_dict
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from dapo_jax.model.blockwise_attention import ATTENTION_RESIDUALS
from dapo_jax.model.training_attention import TRAINING_ATTENTION, Context
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
class RopeScaling:
    """Llama 3.1's slower rotations, for positions beyond the context of the first training."""

    factor: float  # long wavelengths are stretched by this
    low_freq_factor: float  # turns over `original_tokens` below which a wavelength is long
    high_freq_factor: float  # turns above which a wavelength is kept; in between, a blend
    original_tokens: int


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
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
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


def rope_frequencies(config: DecoderConfig) -> Float[np.ndarray, "E/2"]:
    """Rotary frequencies, in radians per position, of each pair of a head's dimensions; float32.

    Rounded to float32 step by step, where the published models round: at position 100,000 the
    last bit of a frequency is an angle that changes logits.
    """
    exponents = np.arange(0, config.head_dim, 2, dtype=np.float32) / np.float32(config.head_dim)
    wavelengths = np.power(config.rope_theta, exponents, dtype=np.float64).astype(np.float32)
    frequencies = np.float32(1.0) / wavelengths
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    turns = scaling.original_tokens / (np.float32(2 * math.pi) / frequencies)
    kept = np.clip((turns - low) / (high - low), 0, 1)
    return (1 - kept) * frequencies / np.float32(scaling.factor) + kept * frequencies


def rotate(
    x: Float[Array, "B T H E"], positions: Int[Array, "B T"], config: DecoderConfig
) -> Float[Array, "B T H E"]:
    """Rotary position embedding (arXiv 2104.09864); halves are paired as in published weights."""
    half = x.shape[-1] // 2
    angles = positions[..., None, None].astype(jnp.float32) * rope_frequencies(config)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    left, right = x[..., :half].astype(jnp.float32), x[..., half:].astype(jnp.float32)
    return jnp.concatenate([left * cos - right * sin, right * cos + left * sin], -1).astype(x.dtype)


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

    @nn.compact
    def __call__(self, x: Float[Array, "B T D"], context: Any, cache: Any):
        c = self.config
        x = checkpoint_name(x, LAYER_INPUT)
        h = self._whole("attention_norm", x)
        queries = self._heads("query", c.heads, "heads")(h)
        keys = self._heads("key", c.kv_heads, "kv_heads")(h)
        values = self._heads("value", c.kv_heads, "kv_heads")(h)
        if c.qk_norm:
            queries, keys = self._norm("query_norm")(queries), self._norm("key_norm")(keys)
        queries = rotate(queries, context.positions, c)
        keys = rotate(keys, context.positions, c)
        mixed, cache = self.attend(queries, keys, values, context, cache)
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
        for name, length in layer_stacks(c).items():
            layers = nn.scan(
                block,
                variable_axes={"params": 0},
                split_rngs={"params": True},
                in_axes=nn.broadcast,  # pyright: ignore[reportArgumentType]: declared as an int
                length=length,
                unroll=min(c.scan_unroll, length),
                metadata_params={nn.PARTITION_NAME: "layers"},
            )(c, TRAINING_ATTENTION[c.attention], name=name)
            x, _ = layers(x, context, None)
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
