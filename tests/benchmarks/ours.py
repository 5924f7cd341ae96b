"""Times rollout, update and whole step of dapo_jax on the peers' model and workloads.

    python tests/benchmarks/ours.py --workload uniform --repeats 5

4.2 M parameters, float32, prompts of 32 tokens, 64 slots, entropy computed in the update.

- uniform: 8 prompts x 8 samples, each response of 128 tokens.
- real: 64 prompts x 8 samples, each response with a limit of its own, drawn from a long-tailed law
  (log-normal, cut at 512 tokens, mean 128).
- smoke: one layer and few short responses, to see that everything runs, and nothing else.

Prints a JSON line per measurement; the first (compiling) call is reported apart.
"""

import contextlib
import dataclasses
import functools
import json
import os
import pathlib
import statistics
import tempfile
import time
from collections.abc import Callable

# A device for each core, as launch/env.sh has it.
os.environ.setdefault(
    "XLA_FLAGS", f"--xla_force_host_platform_device_count={1 << os.cpu_count().bit_length() - 1}"
)

import bench
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

import dapo_jax
from dapo_jax.learner.batches import ScoredBatch, TrainBatch
from dapo_jax.learner.packing import Segment, pack
from dapo_jax.learner.update import LearnerStates
from dapo_jax.model import save_huggingface
from dapo_jax.model.decoder import DecoderConfig, init_params
from dapo_jax.rollout import engine_programs
from dapo_jax.rollout.sampling import sample_tokens
from dapo_jax.rollout.source import SourceState
from dapo_jax.run import metrics
from dapo_jax.run.build import build
from dapo_jax.runtime.clock import Clock
from dapo_jax.step import TrainerState, train_step
from dapo_jax.types.structs import Completion, Prompt

VOCAB, GROUP, PROMPT_TOKENS, SLOTS = 512, 8, 32, 64
END, OTHER = VOCAB - 1, 2
MEDIAN_TOKENS, SPREAD = 84.0, 1.0  # of the log-normal law; cut at 512 its mean is 128
SHAPE = {"layers": 4, "embed": 256, "heads": 4, "kv_heads": 2, "head_dim": 64, "mlp": 1024}
DECODER = DecoderConfig(VOCAB, **SHAPE, tie_embeddings=False)
SMOKE_DECODER = dataclasses.replace(DECODER, layers=1, embed=32, head_dim=8, mlp=64)
PARTS = ["rollout", "update", "step"]


@dataclasses.dataclass(frozen=True)
class Workload:
    """Sizes of a step; a row of the update holds one of the longest responses."""

    prompts: int
    new_tokens: int  # at most
    ragged: bool
    rows_per_microbatch: int
    group: int = GROUP
    slots: int = SLOTS
    decoder: DecoderConfig = DECODER

    @property
    def row_tokens(self) -> int:
        return PROMPT_TOKENS + self.new_tokens

    def limits(self, normal):
        """Return the tokens of responses by standard normal numbers."""
        drawn = jnp.ceil(MEDIAN_TOKENS * jnp.exp(SPREAD * normal))
        drawn = drawn if self.ragged else jnp.full(normal.shape, self.new_tokens)
        return jnp.minimum(drawn, self.new_tokens).astype(int)

    def draw(self, logits, keys, positions, rule):
        """Draw as the sampler does, but end each response at its own limit and nowhere else."""
        tokens, logprobs, supports = sample_tokens(logits, keys, positions, rule)
        apart = jax.vmap(lambda key: jax.random.normal(jax.random.fold_in(key, 2**31 - 1)))
        last = positions + 1 >= self.limits(apart(keys))
        return jnp.where(last, END, jnp.where(tokens == END, OTHER, tokens)), logprobs, supports

    def config(self, folder: str) -> dapo_jax.Config:
        """Return one update per rollout batch, as the peers have it; nothing is filtered."""
        return dapo_jax.Config(
            algorithm=dataclasses.replace(dapo_jax.preset("dapo"), dynamic_sampling=False),
            model=dapo_jax.Model(folder=folder),
            compute=dapo_jax.Compute(scan_unroll=self.decoder.layers),
            data=dapo_jax.Data(max_prompt_tokens=PROMPT_TOKENS),
            rollout=dapo_jax.Rollout(self.prompts, self.group, updates_per_rollout=1),
            sampler=dapo_jax.Sampler(
                slots=self.slots, burst_tokens=32, max_response_tokens=self.new_tokens
            ),
            optimizer=dapo_jax.Optimizer(learning_rate=1e-5),
            packing=dapo_jax.Packing(self.row_tokens, self.rows_per_microbatch),
            mesh=dapo_jax.Mesh(data=-1, fsdp=1),
            log=dapo_jax.Log(tensorboard=False),
        )


WORKLOADS = {
    "uniform": Workload(8, 128, ragged=False, rows_per_microbatch=8),
    "real": Workload(64, 512, ragged=True, rows_per_microbatch=4),
    "smoke": Workload(2, 32, False, 2, group=2, slots=4, decoder=SMOKE_DECODER),
}


