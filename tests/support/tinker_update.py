"""Updates of `dapo-jax train` on 64 sequences of 128 tokens: `python tinker_update.py FOLDER`.

Every line of the input makes a step, and prints its seconds. It is a program of its own, since
tests compile without optimization.
"""

import sys
import time

import jax
import numpy as np

from dapo_jax.config.algorithm import Algorithm
from dapo_jax.config.experiment import Compute, OneMesh, Optimizer
from dapo_jax.learner.batches import ScoredBatch, TrainBatch
from dapo_jax.learner.packing import Segment, pack
from dapo_jax.learner.policy import PolicySettings, policy_learner
from dapo_jax.model import load_huggingface
from dapo_jax.run.compute import mesh_sizes, numerics
from dapo_jax.runtime.sharding import make_mesh
from dapo_jax.types.structs import Completion, Prompt

ROWS, TOKENS, OLD_LOGPROB = 64, 128, -5.0


def sequences() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (ROWS, TOKENS)).astype(np.int32)


def main(folder: str) -> None:
    old = np.full(TOKENS - 1, OLD_LOGPROB, np.float32)
    segments = [
        Segment(Prompt(i, "", "", row[:1], "", ""), Completion(row[1:], old, False, 0, ""), i)
        for i, row in enumerate(sequences())
    ]
    packed, used = pack(segments, 256, 16)
    mask = (np.asarray(packed.response_index) >= 0).astype(np.float32)
    batch = TrainBatch(ScoredBatch(packed, packed.sampler_logprobs), mask, mask / mask.sum())
    mesh = make_mesh(**mesh_sizes(OneMesh()), devices=None)
    decoder = load_huggingface.read_config(folder, **numerics(Compute(), mesh, 256))
    learner = policy_learner(PolicySettings(Algorithm(), Compute()), Optimizer(), decoder, mesh)
    state = learner.start(load_huggingface.load_params(folder, decoder, mesh))
    for _ in sys.stdin:
        began = time.perf_counter()
        state, outputs = learner.update(state, batch, used, 1e-4)
        jax.block_until_ready((state, outputs))
        print(time.perf_counter() - began, flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
