"""Times rollout, update and whole step of dapo_jax on the peers' model and workloads.

    python tests/benchmarks/ours.py --workload uniform --repeats 5
    python tests/benchmarks/ours.py --only update --profile

4.2 M parameters, float32, prompts of 32 tokens, 64 slots, entropy computed in the update.

- uniform: 8 prompts x 8 samples, each response of 128 tokens.
- real: 64 prompts x 8 samples, each response with a limit of its own, drawn from a long-tailed law
  (log-normal, cut at 512 tokens, mean 128).
- smoke: one layer and few short responses, to see that everything runs, and nothing else.

Prints a JSON line per measurement, with the arithmetic of the matrix products alone over a product
of two square matrices timed in the same process; the first (compiling) call is reported apart.
`--profile` prints the seconds of one call by kind of operation, from JAX's profiler. They are
processor seconds: two devices that compute at once count twice. `waiting` is the cores' idle time.
"""

import argparse
import collections
import contextlib
import dataclasses
import gzip
import json
import os
import pathlib
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator

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

from dapo_jax import (
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
    algorithms,
)
from dapo_jax.learner.batches import ScoredBatch, TrainBatch
from dapo_jax.learner.learners import LearnerStates
from dapo_jax.learner.packing import Segment, pack
from dapo_jax.model import save_huggingface
from dapo_jax.model.decoder import DecoderConfig, init_params
from dapo_jax.rollout import engine_programs
from dapo_jax.rollout.sampling import SAMPLE_FOR_TRAINING, sample_tokens
from dapo_jax.rollout.source import SourceState
from dapo_jax.run import step_record
from dapo_jax.run.components import build
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
# The first match counts; a fusion is named after its operations.
KINDS = (
    ("matrix products", re.compile(r"dot|gemm|convolution|ynn")),
    ("exchange between devices", re.compile(r"all-|reduce-scatter|collective|permute")),
    ("exponentials: softmax, SiLU", re.compile(r"exponential|exp|logistic|softmax")),
    ("draws: keys, sorts, arg max", re.compile(r"threefry|rng|sort|argmax|cumsum|shift|xor")),
    ("copies and places", re.compile(r"copy|slice|gather|scatter|concatenate|pad|transpose|cache")),
    ("sums and norms", re.compile(r"reduce|rsqrt")),
)
PARENTS = re.compile(r"^(while|call|conditional|ThunkExecutor|Thunk|custom-call-start)")


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
    matmul: int = 2048  # side of the square matrices that are timed beside it
    keep_groups: bool = False  # the shapes of a run that keeps groups; nothing is written

    @property
    def row_tokens(self) -> int:
        return PROMPT_TOKENS + self.new_tokens

    def limits(self, normal):
        """Return the tokens of responses by standard normal numbers."""
        if not self.ragged:
            return jnp.full(normal.shape, self.new_tokens)
        drawn = jnp.ceil(MEDIAN_TOKENS * jnp.exp(SPREAD * normal))
        return jnp.minimum(drawn, self.new_tokens).astype(int)

    def draw(self, logits, keys, positions, rule):
        """Draw as the sampler does, but end each response at its own limit and nowhere else."""
        tokens, logprobs = sample_tokens(logits, keys, positions, rule)
        apart = jax.vmap(lambda key: jax.random.normal(jax.random.fold_in(key, 2**31 - 1)))
        last = positions + 1 >= self.limits(apart(keys))
        return jnp.where(last, END, jnp.where(tokens == END, OTHER, tokens)), logprobs

    def config(self, folder: str) -> Config:
        """Return one update per rollout batch, as the peers have it; nothing is filtered."""
        return Config(
            algorithm=dataclasses.replace(algorithms.dapo(), dynamic_sampling=False),
            model=Model(folder=folder),
            compute=Compute(scan_unroll=self.decoder.layers),
            data=Data(max_prompt_tokens=PROMPT_TOKENS),
            rollout=Rollout(self.prompts, self.group, updates_per_rollout=1),
            sampler=Sampler(slots=self.slots, burst_tokens=32, max_response_tokens=self.new_tokens),
            optimizer=Optimizer(learning_rate=1e-5),
            packing=Packing(self.row_tokens, self.rows_per_microbatch),
            mesh=Mesh(data=-1, fsdp=1),
            checkpoint=Checkpoint(keep_groups=self.keep_groups),
            log=Log(tensorboard=False),
        )


WORKLOADS = {
    "uniform": Workload(8, 128, ragged=False, rows_per_microbatch=8),
    "real": Workload(64, 512, ragged=True, rows_per_microbatch=4),
    "smoke": Workload(2, 32, False, 2, group=2, slots=4, decoder=SMOKE_DECODER, matmul=128),
}


class RandomPrompts:
    """Endless prompts of 32 random tokens, in place of the data, which is not measured."""

    position = 0

    def __next__(self) -> Prompt:
        self.position += 1
        tokens = np.random.default_rng(self.position).integers(2, VOCAB, PROMPT_TOKENS)
        return Prompt(self.position - 1, str(self.position), "", tokens.astype(np.int32), "1", "")


