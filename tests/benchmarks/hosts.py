"""Measure the host's seconds of a step by part.

    python tests/benchmarks/hosts.py                                # 8,192 responses of 4k tokens
    python tests/benchmarks/hosts.py --processes 64                 # as the first of so many
    python tests/benchmarks/hosts.py --responses 64 --tokens 100    # seconds

Scheduling, filter, texts, journal, packing, feedback, metrics, traces and rollouts/ are a run's own
code, with the settings of DAPO on 64 chips of v5p. The devices' programs are replaced by programs
that return text of this project's documentation at once, and the reward workers by verdicts of a
workload. With several processes this one is the first; it makes the messages of the others, which
does not count, and no network carries them. Devices wait for some parts; others overlap a burst
(texts), scores and updates (feedback, weights, metrics, traces) or run in a thread of process 0
(files). A bucket's delay for each file is left out.
Prints a table, and a JSON line with the costs of `extras/plan/simulate.py`.
"""

import argparse
import collections
import dataclasses
import functools
import json
import math
import pathlib
import runpy
import tempfile
import time
from typing import Any

import bench
import numpy as np
from etils import epath
from named_meshes import named_mesh
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers

from dapo_jax.config.experiment import Config
from dapo_jax.data.prompts.tokenizer import Tokenizer
from dapo_jax.extras.plan import simulate
from dapo_jax.extras.plan.published_shapes import read_shape
from dapo_jax.extras.plan.simulate import Costs, Meter
from dapo_jax.extras.plan.workload import AssumedWorkload
from dapo_jax.learner.advantages import estimate
from dapo_jax.learner.batches import ScoredBatch
from dapo_jax.learner.minibatches import make_minibatches, make_train_batches
from dapo_jax.learner.score_pass import make_feedback
from dapo_jax.reporting.sinks import write_rollouts
from dapo_jax.rollout.carry_over import open_collection
from dapo_jax.rollout.dynamic_sampling import CollectionHooks, collect
from dapo_jax.rollout.sampling import SAMPLE_FOR_TRAINING
from dapo_jax.rollout.scheduler import Scheduler
from dapo_jax.rollout.source import Rollout
from dapo_jax.run.checkpointing.rollout_journal import RolloutJournal
from dapo_jax.run.compute import open_engine
from dapo_jax.run.step_record import measure, trace
from dapo_jax.runtime import processes
from dapo_jax.runtime.clock import Clock
from dapo_jax.runtime.storage.retries import Storage
from dapo_jax.step import StepRecord
from dapo_jax.types.structs import Completion, Prompt, SamplingRule, with_texts

ROOT = pathlib.Path(__file__).parents[2]
CHIPS, VOCAB, END = 64, 16_384, "<end>"
FIRST = ("journal", "rollouts JSON")  # only process 0
BESIDE = ("texts", "feedback", "metrics", "traces")  # overlap the devices, on the main thread


class Stopwatch:
    """Exclusive seconds of wrapped functions of one thread, by name."""

    def __init__(self):
        self.seconds: dict[str, float] = collections.defaultdict(float)
        self._inside = 0.0

    def wrap(self, name: str, function: Any) -> Any:
        @functools.wraps(function)
        def timed(*args: Any, **named: Any) -> Any:
            outside, self._inside, started = self._inside, 0.0, time.perf_counter()
            result = function(*args, **named)
            spent = time.perf_counter() - started
            self.seconds[name] += spent - self._inside
            self._inside = outside + spent
            return result

        return timed


def train_tokenizer() -> tuple[Tokenizer, np.ndarray]:
    """Train a byte-level BPE on the documentation; return it with the documentation's tokens."""
    texts = [path.read_text() for path in sorted(ROOT.glob("docs/*.md"))]
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    known = {"special_tokens": [END], "initial_alphabet": alphabet, "show_progress": False}
    backend.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=VOCAB, **known))
    tokenizer = Tokenizer(backend, (0,), 0)
    return tokenizer, np.concatenate([tokenizer.encode(text) for text in texts]).astype(np.int32)


