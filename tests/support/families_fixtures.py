"""Logits, greedy tokens and exports of a family's fixture folder."""

import jax
import jax.numpy as jnp
import numpy as np
from conftest import make_prompt
from safetensors import safe_open
from samplers import GREEDY, make_engine, sample

from dapo_jax.data.prompts.tokenizer import Tokenizer
from dapo_jax.extras.arithmetic import arithmetic_tokenizer
from dapo_jax.model import load_huggingface, save_huggingface
from dapo_jax.model.decoder import Decoder, head_kernel
from dapo_jax.model.lm_head import Scale
from dapo_jax.rollout.scheduler import Scheduler


def packed_batch(folder):
    """Return the ragged batch of expected tokens in a row, with segments and positions.

    Also the mask [B, T] of its tokens.
    """
    with np.load(folder / "expected.npz") as expected:
        tokens, lengths = expected["tokens"], expected["lengths"]
    used = np.arange(tokens.shape[1]) < lengths[:, None]
    places = np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape)
    segments = np.broadcast_to(1 + np.arange(len(tokens))[:, None], tokens.shape)
    arrays = tokens, segments, places
    return [jnp.asarray(array[used][None], jnp.int32) for array in arrays], used


def packed_logits(folder, mesh, config=None, params=None):
    """Return our logits of the expected tokens, packed into a row; [B, T, V], 0 beyond.

    `config` and `params` are those of the folder by default.
    """
    config = config or load_huggingface.read_config(folder)
    params = params or load_huggingface.load_params(folder, config, mesh)
    rows, used = packed_batch(folder)

    def row_logits(params, *rows):
        products = Decoder(config).apply({"params": params}, *rows) @ head_kernel(params)
        return Scale(cap=config.logit_cap).logits(products)

    logits = np.zeros((*used.shape, config.vocab), np.float32)
    logits[used] = jax.jit(row_logits)(params, *rows)[0]
    return logits, used


def greedy_tokens(folder, mesh):
    """Ours after each expected sequence, all in company; no token ends a response."""
    config = load_huggingface.read_config(folder)
    with np.load(folder / "expected.npz") as expected:
        tokens, lengths, greedy = (expected[name] for name in ("tokens", "lengths", "greedy"))
    tokenizer = Tokenizer(arithmetic_tokenizer().backend, end_ids=(config.vocab,), pad_id=0)
    sizes = {"burst": 4, "response": greedy.shape[1], "prompt": int(lengths.max()), "width": 1}
    sizes |= {"first_window_tokens": 16}
    engine = make_engine(mesh, config=config, tokenizer=tokenizer, **sizes)
    sampler = Scheduler(engine, tokenizer, seed=0)
    params = load_huggingface.load_params(folder, config, mesh)
    rows = enumerate(zip(tokens, lengths, strict=True))
    prompts = [make_prompt(i, row[:length].tolist()) for i, (row, length) in rows]
    done = sample(sampler, params, prompts, samples=1, rule=GREEDY)
    return [done[i][0].tokens.tolist() for i in sorted(done)], greedy.tolist()


def export(folder, out, mesh, **options):
    out.mkdir()
    config = load_huggingface.read_config(folder)
    params = load_huggingface.load_params(folder, config, mesh)
    dtype = load_huggingface.stored_dtype(folder)
    save_huggingface.save_weights(out, save_huggingface.flatten(params), config, dtype, **options)
    save_huggingface.save_settings_of(folder, out, dtype)
    return config


def stored_bytes(folder):
    tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        file = safe_open(path, framework="numpy")
        for name in file.keys():
            part = file.get_slice(name)
            assert name not in tensors
            tensors[name] = part.get_dtype(), part.get_shape(), file.get_tensor(name).tobytes()
    return tensors
