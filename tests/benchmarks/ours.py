"""Times rollout, update and whole step of dapo_jax on the peers' model and workloads.

    python tests/benchmarks/ours.py --workload uniform --repeats 5

4.2 M parameters, float32, prompts of 32 tokens, 64 slots, entropy computed in the update.

- uniform: 8 prompts x 8 samples, each response of 128 tokens.
- real: 64 prompts x 8 samples, each response with a limit of its own, drawn from a long-tailed law
  (log-normal, cut at 512 tokens, mean 128).
- smoke: one layer and few short responses, to see that everything runs, and nothing else.

Prints a JSON line per measurement, with the arithmetic of the matrix products alone over a product
of two square matrices timed in the same process; the first (compiling) call is reported apart.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import pathlib
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator

# A device for each core, as launch/env.sh has it.
os.environ.setdefault(
    "XLA_FLAGS", f"--xla_force_host_platform_device_count={1 << os.cpu_count().bit_length() - 1}"
)

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from dapo_jax import algorithms
from dapo_jax.config.experiment import (
    Checkpoint,
    Compute,
    Config,
    Data,
    Log,
    Mesh,
    Model,
    Optimizer,
    Packing,
    Rollout,
    Sampler,
)
from dapo_jax.learner.batches import ScoredBatch, TrainBatch
from dapo_jax.learner.learners import LearnerStates
from dapo_jax.learner.packing import Segment, pack
from dapo_jax.model import save_huggingface
from dapo_jax.model.decoder import DecoderConfig, init_params
from dapo_jax.rollout import decode_step
from dapo_jax.rollout.sampling import SAMPLE_FOR_TRAINING, sample_tokens
from dapo_jax.rollout.source import SourceState
from dapo_jax.run import step_record
from dapo_jax.run.components import Components, build
from dapo_jax.runtime.clock import Clock
from dapo_jax.structs import Completion, Prompt, SamplingRule
from dapo_jax.train import TrainerState, train_step

VOCAB, GROUP, PROMPT_TOKENS, SLOTS = 512, 8, 32, 64
END, OTHER = VOCAB - 1, 2
MEDIAN_TOKENS, SPREAD = 84.0, 1.0  # of the log-normal law; cut at 512 its mean is 128
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
SMOKE_DECODER = dataclasses.replace(DECODER, layers=1, embed=32, head_dim=8, mlp=64)


@dataclasses.dataclass(frozen=True)
class Workload:
    """Sizes of a step; a row of the update holds one of the longest responses.

    Attributes:
        matmul: side of the square matrices that are timed beside it.
    """

    prompts: int
    new_tokens: int  # at most
    ragged: bool
    rows_per_microbatch: int
    group: int = GROUP
    slots: int = SLOTS
    decoder: DecoderConfig = DECODER
    matmul: int = 2048

    @property
    def row_tokens(self) -> int:
        return PROMPT_TOKENS + self.new_tokens

    def limits(self, normal):
        """Tokens of responses by standard normal numbers."""
        if not self.ragged:
            return jnp.full(normal.shape, self.new_tokens)
        drawn = jnp.ceil(MEDIAN_TOKENS * jnp.exp(SPREAD * normal))
        return jnp.minimum(drawn, self.new_tokens).astype(int)


WORKLOADS = {
    "uniform": Workload(8, 128, ragged=False, rows_per_microbatch=8),
    "real": Workload(64, 512, ragged=True, rows_per_microbatch=4),
    "smoke": Workload(2, 32, False, 2, group=2, slots=4, decoder=SMOKE_DECODER, matmul=128),
}


def draw_within(workload: Workload):
    """The sampler's draw, with the end where a response's own limit is and nowhere else."""

    def within(logits, keys, positions, rule):
        tokens, logprobs = sample_tokens(logits, keys, positions, rule)
        apart = jax.vmap(lambda key: jax.random.normal(jax.random.fold_in(key, 2**31 - 1)))
        last = positions + 1 >= workload.limits(apart(keys))
        return jnp.where(last, END, jnp.where(tokens == END, OTHER, tokens)), logprobs

    return within


class RandomPrompts:
    """32 random tokens each, endlessly; stands in for the data, which is not measured."""

    position = 0

    def __next__(self) -> Prompt:
        self.position += 1
        tokens = np.random.default_rng(self.position).integers(2, VOCAB, PROMPT_TOKENS)
        return Prompt(self.position - 1, str(self.position), "", tokens.astype(np.int32), "1", "")


def write_folder(folder: pathlib.Path, decoder: DecoderConfig = DECODER) -> None:
    """A random model, of the peers' shape unless another is given; a word for each token."""
    save_huggingface.save_folder(
        folder, nn.unbox(init_params(decoder, jax.random.key(0))), decoder, (END,)
    )
    words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(decoder.vocab)}, "t0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.decoder = decoders.Fuse()
    words.save(str(folder / "tokenizer.json"))


def make_config(
    folder: pathlib.Path,
    workload: Workload,
    layers: int = DECODER.layers,
    keep_groups: bool = False,
) -> Config:
    """One update per rollout batch, as the peers do; nothing filtered, everything trained."""
    algorithm = algorithms.dapo()
    algorithm.dynamic_sampling = False
    return Config(
        algorithm=algorithm,
        model=Model(folder=str(folder)),
        compute=Compute(scan_unroll=layers),
        data=Data(max_prompt_tokens=PROMPT_TOKENS),
        rollout=Rollout(workload.prompts, workload.group, updates_per_rollout=1),
        sampler=Sampler(
            slots=workload.slots, burst_tokens=32, max_response_tokens=workload.new_tokens
        ),
        optimizer=Optimizer(learning_rate=1e-5),
        packing=Packing(workload.row_tokens, workload.rows_per_microbatch),
        mesh=Mesh(data=-1, fsdp=1),
        checkpoint=Checkpoint(keep_groups=keep_groups),
        log=Log(tensorboard=False),
    )