class Programs(simulate.SimulatedPrograms):
    """Simulated programs whose responses have tokens and log-probs."""

    def __init__(self, *args: Any, drawn: np.ndarray, **named: Any):
        super().__init__(*args, **named)
        self._drawn = drawn
        logprobs = -np.random.default_rng(0).exponential(0.5, len(drawn))
        self._logprobs = logprobs.astype(np.float32)

    def rows(self, array: np.ndarray, slots: np.ndarray) -> np.ndarray:
        """Return rows with a piece of the text and its end."""
        tokens = array.dtype == np.int32
        source = self._drawn if tokens else self._logprobs
        columns = np.arange(self._settings.max_response_tokens)
        rows = source[(slots[:, None] * 7919 + columns) % len(source)]
        if tokens:
            ended = np.flatnonzero(self._ends[slots])
            rows[ended, self._lengths[slots][ended] - 1] = 0
        return rows


def replace_network(watch: Stopwatch, count: int) -> list[dict]:
    """Replace the messages of other processes; only this process's own work for them counts.

    Returns the verdicts of each process, which the judge fills.
    """
    verdicts: list[dict] = [{} for _ in range(count)]

    def answer(message: str) -> list[str]:
        name, value = json.loads(message)
        values = [["", own] for own in verdicts] if name == "verdicts" else [value] * count
        return [json.dumps([name, value]) for value in values]

    send = watch.wrap("(others)", answer)

    def all_gather_json(value: Any, name: str) -> list[Any]:
        return [json.loads(reply)[1] for reply in send(json.dumps([name, value]))]

    processes.count = lambda: count
    processes.all_gather_json = watch.wrap("messages", all_gather_json)
    return verdicts


class Judge(simulate.SimulatedJudge):
    """Simulated judge; every process has the verdicts of its own prompts."""

    def __init__(self, verdicts: list[dict], tokenizer: Tokenizer, *args: Any):
        super().__init__(*args)
        self._verdicts = verdicts
        self._decode_all = tokenizer.decode_all

    def submit(self, prompt: Prompt, completions: tuple[Completion, ...]) -> Any:
        return super().submit(prompt, with_texts(completions, self._decode_all))

    def groups(self, pending: list) -> list:
        groups = super().groups(pending)
        owners = [group.prompt.index for group in pending]
        verdicts = [[dataclasses.asdict(verdict) for verdict in g.verdicts] for g in groups]
        for own in self._verdicts:
            own.clear()
        for i, owner in enumerate(owners):
            self._verdicts[owner % len(self._verdicts)][str(i)] = verdicts[i]
        assert processes.map_over_hosts(owners, verdicts.__getitem__, "verdicts") == verdicts
        return groups


def make_config(options: argparse.Namespace, folder: str) -> Config:
    """Return the config of DAPO on a pod without a filter, so that all responses are used."""
    config = runpy.run_path(str(ROOT / "configs/dapo_qwen2p5_32b.py"))["get_config"]()
    samples = config.rollout.samples_per_prompt
    prompts = options.responses // samples
    config.rollout = dataclasses.replace(
        config.rollout, prompts_per_step=prompts, updates_per_rollout=min(16, prompts)
    )
    config.algorithm = dataclasses.replace(config.algorithm, dynamic_sampling=False)
    return dataclasses.replace(config, run_dir=folder)


