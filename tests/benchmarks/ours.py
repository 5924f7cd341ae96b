"""Times rollout, update and whole step of dapo_jax on the peers' model and workload.

    python tests/benchmarks/ours.py --repeats 5

4.2 M parameters, float32, 8 prompts x 8 samples, 32 + 128 tokens, every response of full length,
entropy computed in the update. Prints a JSON line per measurement; the first (compiling) call is
reported apart.
"""

import argparse
import json
import pathlib
import statistics
import tempfile
import time

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from dapo_jax import algorithms
from dapo_jax.experiment.config import (
    Compute,
    Config,
    Data,
    Log,
    Model,
    Optimizer,
    Packing,
    Rollout,
    Sampler,
)
from dapo_jax.learner.packing import Segment, pack
from dapo_jax.model import saving
from dapo_jax.model.decoder import DecoderConfig, init_params
from dapo_jax.parts import Parts, build
from dapo_jax.sampler.sampling import SAMPLE_FOR_TRAINING, SamplingRule
from dapo_jax.structs import Completion, Prompt, ScoredBatch, TrainBatch
from dapo_jax.train import RunState, train_step

VOCAB, PROMPTS, GROUP, PROMPT_TOKENS, NEW_TOKENS = 512, 8, 8, 32, 128
END, NEVER = VOCAB - 1, VOCAB  # NEVER can't be drawn: every response takes its whole budget
DECODER = DecoderConfig(
    vocab=VOCAB,
    layers=4,
    embed=256,
    heads=4,
    kv_heads=2,
    head_dim=64,
    mlp=1024,
    tie_embeddings=False,
)


class RandomPrompts:
    """32 random tokens each, endlessly; stands in for the data, which is not measured."""

    position = 0

    def __next__(self) -> Prompt:
        self.position += 1
        tokens = np.random.default_rng(self.position).integers(2, VOCAB, PROMPT_TOKENS)
        return Prompt(self.position - 1, str(self.position), "", tokens.astype(np.int32), "1", "")


def write_folder(folder: pathlib.Path) -> None:
    """A random model of the peers' shape with a tokenizer of 512 words."""
    saving.save_folder(folder, nn.unbox(init_params(DECODER, jax.random.key(0))), DECODER, (END,))
    words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(VOCAB)}, "t0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.decoder = decoders.Fuse()
    words.save(str(folder / "tokenizer.json"))


def make_config(folder: pathlib.Path) -> Config:
    """One update per rollout batch, as the peers do; nothing filtered, everything trained."""
    algorithm = algorithms.dapo()
    algorithm.dynamic_sampling = False
    return Config(
        algorithm=algorithm,
        model=Model(folder=str(folder)),
        compute=Compute(scan_unroll=DECODER.layers),
        data=Data(max_prompt_tokens=PROMPT_TOKENS),
        rollout=Rollout(PROMPTS, GROUP, updates_per_rollout=1),
        sampler=Sampler(slots=PROMPTS * GROUP, burst_tokens=32, max_response_tokens=NEW_TOKENS),
        optimizer=Optimizer(learning_rate=1e-5),
        packing=Packing(row_tokens=PROMPT_TOKENS + NEW_TOKENS, rows_per_microbatch=16),
        log=Log(tensorboard=False),
    )


def measure(name: str, run, repeats: int, tokens: int) -> None:
    """Prints the median of `repeats` calls after a first one that compiles and a warm-up."""
    started = time.perf_counter()
    run()
    first = time.perf_counter() - started
    run()
    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - started)
    median = statistics.median(seconds)
    line = {
        "framework": "dapo_jax",
        "bench": name,
        "median_s": round(median, 4),
        "tokens_per_s": round(tokens / median, 1),
        "all_s": [round(s, 4) for s in seconds],
        "first_call_s": round(first, 2),
    }
    print(json.dumps(line), flush=True)


def rollout(parts: Parts, params, step: int) -> None:
    """64 responses of 128 tokens."""
    sampler, prompts = parts.sampler, RandomPrompts()
    sampler.begin(params, purpose=SAMPLE_FOR_TRAINING, step=step, rule=SamplingRule())
    for _ in range(PROMPTS):
        sampler.submit(next(prompts), GROUP)
    while not sampler.idle:
        sampler.decode_burst()
    assert sampler.counts.tokens == PROMPTS * GROUP * NEW_TOKENS
    assert sampler.counts.prefills == PROMPTS
    sampler.release()


def make_batch() -> tuple[TrainBatch, int]:
    """64 rows of 160 tokens with random advantages."""
    rng, prompts, segments = np.random.default_rng(0), RandomPrompts(), []
    for i in range(PROMPTS * GROUP):
        tokens = rng.integers(2, VOCAB, NEW_TOKENS).astype(np.int32)
        done = Completion(tokens, np.zeros(NEW_TOKENS, np.float32), True, 0, "")
        segments.append(Segment(next(prompts), done, i))
    rollouts, used = pack(segments, PROMPT_TOKENS + NEW_TOKENS, 16, 4)
    on_response = (rollouts.response_index >= 0).astype(np.float32)
    advantages = rng.normal(size=on_response.shape).astype(np.float32)
    weights = on_response / on_response.sum()
    return TrainBatch(ScoredBatch(rollouts, None), advantages, weights), used


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", default="rollout,update,step")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        write_folder(pathlib.Path(folder))
        parts = build(make_config(pathlib.Path(folder)))
        parts.prompts = RandomPrompts()
        parts.sampler._engine._end_ids = jnp.asarray([NEVER])  # which no folder may say
        params = parts.first_params()
    sampled = PROMPTS * GROUP * NEW_TOKENS
    seen = PROMPTS * GROUP * (PROMPT_TOKENS + NEW_TOKENS)
    if "rollout" in args.only:
        steps = iter(range(10**9))
        measure("rollout", lambda: rollout(parts, params, next(steps)), args.repeats, sampled)
    state = parts.learner.start(jax.tree.map(lambda leaf: leaf.copy(), params))
    if "update" in args.only:
        batch, used = make_batch()

        def update():
            nonlocal state
            state, metrics = parts.learner.update(state, batch, used, 1e-5)
            jax.block_until_ready((state, metrics))

        measure("update", update, args.repeats, seen)
    if "step" in args.only:
        run = RunState(0, state, 0, 1.0)

        def step():
            nonlocal run
            run, values, _ = train_step(parts, run, lambda: False)
            jax.block_until_ready(run.train)
            assert values["trained_groups"] == PROMPTS

        measure("step", step, args.repeats, sampled)
    parts.close()


if __name__ == "__main__":
    main()
