"""What packing a group's prompt once saves: positions of six workloads, seconds of one update.

    python tests/benchmarks/shared_prompts.py
    python tests/benchmarks/shared_prompts.py --seconds --rounds 3

The table packs drawn lengths as a run does, with the cheapest rows each. `--seconds` times score
pass and update on 4 prompts x 8 responses of the word problems' size: a random model of SmolLM2's
shape, 135 M parameters in float32, separate and shared prompts in turn. `--smoke`: a tiny model.
"""

import dataclasses
import json
import time
from typing import NamedTuple

import bench
import jax
import numpy as np

from dapo_jax import algorithms
from dapo_jax.config.experiment import Compute, Optimizer, Packing
from dapo_jax.learner.advantages import Estimates, broadcast_to_tokens
from dapo_jax.learner.batches import ScoredBatch
from dapo_jax.learner.minibatches import make_batch
from dapo_jax.learner.packing import Segment, choose_rows, pack_updates, row_shapes, tree_index
from dapo_jax.learner.policy import PolicySettings, policy_learner
from dapo_jax.model.decoder import DecoderConfig, init_params
from dapo_jax.runtime.sharding import make_mesh, unbox
from dapo_jax.types.structs import Completion, Prompt

SMOLLM2 = DecoderConfig(
    49_152, layers=30, embed=576, heads=9, kv_heads=3, head_dim=64, mlp=1536, qkv_bias=False
)
SMOKE = dataclasses.replace(SMOLLM2, vocab=64, layers=1, embed=16, heads=2, kv_heads=1, head_dim=8)
ATTENTION_TOKENS = 3000.0  # row length at which attention costs as much as the rest, for SmolLM2


class Workload(NamedTuple):
    """Lengths of one optimizer minibatch: log-normal with a median and a spread, cut at a limit."""

    prompts: int
    samples: int
    prompt: tuple[float, float, int]
    response: tuple[float, float, int]
    row_tokens: int


WORKLOADS = {
    "word problems": Workload(4, 8, (28, 0.1, 40), (18, 0.3, 40), 80),
    "GSM8K, 8 examples in the prompt": Workload(16, 8, (1000, 0.05, 1200), (120, 0.5, 512), 1712),
    "MATH, responses up to 4,096": Workload(16, 8, (110, 0.5, 512), (1200, 0.8, 4096), 4608),
    "tools, 4 turns": Workload(16, 8, (300, 0.2, 512), (400, 0.4, 1024), 1536),
    "32B's config": Workload(32, 16, (150, 0.5, 2048), (6000, 0.9, 20480), 22528),
    "two_strategies": Workload(4, 8, (16, 0.1, 20), (14, 0.9, 60), 80),
}


def draw(workload: Workload, vocab: int, seed: int = 0) -> list[Segment]:
    rng = np.random.default_rng(seed)

    def tokens(median: float, spread: float, limit: int) -> np.ndarray:
        count = int(np.clip(rng.lognormal(np.log(median), spread), 2, limit))
        return rng.integers(2, vocab, count).astype(np.int32)

    segments = []
    for number in range(workload.prompts):
        prompt = Prompt(number, str(number), "", tokens(*workload.prompt), "1", "random")
        for _ in range(workload.samples):
            response = tokens(*workload.response)
            logprobs = np.full(len(response), -3, np.float32)
            completion = Completion(response, logprobs, False, 0, "")
            segments.append(Segment(prompt, completion, len(segments)))
    return segments


def pack_both(workload: Workload, segments: list[Segment]):
    """Return (rows, used microbatches, packing) with separate and with shared prompts."""
    packed = []
    for share in (False, True):
        shapes = row_shapes(Packing(workload.row_tokens, 16, share), 1, 10**6)
        packing = choose_rows([segments], shapes, ATTENTION_TOKENS)
        rollouts, (used,) = pack_updates([segments], packing)
        packed.append((tree_index(rollouts, 0), used, packing))
    return packed


def print_saved() -> None:
    """Print the tokens and computed positions of each workload."""
    bench.print_table(["workload", "tokens", "shared", "positions", "shared", "saved"])
    for name, workload in WORKLOADS.items():
        cells = []
        for rollouts, used, packing in pack_both(workload, draw(workload, 100)):
            real = int((rollouts.segment_ids > 0).sum())
            cells.append((real, used * packing.rows_per_microbatch * packing.row_tokens))
        (tokens, places), (shared_tokens, shared_places) = cells
        counts = (f"{n:,}" for n in (tokens, shared_tokens, places, shared_places))
        bench.print_row([name, *counts, f"{1 - shared_places / places:.0%}"])


def print_seconds(config: DecoderConfig, rounds: int) -> None:
    """Print a JSON line per round: seconds of score pass and update, separate and shared."""
    workload = WORKLOADS["word problems"]._replace(
        prompt=(52, 0.1, 60), response=(29, 0.2, 40), row_tokens=104
    )
    segments = draw(workload, config.vocab)
    algorithm = algorithms.dapo()
    mesh = make_mesh(1, len(jax.devices()), 1)
    learner = policy_learner(PolicySettings(algorithm, Compute()), Optimizer(), config, mesh)
    state = learner.start(jax.jit(lambda: unbox(init_params(config, jax.random.key(0))))())
    advantages = np.random.default_rng(0).normal(size=len(segments))
    batches = []
    for rollouts, used, packing in pack_both(workload, segments):
        estimates = Estimates(broadcast_to_tokens(advantages, rollouts.response_index))
        scored = ScoredBatch(rollouts, rollouts.sampler_logprobs)
        batch = make_batch(scored, segments, estimates, algorithm, workload.response[2])
        batches.append((batch, used, packing))
    for number in range(rounds + 1):
        row: dict = {"round": number or "compile"}
        for name, (batch, used, packing) in zip(("separate", "shared"), batches, strict=True):
            start = time.perf_counter()
            jax.block_until_ready(learner.score(state.params, batch.scored.rollouts, used))
            scored = time.perf_counter()
            state, _ = learner.update(state, batch, used, 1e-6)
            jax.block_until_ready(state)
            row[name] = {
                "positions": used * packing.rows_per_microbatch * packing.row_tokens,
                "score": round(scored - start, 3),
                "update": round(time.perf_counter() - scored, 3),
            }
        print(json.dumps(row), flush=True)


def main() -> None:
    arguments = bench.read_arguments(__doc__, seconds=False, smoke=False, rounds=3)
    if arguments.seconds:
        print_seconds(SMOKE if arguments.smoke else SMOLLM2, arguments.rounds)
    else:
        print_saved()


if __name__ == "__main__":
    main()