def step(
    config: Config, options: argparse.Namespace, watch: Stopwatch, behind: Stopwatch
) -> dict[str, int]:
    """Run a step of the run's own code and return its counts; `behind` watches the writer."""
    tokenizer, drawn = train_tokenizer()
    tokenizer.decode_all = watch.wrap("texts", tokenizer.decode_all)
    median = options.tokens / math.exp(options.spread**2 / 2)
    limit = config.sampler.max_response_tokens
    workload = AssumedWorkload(median, options.spread, limit)
    record = simulate.RolloutRecord(workload, Meter(Costs()))
    for name in ("draw", "prompt_tokens"):
        object.__setattr__(workload, name, watch.wrap("(engine)", getattr(workload, name)))
    mesh = named_mesh(config.mesh, "tpu", CHIPS)
    decoder = read_shape(config.model.folder)
    made = {"record": record, "drawn": drawn}
    programs = functools.partial(Programs, samples=config.rollout.samples_per_prompt, **made)
    engine = open_engine(config, decoder, mesh, mesh, tokenizer, programs=programs)
    for name in ("prefill", "insert", "generate", "rows"):
        method = watch.wrap("(engine)", getattr(engine.programs, name))
        setattr(engine.programs, name, method)
    sampler = Scheduler(engine, tokenizer, config.seed)
    sampler.begin(None, purpose=SAMPLE_FOR_TRAINING, step=0, rule=SamplingRule())
    verdicts = replace_network(watch, options.processes)
    folder, storage = epath.Path(config.run_dir), Storage()
    storage.attempt = behind.wrap("journal", storage.attempt)
    journal = RolloutJournal(folder, "benchmark", storage)
    batch = watch.wrap("scheduling", collect)(
        open_collection(config, 0.5, 0, (), 0),
        simulate.SimulatedPrompts(workload),
        sampler,
        Judge(verdicts, tokenizer, config, record),
        CollectionHooks(
            on_scored=watch.wrap("journal", journal.add),
            on_burst=lambda _: processes.all_gather_json("", "signals"),
        ),
    )
    packed = watch.wrap("packing", make_minibatches)(config, batch.groups, decoder, mesh)
    old: Any = np.zeros(packed.rollouts.tokens.shape, np.float32)  # where a run has the devices'
    scored = ScoredBatch(packed.rollouts, old, None, None, None)

    def feed_back() -> tuple:
        feedback = make_feedback(config, packed, scored, batch.groups)
        estimates = estimate(config.algorithm, feedback)
        collections.deque(make_train_batches(config, packed, scored, estimates), maxlen=0)
        return feedback, *estimates

    learned = watch.wrap("feedback", feed_back)()
    record = StepRecord(0, Rollout(batch, sampler.counts, 1.0), packed, *learned)
    watch.wrap("metrics", measure)(config, record, Clock())
    traces = watch.wrap("traces", trace)(config, record)
    log, batch = config.log, dataclasses.replace(batch, traces=traces)
    storage.drain()
    write = behind.wrap("rollouts JSON", write_rollouts)
    write(folder, 1, batch, log.token_groups, tokenizer)
    tokens = sum(len(response) for group in batch.groups for response in group.completions)
    files = len(list(folder.glob("groups/*/*.groups")))
    return {"tokens": tokens, "bursts": sampler.counts.bursts, "files": files}


def main() -> None:
    options = bench.read_arguments(
        __doc__,
        responses=8192,
        processes=1,  # of which this is the first
        tokens=4096.0,  # mean of a response before the cut
        spread=0.9,  # of the logarithm of the length
    )
    watch, behind = Stopwatch(), Stopwatch()
    with tempfile.TemporaryDirectory() as folder:
        config = make_config(options, folder)
        counts = step(config, options, watch, behind)
    bench.print_table(["part", "on", "devices wait, s", "beside them, s"])
    parts = {name: spent for name, spent in watch.seconds.items() if name[0] != "("}
    later = {name: parts.pop(name) for name in BESIDE} | behind.seconds
    for name in parts | later:
        spent = [f"{seconds.get(name, 0.0):.2f}" for seconds in (parts, later)]
        bench.print_row([name, "process 0" if name in FIRST else "every process", *spent])
    bench.print_row(["together", "", *(f"{sum(s.values()):.2f}" for s in (parts, later))])
    tokens = counts["tokens"]
    each = {
        "SLOT": parts["scheduling"] / counts["bursts"] / config.sampler.slots,
        "PACKED": parts["packing"] / tokens,
        "WEIGHED": later["feedback"] / tokens,
        "MEASURED": (later["metrics"] + later["traces"]) / tokens,
        "JOURNAL": later["journal"] / tokens,
        "LISTED": later["rollouts JSON"] / tokens,
    }
    costs = {f"{name}_SECONDS": float(f"{cost:.3g}") for name, cost in each.items()}
    print(json.dumps({"seconds": parts, "beside": later, **counts, "costs": costs}))


if __name__ == "__main__":
    main()