def write_folder(folder: pathlib.Path, decoder: DecoderConfig) -> None:
    """Write a random model and a tokenizer with a word for each token."""
    params = nn.unbox(init_params(decoder, jax.random.key(0)))
    save_huggingface.save_folder(folder, params, decoder, (END,))
    words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(decoder.vocab)}, "t0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.decoder = decoders.Fuse()
    words.save(str(folder / "tokenizer.json"))


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
            write_folder(pathlib.Path(folder), workload.decoder)
            parts = build(workload.config(folder))
            self.parts = dataclasses.replace(parts, prompts=RandomPrompts())
            self.params = parts.first_params()
        self.learner = parts.learners.policy
        self.batch, self.used, self.tokens = make_batch(workload)
        self.rollouts = 0
        self.run: TrainerState | None = None

    def state(self) -> TrainerState:
        if self.run is None:
            policy = self.learner.start(jax.tree.map(lambda leaf: leaf.copy(), self.params))
            self.run = TrainerState(0, LearnerStates(policy), SourceState(kept_fraction=1.0))
        return self.run

    def rollout(self) -> int:
        """Sample all responses of a step."""
        sampler, prompts = self.parts.sampler, RandomPrompts()
        rule = SamplingRule()
        sampler.begin(self.params, purpose=SAMPLE_FOR_TRAINING, step=self.rollouts, rule=rule)
        self.rollouts += 1
        for _ in range(self.workload.prompts):
            sampler.submit(next(prompts), self.workload.group)
        while not sampler.idle:
            sampler.decode_burst()
        assert sampler.counts.responses == self.workload.prompts * self.workload.group
        tokens = sampler.counts.tokens
        sampler.release()
        return tokens

    def update(self) -> int:
        state = self.state()
        policy, (metrics, _) = self.learner.update(
            state.learners.policy, self.batch, self.used, 1e-5
        )
        self.run = dataclasses.replace(state, learners=LearnerStates(policy))
        jax.block_until_ready((policy, metrics))
        return self.tokens

    def step(self) -> float:
        clock = Clock()
        with clock.running():
            self.run, record = train_step(self.parts.trainer(), self.state())
        values = step_record.measure(self.parts.config, record, clock)
        jax.block_until_ready(self.run.learners.policy)
        assert values["trained_groups"] == self.workload.prompts
        return self.workload.prompts * self.workload.group * values["response_tokens_mean"]


@contextlib.contextmanager
def opened(workload: Workload) -> Iterator[Calls]:
    calls = Calls(workload)
    yield calls
    calls.parts.close()


def matmul_flops(side: int) -> float:
    """Return the FLOP/s of a square product, the best of a few, on all cores."""
    a = jnp.asarray(np.random.default_rng(0).normal(size=(side, side)), jnp.float32)
    product, best = jax.jit(jnp.dot), float("inf")
    for _ in range(6):
        started = time.perf_counter()
        product(a, a).block_until_ready()
        best = min(best, time.perf_counter() - started)
    return 2 * side**3 / best


def measure(call: Callable[[], float], repeats: int) -> dict[str, float | list[float]]:
    """Return the median of the calls after a first one that compiles and a warm-up."""
    started = time.perf_counter()
    call()
    first = time.perf_counter() - started
    call()
    seconds, tokens = [], []
    for _ in range(repeats):
        started = time.perf_counter()
        tokens.append(call())
        seconds.append(time.perf_counter() - started)
    speed = statistics.median(n / s for n, s in zip(tokens, seconds, strict=True))
    return {
        "median_s": round(statistics.median(seconds), 4),
        "tokens_per_s": round(speed, 1),
        "all_s": [round(s, 4) for s in seconds],
        "first_call_s": round(first, 2),
    }


def seconds_by_kind(folder: str) -> dict[str, float]:
    """Return the seconds of the operations in the trace of a folder."""
    (path,) = pathlib.Path(folder).rglob("*.trace.json.gz")
    seconds: collections.Counter[str] = collections.Counter()
    for event in json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]:
        name = event.get("args", {}).get("hlo_op", "")
        if event.get("ph") == "X" and name and not PARENTS.match(name):
            kind = next((kind for kind, names in KINDS if names.search(name)), "other elementwise")
            seconds[kind] += event["dur"] / 1e6
    return dict(seconds)


def profile(name: str, call: Callable[[], float]) -> None:
    """Print the seconds of one call by kind of operation."""
    call()
    call()
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            started = time.perf_counter()
            call()
            wall = time.perf_counter() - started
        seconds = seconds_by_kind(folder)
    cores = min(os.cpu_count() or 1, 2)
    seconds["waiting"] = cores * wall - sum(seconds.values())
    print(f"{name}: {wall:.2f} s on {jax.device_count()} devices")
    bench.print_table(["operations", "processor seconds", "share"])
    for kind, value in sorted(seconds.items(), key=lambda item: -item[1]):
        bench.print_row([kind, f"{value:.3f}", f"{value / (cores * wall):.0%}"])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workload", choices=WORKLOADS, default="uniform")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", default="rollout,update,step")
    parser.add_argument("--keep_groups", action="store_true", help="as such a run samples")
    parser.add_argument("--rows", type=int, default=0, help="per microbatch; 0: the workload's")
    parser.add_argument("--profile", action="store_true", help="seconds by kind of operation")
    args = parser.parse_args()
    workload = dataclasses.replace(WORKLOADS[args.workload], keep_groups=args.keep_groups)
    if args.rows:
        workload = dataclasses.replace(workload, rows_per_microbatch=args.rows)
    with opened(workload) as calls:
        products = 2 * sum(leaf.size for leaf in jax.tree.leaves(calls.params) if leaf.ndim > 1)
        products -= 2 * VOCAB * workload.decoder.embed  # the embedding is looked up
        # Forward and backward; of a step's tokens each is drawn, scored and trained on.
        passes = {"rollout": 1, "update": 3, "step": 5}
        for name in args.only.split(","):
            call = getattr(calls, name)
            if args.profile:
                profile(name, call)
                continue
            line = {"framework": "dapo_jax", "workload": args.workload, "bench": name}
            line |= measure(call, args.repeats)
            gflops = line["tokens_per_s"] * passes[name] * products / 1e9
            line["gflops"] = round(gflops, 1)
            line["matmul_gflops"] = round(matmul_flops(workload.matmul) / 1e9, 1)
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