class RandomPrompts:
    """Endless prompts of 32 random tokens, in place of the data, which is not measured."""

    position = 0

    def __next__(self) -> Prompt:
        self.position += 1
        tokens = np.random.default_rng(self.position).integers(2, VOCAB, PROMPT_TOKENS)
        return Prompt(self.position - 1, str(self.position), "", tokens.astype(np.int32), "1", "")


def write_folder(folder: str, decoder: DecoderConfig) -> None:
    """Write a random model and a tokenizer with a word for each token."""
    params = nn.unbox(init_params(decoder, jax.random.key(0)))
    save_huggingface.save_folder(pathlib.Path(folder), params, decoder, (END,))
    words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(decoder.vocab)}, "t0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.decoder = decoders.Fuse()
    words.save(f"{folder}/tokenizer.json")


def make_batch(workload: Workload) -> tuple[TrainBatch, int, int]:
    """Return rows of a step's responses with random advantages; the microbatches; the tokens."""
    rng, prompts, segments = np.random.default_rng(0), RandomPrompts(), []
    responses = workload.prompts * workload.group
    for i, count in enumerate(np.asarray(workload.limits(rng.normal(size=responses)))):
        tokens = rng.integers(2, VOCAB, count).astype(np.int32)
        done = Completion(tokens, np.zeros(count, np.float32), True, 0, "")
        segments.append(Segment(next(prompts), done, i))
    rollouts, used = pack(segments, workload.row_tokens, workload.rows_per_microbatch)
    on_response = (rollouts.response_index >= 0).astype(np.float32)
    advantages = rng.normal(size=on_response.shape).astype(np.float32)
    weights = on_response / on_response.sum()
    tokens = sum(segment.length for segment in segments)
    return TrainBatch(ScoredBatch(rollouts, None), advantages, weights), used, tokens


class Calls:
    """The calls that are timed; each returns the tokens that it handled."""

    def __init__(self, workload: Workload):
        self.workload = workload
        engine_programs.sample_tokens = workload.draw
        with tempfile.TemporaryDirectory() as folder:
            write_folder(folder, workload.decoder)
            parts = build(workload.config(folder))
            self.parts = dataclasses.replace(parts, prompts=RandomPrompts())
            self.params = parts.first_params()
        self.close = parts.close
        self.learner = parts.learners.policy
        self.batch, self.used, self.tokens = make_batch(workload)
        self.rollouts = 0

    @functools.cached_property
    def state(self) -> TrainerState:
        policy = self.learner.start(jax.tree.map(lambda leaf: leaf.copy(), self.params))
        return TrainerState(0, LearnerStates(policy), SourceState(kept_fraction=1.0))

    def rollout(self) -> int:
        sampler, prompts = self.parts.sampler, RandomPrompts()
        asked = [next(prompts) for _ in range(self.workload.prompts)]
        bench.sample(sampler, self.params, asked, self.workload.group, self.rollouts)
        self.rollouts += 1
        assert sampler.counts.responses == self.workload.prompts * self.workload.group
        tokens = sampler.counts.tokens
        sampler.close()
        return tokens

    def update(self) -> int:
        policy = self.state.learners.policy
        policy, (metrics, _) = self.learner.update(policy, self.batch, self.used, 1e-5)
        self.state = dataclasses.replace(self.state, learners=LearnerStates(policy))
        jax.block_until_ready((policy, metrics))
        return self.tokens

    def step(self) -> float:
        clock = Clock()
        with clock.running():
            self.state, record = train_step(self.parts.trainer(), self.state)
        values = metrics.measure(self.parts.config, record, clock)
        jax.block_until_ready(self.state.learners.policy)
        assert values["trained_groups"] == self.workload.prompts
        return self.workload.prompts * self.workload.group * values["response_tokens_mean"]


def measure(call: Callable[[], float], repeats: int) -> dict[str, float | list[float]]:
    """Return the median of the calls after a first one that compiles and a warm-up."""
    seconds, speeds = [], []
    for _ in range(repeats + 2):
        started = time.perf_counter()
        tokens = call()
        seconds.append(time.perf_counter() - started)
        speeds.append(tokens / seconds[-1])
    return {
        "median_s": round(statistics.median(seconds[2:]), 4),
        "tokens_per_s": round(statistics.median(speeds[2:]), 1),
        "all_s": [round(s, 4) for s in seconds[2:]],
        "first_call_s": round(seconds[0], 2),
    }


def main() -> None:
    args = bench.read_arguments(__doc__, workload="uniform", repeats=5, only=PARTS)
    workload = WORKLOADS[args.workload]
    with contextlib.closing(Calls(workload)) as calls:
        for name in args.only:
            line = {"workload": args.workload, "bench": name}
            line |= measure(getattr(calls, name), args.repeats)
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
