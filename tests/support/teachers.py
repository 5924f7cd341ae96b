"""Teachers of other shapes than the tiny policy, their folders, and GKD's equation."""

import dataclasses
import pathlib
import shutil

import flax.linen as nn
import jax
import jax.numpy as jnp
from conftest import TINY

from dapo_jax.model import save_huggingface
from dapo_jax.model.decoder import DecoderConfig, init_params

# Wider and deeper, with a separate head and eight padding rows in its vocabulary.
LARGE = dataclasses.replace(
    TINY, vocab=40, layers=3, embed=48, heads=6, mlp=96, tie_embeddings=False
)


def make_teacher(config: DecoderConfig = LARGE):
    """Random parameters whose distributions are not flat."""
    params = nn.unbox(init_params(config, jax.random.key(9)))
    return params | {"head": params["head"] * 8} if "head" in params else params


def write_teacher(
    folder: pathlib.Path, tiny_folder: pathlib.Path, config: DecoderConfig = LARGE
) -> pathlib.Path:
    """Write `make_teacher` with the tiny policy's tokenizer; return the folder."""
    folder.mkdir()
    save_huggingface.save_folder(folder, make_teacher(config), config, (1,))
    shutil.copy(tiny_folder / "tokenizer.json", folder)
    return folder


def divergence_by_definition(teacher_logits, logits, kind):
    """GKD's equation on distributions that are written out, the rest as one more outcome."""
    p, q = (jax.nn.softmax(one / kind.temperature) for one in (teacher_logits, logits))
    if kind.top_k:
        likeliest = jnp.argsort(jnp.argsort(-p)) < kind.top_k
        rest = (jnp.where(likeliest, 0.0, one).sum(-1, keepdims=True) for one in (p, q))
        places = jax.lax.top_k(p, kind.top_k)[1]
        p, q = (
            jnp.concatenate([jnp.take_along_axis(one, places, -1), left], -1)
            for one, left in zip((p, q), rest, strict=True)
        )

    def kl(a, b):
        return jnp.sum(a * (jnp.log(a) - jnp.log(b)), -1)

    if kind.beta in (0, 1):
        return kl(q, p) if kind.beta else kl(p, q)
    mixture = kind.beta * p + (1 - kind.beta) * q
    return kind.beta * kl(p, mixture) + (1 - kind.beta) * kl(q, mixture)
