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
SHAPE = {"vocab": 40, "layers": 3, "embed": 48, "heads": 6, "mlp": 96}
LARGE = dataclasses.replace(TINY, **SHAPE, tie_embeddings=False)


def make_teacher(config: DecoderConfig = LARGE):
    params = nn.unbox(jax.jit(init_params, static_argnums=0)(config, jax.random.key(9)))
    return params | {"head": params["head"] * 8} if "head" in params else params


def write_teacher(folder: pathlib.Path, tiny_folder: pathlib.Path, config=LARGE) -> pathlib.Path:
    folder.mkdir()
    save_huggingface.save_folder(folder, make_teacher(config), config, (1,))
    shutil.copy(tiny_folder / "tokenizer.json", folder)
    return folder


def divergence_by_definition(teacher_logits, logits, kind):
    """GKD's equation on distributions that are written out."""
    p, q = (jax.nn.softmax(x / kind.temperature) for x in (teacher_logits, logits))

    def kl(a, b):
        return jnp.sum(a * (jnp.log(a) - jnp.log(b)), -1)

    if kind.beta in (0, 1):
        return kl(q, p) if kind.beta else kl(p, q)
    mixture = kind.beta * p + (1 - kind.beta) * q
    return kind.beta * kl(p, mixture) + (1 - kind.beta) * kl(q, mixture)
