"""Measure the fill of packed rows with fixed rows and with `packing.row_tokens=auto`.

    python tests/benchmarks/fill.py

1,024 responses to prompts of 32 tokens, at most 512 tokens long, eight updates of 128, on eight
devices; fixed rows have 544 tokens, 16 per microbatch. No model runs.
"""

import bench
import numpy as np

from dapo_jax.config.experiment import Packing
from dapo_jax.learner.packing import Segment, choose_rows, fill, pack_updates
from dapo_jax.structs import Completion, Prompt

LIMIT, PROMPT_TOKENS, RESPONSES, UPDATES, DEVICES = 512, 32, 1024, 8, 8
SET = Packing(row_tokens=LIMIT + PROMPT_TOKENS, rows_per_microbatch=16)
ATTENTION_TOKENS = 7_000.0  # row length at which attention takes half of the time: Qwen2.5-0.5B


def laws(rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Return response lengths by the name of their distribution."""
    return {
        "long-tailed, mean a quarter of the limit": np.ceil(
            84 * np.exp(rng.normal(size=RESPONSES))
        ),
        "any up to the limit": rng.integers(1, LIMIT + 1, RESPONSES),
        "any above half of it": rng.integers(LIMIT // 2, LIMIT + 1, RESPONSES),
        "near 0.6 of it": rng.normal(0.6 * LIMIT, 30, RESPONSES),
        "all at the limit": np.full(RESPONSES, LIMIT),
    }


def split(lengths: np.ndarray) -> list[list[Segment]]:
    prompt = Prompt(0, "0", "", np.ones(PROMPT_TOKENS, np.int32), "", "")
    segments = []
    for i, count in enumerate(np.clip(lengths, 1, LIMIT).astype(int)):
        tokens, logprobs = np.ones(count, np.int32), np.zeros(count, np.float32)
        segments.append(Segment(prompt, Completion(tokens, logprobs, False, 0, ""), i))
    size = RESPONSES // UPDATES
    return [segments[i : i + size] for i in range(0, RESPONSES, size)]


def main() -> None:
    bench.print_table(["response lengths", "set", "auto", "its rows, a microbatch"])
    for name, lengths in laws(np.random.default_rng(0)).items():
        updates = split(lengths)
        chosen = choose_rows(updates, SET, DEVICES, 10**6, ATTENTION_TOKENS)
        shares = [fill(*pack_updates(updates, packing)) for packing in (SET, chosen)]
        shape = f"{chosen.rows_per_microbatch} of {chosen.row_tokens:,} tokens"
        bench.print_row([name, *(f"{share:.0%}" for share in shares), shape])


if __name__ == "__main__":
    main()