def matmul_flops(side: int) -> float:
    """FLOP/s of a square product, the best of a few: this machine's, now, on all its cores."""
    a = jnp.asarray(np.random.default_rng(0).normal(size=(side, side)), jnp.float32)
    product, best = jax.jit(jnp.dot), float("inf")
    for _ in range(6):
        started = time.perf_counter()
        product(a, a).block_until_ready()
        best = min(best, time.perf_counter() - started)
    return 2 * side**3 / best


def measure(name: str, run, repeats: int, flops_per_token: float, workload: str) -> None:
    """Prints the median of `repeats` calls after a first one that compiles and a warm-up.

    `run` returns the tokens that it handled.
    """
    started = time.perf_counter()
    run()
    first = time.perf_counter() - started
    run()
    seconds, tokens = [], []
    for _ in range(repeats):
        started = time.perf_counter()
        tokens.append(run())
        seconds.append(time.perf_counter() - started)
    speed = statistics.median(n / s for n, s in zip(tokens, seconds, strict=True))
    peak = matmul_flops(WORKLOADS[workload].matmul)
    line = {
        "framework": "dapo_jax",
        "workload": workload,
        "bench": name,
        "median_s": round(statistics.median(seconds), 4),
        "tokens_per_s": round(speed, 1),
        "all_s": [round(s, 4) for s in seconds],
        "first_call_s": round(first, 2),
        "gflops": round(speed * flops_per_token / 1e9, 1),
        "matmul_gflops": round(peak / 1e9, 1),
    }
    print(json.dumps(line), flush=True)


def rollout(parts: Components, params, step: int, workload: Workload) -> int:
    """All responses of a step; returns their tokens."""
    sampler, prompts = parts.sampler, RandomPrompts()
    sampler.begin(params, purpose=SAMPLE_FOR_TRAINING, step=step, rule=SamplingRule())
    for _ in range(workload.prompts):
        sampler.submit(next(prompts), workload.group)
    while not sampler.idle:
        sampler.decode_burst()
    assert sampler.counts.responses == workload.prompts * workload.group
    assert sampler.counts.prefills == workload.prompts
    tokens = sampler.counts.tokens
    sampler.release()
    return tokens


def make_batch(workload: Workload) -> tuple[TrainBatch, int, int]:
    """Packed rows of a step's responses with random advantages; how many microbatches, tokens."""
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


@contextlib.contextmanager
def measured(
    name: str, rows: int = 0, keep_groups: bool = False
) -> Iterator[dict[str, Callable[[], float]]]:
    """What is timed of a workload, by name; each call returns the tokens that it handled.

    Args:
        rows: per microbatch; 0: the workload's own.
        keep_groups: the shapes of a run that keeps groups; nothing is written.
    """
    workload = WORKLOADS[name]
    if rows:
        workload = dataclasses.replace(workload, rows_per_microbatch=rows)
    decode_step.sample_tokens = draw_within(workload)
    with tempfile.TemporaryDirectory() as folder:
        write_folder(pathlib.Path(folder), workload.decoder)
        layers = workload.decoder.layers
        parts = build(make_config(pathlib.Path(folder), workload, layers, keep_groups))
        parts = dataclasses.replace(parts, prompts=RandomPrompts())
        params = parts.first_params()
    steps = iter(range(10**9))
    learner, trainer = parts.learners.policy, parts.trainer()
    policy = learner.start(jax.tree.map(lambda leaf: leaf.copy(), params))
    run = TrainerState(0, LearnerStates(policy), SourceState(kept_fraction=1.0))
    batch, used, tokens = make_batch(workload)

    def update() -> float:
        nonlocal run
        policy, (metrics, _) = learner.update(run.learners.policy, batch, used, 1e-5)
        run = dataclasses.replace(run, learners=LearnerStates(policy))
        jax.block_until_ready((policy, metrics))
        return tokens

    def step() -> float:
        nonlocal run
        clock = Clock()
        with clock.running():
            run, record = train_step(trainer, run)
        values = step_record.measure(parts.config, record, clock)
        jax.block_until_ready(run.learners.policy)
        assert values["trained_groups"] == workload.prompts
        return workload.prompts * workload.group * values["response_tokens_mean"]

    yield {
        "rollout": lambda: rollout(parts, params, next(steps), workload),
        "update": update,
        "step": step,
    }
    parts.close()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workload", choices=WORKLOADS, default="uniform")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", default="rollout,update,step")
    parser.add_argument("--keep_groups", action="store_true", help="as such a run samples")
    parser.add_argument("--rows", type=int, default=0, help="per microbatch; 0: the workload's")
    args = parser.parse_args()
    decoder = WORKLOADS[args.workload].decoder
    shapes = jax.tree.leaves(jax.eval_shape(lambda: init_params(decoder, jax.random.key(0))))
    products = 2 * sum(leaf.size for leaf in shapes if leaf.ndim > 1)
    products -= 2 * VOCAB * decoder.embed  # the embedding is looked up
    # Forward and backward; of a step's tokens each is drawn, scored and trained on.
    passes = {"rollout": 1, "update": 3, "step": 5}
    with measured(args.workload, args.rows, args.keep_groups) as calls:
        for name in args.only.split(","):
            flops = passes[name] * products
            measure(name, calls[name], args.repeats, flops, args.workload)


if __name__ == "__main__":
    main()
