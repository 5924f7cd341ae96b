"""Shared fixtures: eight virtual devices, a tiny model folder, a mesh of one device."""

import os

os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
)
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import flax.linen as nn
import jax
import numpy as np
import pytest

from dapo_jax.model import huggingface
from dapo_jax.model.decoder import DecoderConfig, init_params
from dapo_jax.sharding import make_mesh
from dapo_jax.structs import Completion, Prompt
from dapo_jax.tokenizer import arithmetic_tokenizer

TINY = DecoderConfig(
    vocab=32, layers=2, embed=32, heads=4, kv_heads=2, head_dim=8, mlp=64, tie_embeddings=True
)


@pytest.fixture(scope="session")
def one_device():
    return make_mesh(1, 1, 1, jax.devices()[:1])


@pytest.fixture(scope="session")
def eight_devices():
    return make_mesh(2, 2, 2)


@pytest.fixture(scope="session")
def tiny_params():
    """Random parameters whose distributions are neither flat nor a single token."""
    params = nn.unbox(init_params(TINY, jax.random.key(0)))
    return params | {"embedding": params["embedding"] * 20}


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory, tiny_params):
    """A model folder of the tiny decoder with the embedded task's tokenizer."""
    folder = tmp_path_factory.mktemp("tiny")
    tokenizer = arithmetic_tokenizer()
    huggingface.save_folder(folder, tiny_params, TINY, tokenizer.end_ids)
    tokenizer.backend.save(str(folder / "tokenizer.json"))
    return folder


def make_prompt(index: int, tokens: list[int], answer: str = "1") -> Prompt:
    return Prompt(index, f"p{index}", "", np.array(tokens, np.int32), answer, "test")


def make_completion(tokens: list[int], truncated: bool = False, logprob: float = -1.0):
    return Completion(
        np.array(tokens, np.int32), np.full(len(tokens), logprob, np.float32), truncated, 0, ""
    )
