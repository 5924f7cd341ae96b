"""What packing a group's prompt once saves: tokens and computed positions of six workloads.

    python tests/benchmarks/shared_prompts.py

Packs drawn lengths as a run does, with the cheapest rows each. The last column is the share of the
packed tokens that no loss reads: prompts, and what is shared of them.
"""

from typing import NamedTuple

import bench
import numpy as np

from dapo_jax.config.experiment import Packing
from dapo_jax.learner.packing import Segment, choose_rows, pack_updates, row_shapes
from dapo_jax.types.structs import Completion, Prompt

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


def draw(workload: Workload, seed: int = 0) -> list[Segment]:
    rng = np.random.default_rng(seed)

    def tokens(median: float, spread: float, limit: int) -> np.ndarray:
        count = int(np.clip(rng.lognormal(np.log(median), spread), 2, limit))
        return rng.integers(2, 100, count).astype(np.int32)

    segments = []
    for number in range(workload.prompts):
        prompt = Prompt(number, str(number), "", tokens(*workload.prompt), "1", "random")
        for _ in range(workload.samples):
            response = tokens(*workload.response)
            logprobs = np.full(len(response), -3, np.float32)
            completion = Completion(response, logprobs, False, 0, "")
            segments.append(Segment(prompt, completion, len(segments)))
    return segments


def main() -> None:
    bench.read_arguments(__doc__)
    heads = ["workload", "tokens", "shared", "positions", "shared", "saved", "not trained"]
    bench.print_table(heads)
    for name, workload in WORKLOADS.items():
        segments, cells = draw(workload), []
        for share in (False, True):
            shapes = row_shapes(Packing(workload.row_tokens, 16, share), 1, 10**6)
            packing = choose_rows([segments], shapes, ATTENTION_TOKENS)
            rollouts, (used,) = pack_updates([segments], packing)
            tokens = int((rollouts.segment_ids > 0).sum())
            cells.append((tokens, used * packing.rows_per_microbatch * packing.row_tokens))
        (tokens, places), (shared_tokens, shared_places) = cells
        counts = (f"{n:,}" for n in (tokens, shared_tokens, places, shared_places))
        trained = sum(len(segment.completion) for segment in segments)
        shares = (1 - shared_places / places, 1 - trained / shared_tokens)
        bench.print_row([name, *counts, *(f"{share:.0%}" for share in shares)])


if __name__ == "__main__":
    main()
