"""Forward passes of the sampler: prefill of prompts, decode steps, scores of tokens.

They apply training's `Block` layer by layer to per-layer parameters and caches, so that XLA updates
the caches in place. A scan over layers would copy a stacked cache.
"""

from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dapo_jax.model.caches import PromptCache, StateCache
from dapo_jax.model.decode_attention import PromptContext, SlotContext, attend_prompt
from dapo_jax.model.decoder import (
    Block,
    DecoderConfig,
    head_kernel,
    rms_norm,
    scaled_embeddings,
)
from dapo_jax.model.experts import ROUTES, route_dtype
from dapo_jax.model.layers import SCALE
from dapo_jax.model.lm_head import Scale
from dapo_jax.runtime.registry import feature


def _run_layers(
    params: Any,
    config: DecoderConfig,
    attend: Callable,
    tokens: Int[Array, "B T"],
    context: Any,
    caches: tuple,
) -> tuple[Array, tuple, Int[Array, "B T L k"] | None]:
    """Return output and caches of all layers, and their routes if the config records them."""
    x = scaled_embeddings(params["embedding"][tokens].astype(config.dtype), config)
    inputs: Any = [None] * config.layers
    if config.layer_inputs:
        module = feature("mixed_layers").LayerInputs(config)
        inputs = module.apply({"params": params["layer_inputs"]}, tokens, x, False)
    new_caches: list[Any] = []
    routes: list[Any] = []
    mutable = [ROUTES] if config.records_routes else []
    for number, layer in enumerate(params["layers"]):
        source = config.cache_of(number)
        cache = caches[number] if source == number else new_caches[source]
        block = Block(config.of_layer(number), attend)
        (x, cache), record = block.apply(
            {"params": layer}, x, context, cache, layer_input=inputs[number], mutable=mutable
        )
        if source == number:
            new_caches.append(cache)
        if mutable:
            routes.append(record[ROUTES]["moe"]["layer"])
    return x, tuple(new_caches), jnp.stack(routes, axis=2) if routes else None


def prefill(
    params: Any,
    config: DecoderConfig,
    tokens: Int[Array, "B P"],
    lengths: Int[Array, "B"],
    chunk_tokens: int = 0,
) -> tuple[tuple[PromptCache | StateCache, ...], Int[Array, "B P L k"] | None]:
    """Return caches of every layer for prompts padded on the right, and routes.

    Padding never affects earlier positions; the caller masks its keys. States of delta-net layers
    are those before a prompt's last token, which is fed again. Longer prompts go through
    the layers by `chunk_tokens` (0: at once), so attention scores are [chunk, P].
    """
    batch, width = tokens.shape

    def feed(tokens, start, caches):
        positions = jnp.broadcast_to(start + jnp.arange(tokens.shape[1]), tokens.shape)
        context = PromptContext(positions, start, lengths - 1)
        return _run_layers(params, config, attend_prompt, tokens, context, caches)[1:]

    if not 0 < chunk_tokens < width:
        return feed(tokens, 0, (None,) * config.cached_layers)
    chunks = -(-width // chunk_tokens)
    tokens = jnp.pad(tokens, ((0, 0), (0, chunks * chunk_tokens - width)))

    def body(i, carry):
        start, (caches, routes) = i * chunk_tokens, carry
        piece = jax.lax.dynamic_slice(tokens, (0, start), (batch, chunk_tokens))
        caches, new = feed(piece, start, caches)
        if new is not None:
            routes = jax.lax.dynamic_update_slice_in_dim(routes, new, start, axis=1)
        return caches, routes

    needed = -(-jnp.max(lengths) // chunk_tokens)
    routes = empty_routes(config, *tokens.shape) if config.records_routes else None
    empties = _empty_caches(config, tokens.shape)
    caches, routes = jax.lax.fori_loop(0, needed, body, (empties, routes))

    def cut(tree: Any) -> Any:
        return jax.tree.map(lambda leaf: leaf[:, :width], tree)

    return tuple(c if isinstance(c, StateCache) else cut(c) for c in caches), cut(routes)


def _empty_caches(
    config: DecoderConfig, shape: tuple[int, ...]
) -> tuple[PromptCache | StateCache, ...]:
    """Return the caches of prompts of `shape` [B, P] before their first tokens."""

    def empty(layer: DecoderConfig) -> PromptCache | StateCache:
        if layer.is_recurrent:
            return feature("delta_net").empty_state(layer, shape[0])
        rows = jnp.zeros((*shape, layer.kv_heads, layer.head_dim), layer.dtype)
        return PromptCache(rows, rows)

    return tuple(map(empty, config.each_layer[: config.cached_layers]))


def empty_routes(config: DecoderConfig, batch: int, length: int) -> Int[Array, "B T L k"]:
    """Return routes that are not known yet."""
    shape = batch, length, config.layers, config.experts_per_token
    return jnp.full(shape, -1, route_dtype(config.experts))


def decode_step(
    params: Any,
    config: DecoderConfig,
    attend: Callable,
    tokens: Int[Array, "S Q"],
    context: SlotContext,
    caches: tuple,
) -> tuple[Float[Array, "S Q V"], tuple, Int[Array, "S Q L k"] | None]:
    """Feed each slot its next tokens; return float32 logits after each, caches, and routes."""
    x, caches, routes = _run_layers(params, config, attend, tokens, context, caches)
    return _logits(params, config, x), caches, routes


def _logits(params: Any, config: DecoderConfig, x: Float[Array, "... D"]) -> Float[Array, "... V"]:
    x = cast(Array, rms_norm(config).apply({"params": params["final_norm"]}, x))
    head = head_kernel(params).astype(x.dtype)
    logits = jnp.dot(x, head, preferred_element_type=jnp.float32)
    if "head" + SCALE in params:
        logits *= params["head" + SCALE][None]
    return Scale(cap=config.logit_cap).logits(logits)


def score(
    params: Any,
    config: DecoderConfig,
    tokens: Int[Array, "T"],  # padded on the right; results at the padding are undefined
    *,
    likeliest: int,  # number of likeliest tokens
    chunk_tokens: int,  # tokens that go through the layers and the head at a time; it divides T
) -> tuple[Float[Array, "T"], Float[Array, "T k"], Int[Array, "T k"]]:
    """Return, at t, log p(tokens[t + 1] | tokens[<= t]) and the likeliest tokens."""
    following = jnp.roll(tokens, -1)

    def body(caches, start):
        piece, wanted = (
            jax.lax.dynamic_slice(x, (start,), (chunk_tokens,)) for x in (tokens, following)
        )
        positions = (start + jnp.arange(chunk_tokens))[None]
        context = PromptContext(positions, start)
        x, caches, _ = _run_layers(params, config, attend_prompt, piece[None], context, caches)
        logprobs = jax.nn.log_softmax(_logits(params, config, x[0]), axis=-1)
        chosen = jnp.take_along_axis(logprobs, wanted[:, None], axis=-1)[:, 0]
        return caches, (chosen, *jax.lax.top_k(logprobs, likeliest))

    empties = _empty_caches(config, (1, len(tokens)))
    starts = jnp.arange(0, len(tokens), chunk_tokens)
    _, scored = jax.lax.scan(body, empties, starts)
    return jax.tree.map(lambda x: x.reshape(len(tokens), *x.shape[2:]), scored)
