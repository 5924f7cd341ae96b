"""Check this machine: versions, devices, kernels, decoding, training steps and disks.

    dapo-jax doctor
    dapo-jax doctor --out=runs --bucket=gs://NAME/FOLDER
    dapo-jax doctor --short

It prints a row per check; --out=FOLDER also writes them to doctor.json, without host name,
user name and paths. It takes at most ten minutes; --short uses a small model and takes a minute.
Exit code 0: every check passed; 1: a check failed; 2: wrong arguments.
"""

import contextlib
import dataclasses
import functools
import getpass
import importlib.metadata
import json
import math
import os
import pathlib
import platform
import re
import socket
import tempfile
import time
import timeit
import uuid
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dapo_jax.commands import command_line
from dapo_jax.config import experiment
from dapo_jax.extras.plan.chips import CHIPS, GIB, Chip, Topology
from dapo_jax.extras.plan.flags import PlanSettings
from dapo_jax.extras.plan.programs import Compiler, Layout, lay_out, programs
from dapo_jax.extras.plan.published_shapes import config_values
from dapo_jax.extras.plan.roofline import measure_lengths, step_costs, useful_flops
from dapo_jax.extras.plan.simulate import (
    Costs,
    Meter,
    RolloutRecord,
    SimulatedJudge,
    SimulatedPrompts,
    Simulation,
    Text,
)
from dapo_jax.extras.plan.workload import AssumedWorkload
from dapo_jax.learner.learners import LearnerStates
from dapo_jax.model.decoder import init_params
from dapo_jax.model.training_attention import TRAINING_ATTENTION, AttentionOptions, Context, Window
from dapo_jax.rollout.source import RolloutSource
from dapo_jax.run import memory
from dapo_jax.run.compute import numerics, open_sampler
from dapo_jax.run.step_record import take_steps
from dapo_jax.runtime import processes, sharding
from dapo_jax.runtime.settings import ConfigError, require
from dapo_jax.runtime.storage.paths import folder_at, is_remote
from dapo_jax.types.structs import present

FILE = "doctor.json"
MODEL = "Qwen2.5-0.5B"
TINY = {"hidden_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4}
TINY |= {"intermediate_size": 1024, "vocab_size": 512}
PACKAGES = "dapo_jax jax jaxlib libtpu jax-cuda12-plugin flax optax orbax-checkpoint numpy".split()
# Chips by a part of the name of their devices; the first match counts.
KINDS = {"v5 lite": "v5e", "v5e": "v5e", "v6": "v6e", "v5": "v5p", "v4": "v4"}
KINDS |= {"h100": "h100", "h200": "h200"}
# Largest difference from plain attention in float32, relative to the largest number, and of
# log-probs in nats.
ATTENTION_LIMITS = {"float32": 2e-5, "bfloat16": 3e-2}
LOGPROB_LIMITS = {"float32": 1e-3, "bfloat16": 0.25}
SHARPNESS = 4.0  # factor of random embeddings: log-probs must depend on the context
SEGMENTS = 3  # of a row of attention; its last quarter is padding
PATH = re.compile(r"(\w+:/)?(?<![\w.])/[^\s'\",:;()]+")  # also addresses

Figures = dict[str, Any]


class Sizes(NamedTuple):
    """Sizes of the checks."""

    model: dict[str, int]  # changes to the shape of MODEL
    turn_tokens: int  # of a prompt, and of a response
    row_tokens: int  # of the rows of attention
    matrix: int  # side of the matrices of a product
    file_bytes: int


SHORT = Sizes(TINY, 64, 256, 256, 2**22)
FULL_CPU = Sizes({}, 32, 1280, 2048, 2**28)
FULL = Sizes({}, 256, 2048, 8192, 2**28)


def seconds_of(function: Callable, *arguments: Any) -> float:
    """Return the seconds of the fastest of three calls, after a call that compiles."""

    def call() -> None:
        jax.block_until_ready(function(*arguments))

    call()
    return min(timeit.repeat(call, number=1, repeat=3))


def train_random_policy(layout: Layout, steps: int) -> Figures:
    """Train random weights and return the figures of the last step; an earlier one compiles.

    Log-probs of the sampler are compared with those of the update's forward pass.
    """
    config, decoder, learner = layout.config, layout.decoder, layout.learners.policy

    def init(key: jax.Array) -> Any:
        params = sharding.unbox(init_params(decoder, key))
        return params | {"embedding": SHARPNESS * params["embedding"]}

    params = jax.jit(init, out_shardings=learner.shardings.params)(jax.random.key(0))
    prompts: Any = SimulatedPrompts(workload(config))
    judge: Any = SimulatedJudge(config, RolloutRecord(workload(config), Meter(Costs())))
    sampler = open_sampler(layout.engine, Text(), config.seed)
    source = RolloutSource(config, prompts, sampler, judge)
    states = LearnerStates(learner.start(params))
    taken = list(take_steps(source, layout.learners, decoder, states, steps))
    record, values = taken[-1]
    if values["skipped_updates"]:
        raise ArithmeticError("the update was skipped: numbers are not finite")
    rows, (update,) = present(record.minibatches, "minibatches").rollouts, record.updates
    sampled = np.asarray(rows.response_index[0]) >= 0
    scored = np.asarray(update.token_logprobs)[sampled]
    return {
        "first_step_seconds": taken[0][1]["seconds_step"],
        "step_seconds": values["seconds_step"],
        "decoded_tokens_per_second": values["sampled_tokens_per_second"],
        "difference": float(np.abs(rows.sampler_logprobs[0][sampled] - scored).max()),
        "tokens": len(scored),
        **update_figures(layout, values["seconds_update"]),
    }


def workload(config: experiment.Config) -> AssumedWorkload:
    """Return a workload of prompts and responses that are as long as they may be."""
    prompt, response = config.data.max_prompt_tokens, config.sampler.max_response_tokens
    return AssumedWorkload(
        median_tokens=response,
        spread=1e-6,
        max_response_tokens=response,
        prompt_median_tokens=prompt,
        prompt_spread=1e-6,
        max_prompt_tokens=prompt,
    )


def update_figures(layout: Layout, seconds: float) -> Figures:
    """Return the figures of an update that takes `seconds`."""
    lengths = measure_lengths(layout.config, layout.decoder, workload(layout.config))
    tokens, pairs = lengths.responses * lengths.tokens, lengths.responses * lengths.pairs
    possible = layout.topology.chip.flops_per_second * layout.mesh.size
    return {
        "update_seconds": seconds,
        "update_tokens_per_second": tokens / seconds,
        "update_mfu": useful_flops(layout.decoder, tokens, pairs) / (seconds * possible),
    }


def plan_step(layout: Layout) -> Figures:
    """Return the plan's estimates of the figures of a step."""
    config, decoder = layout.config, layout.decoder
    lengths = measure_lengths(config, decoder, workload(config))
    compiler = Compiler(layout, None)
    wanted = {program.name: program for program in programs(layout, lengths.microbatches)}
    measured = {name: compiler.measure(wanted[name]) for name in ("decode", "update")}
    chip = PlanSettings().reached(layout.topology.chip)
    costs = step_costs(layout, measured, chip, lengths)
    step = Simulation(config, decoder, layout.sampling_mesh, workload(config), costs).step()
    return {
        "decoded_tokens_per_second": step.drawn_tokens / step.rollout_seconds,
        **update_figures(layout, step.update_seconds),
        "update_gib": measured["update"].together / GIB,
    }


def check_speed(folder: str, size: int) -> Figures:
    """Write a file, read it again, and compare."""
    path, content = folder_at(folder, f"doctor-{uuid.uuid4().hex}"), os.urandom(size)
    try:
        started = time.perf_counter()
        with path.open("wb") as file:
            file.write(content)
            if not is_remote(folder):
                file.flush()
                os.fsync(file.fileno())
                if hasattr(os, "posix_fadvise"):  # else the read is from memory, not the disk
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        written = time.perf_counter()
        if path.read_bytes() != content:
            raise OSError("the content read differs from the content written")
        read = time.perf_counter()
    finally:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
    speeds = {"write": written - started, "read": read - written}
    return {f"{name}_mb_per_second": size / s / 1e6 for name, s in speeds.items()}


class Machine:
    """The devices of this machine and their checks."""

    def __init__(self, short: bool):
        devices = jax.devices()
        self.devices = devices[: 1 << (len(devices).bit_length() - 1)]  # a power of two
        self.platform = devices[0].platform
        on_cpu = self.platform == "cpu"
        self.dtype: Any = "float32" if on_cpu else "bfloat16"
        self.sizes = SHORT if short else FULL_CPU if on_cpu else FULL
        self.mesh = sharding.make_mesh(1, 1, 1, self.devices[:1])

    def versions(self) -> Figures:
        copies = {name: [*importlib.metadata.distributions(name=name)] for name in PACKAGES}
        figures = {name: installed[0].version for name, installed in copies.items() if installed}
        return {"python": platform.python_version(), "system": platform.system()} | figures

    def describe(self) -> Figures:
        device, count = self.devices[0], len(jax.devices())
        figures = {"kind": device.device_kind, "platform": self.platform, "count": count}
        limit = (device.memory_stats() or {}).get("bytes_limit")
        return figures | ({"memory_gib": limit / 2**30} if limit else {})

    def host(self) -> Figures:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        sizes = {"memory_gib": total / 2**30, "available_gib": memory.host_bytes() / 2**30}
        return {"cores": os.cpu_count(), **sizes, "machine": platform.machine()}

    @functools.cached_property
    def chip(self) -> tuple[str, Chip]:
        """Name and published figures of the device, else the measured speed of products."""
        kind = self.devices[0].device_kind.lower()
        name = next((chip for part, chip in KINDS.items() if part in kind), "")
        if name:
            return name, CHIPS[name]
        flops = 1e12 * self.rates["tflops"]
        return "cpu", dataclasses.replace(CHIPS["cpu"], flops_per_second=flops)

    @functools.cached_property
    def rates(self) -> Figures:
        """Measured speed of a device at products and copies of matrices while all devices work."""
        mesh, side = sharding.make_mesh(1, -1, 1, self.devices), self.sizes.matrix
        rows = jnp.ones((len(self.devices) * side, side), self.dtype)
        rows = jax.device_put(rows, sharding.sharding(mesh, "batch"))
        product = seconds_of(jax.jit(jnp.matmul), rows, jnp.ones((side, side), self.dtype))
        copy = seconds_of(jax.jit(lambda rows: rows + 1), rows)
        moved = 2 * rows.nbytes / len(self.devices)
        return {"tflops": 2e-12 * side**3 / product, "memory_gb_per_second": 1e-9 * moved / copy}

    def check_attention(self, name: str, width: int, window: Window | None) -> Figures:
        """Compare a kernel with plain attention in float32: output and gradients."""
        tokens = self.sizes.row_tokens
        rng = np.random.default_rng(0)
        arrays = [rng.normal(size=(2, tokens, heads, width)) for heads in (8, 2, 2, 8)]
        place, used = np.arange(tokens), tokens * 3 // 4
        row = np.where(place < used, 1 + place * SEGMENTS // used, 0)
        ids = jnp.asarray(np.stack([row, row]), jnp.int32)
        context, options = Context(jnp.zeros_like(ids), ids), AttentionOptions(window)

        def loss(inputs, weights, attention):
            attend: Callable = TRAINING_ATTENTION[attention]
            mixed, _ = attend(*inputs, context, None, options)
            mixed = jnp.where(ids[..., None, None] > 0, mixed, 0).astype(jnp.float32)
            return jnp.sum(jnp.sin(mixed) * weights), mixed

        step = jax.jit(jax.grad(loss, has_aux=True), static_argnames="attention")

        def run(attention: str, dtype: Any) -> tuple[Any, float]:
            *inputs, weights = (jnp.asarray(array, dtype) for array in arrays)
            call = functools.partial(step, attention=attention)
            with sharding.activate(self.mesh):
                return call(inputs, weights), seconds_of(call, inputs, weights)

        actual, seconds = run(name, self.dtype)
        with jax.default_matmul_precision("highest"):
            exact, _ = run("plain", jnp.float32)
        largest = 0.0
        for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(exact), strict=True):
            a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
            largest = np.maximum(largest, np.abs(a - b).max() / np.abs(b).max())  # keeps NaN
        limit = ATTENTION_LIMITS[self.dtype]
        return {"difference": float(largest), "limit": limit, "call_seconds": seconds}

    def lay_out(self, tiny: bool, cache: Any = "auto") -> Layout:
        """Return a run of the tiny or the full shape."""
        name, chip = self.chip
        tokens = SHORT.turn_tokens if tiny else self.sizes.turn_tokens
        count, on_cpu = len(self.devices), self.platform == "cpu"
        rows = max(4, count) if on_cpu else 8 * count
        values = (config_values(MODEL) or {}) | (TINY if tiny else {})
        sampler: Any = {"slots": rows, "max_response_tokens": tokens, "prefill_prompts": 1}
        with tempfile.TemporaryDirectory() as folder:
            pathlib.Path(folder, "config.json").write_text(json.dumps(values))
            config = experiment.Config(
                model=experiment.Model(folder=folder),
                algorithm=experiment.Algorithm(dynamic_sampling=False),
                compute=experiment.Compute(self.dtype, remat="none" if on_cpu else "full"),
                data=experiment.Data(max_prompt_tokens=tokens),
                rollout=experiment.Rollout(2, rows // 2, updates_per_rollout=1),
                sampler=experiment.Sampler(cache=cache, **sampler),
                packing=experiment.Packing(2 * tokens, rows),
                optimizer=experiment.Optimizer(learning_rate=1e-6),
                log=experiment.Log(token_ratios=True),
            )
            layout = lay_out(config, Topology(f"{name}:{count}", chip, (count,)), self.devices)
        memory.check_run_fits(config, layout.decoder, layout.mesh, layout.sampling_mesh, True)
        return layout

    def check_decoding(self, cache: str) -> Figures:
        """Compare the log-probs of sampled tokens with those of a forward pass."""
        figures = train_random_policy(self.lay_out(True, cache), steps=1)
        return {**figures, "limit": LOGPROB_LIMITS[self.dtype]}

    def attention_checks(self) -> Iterator[tuple[str, Callable[[], Figures]]]:
        """Yield the checks of each kernel that this device can use."""
        tokens = self.sizes.row_tokens
        window = Window(tokens // 4)
        cases = {"heads of 64": (64, None), "heads of 128": (128, None), "window": (64, window)}
        for name in TRAINING_ATTENTION:
            choice: Any = name
            with contextlib.suppress(ConfigError):  # the kernel is for other devices
                numerics(experiment.Compute(self.dtype, attention=choice), self.mesh, tokens)
                for title, case in cases.items():
                    check = functools.partial(self.check_attention, name, *case)
                    yield f"attention {name}, {title}", check

    def checks(self) -> Iterator[tuple[str, Callable[[], Figures]]]:
        """Yield the names and functions of the checks of versions, devices and programs."""
        yield "versions", self.versions
        yield "devices", self.describe
        yield "host", self.host
        yield "matrix product and copy", lambda: self.rates
        yield from self.attention_checks()
        for cache in ("slots", "paged"):
            check = functools.partial(self.check_decoding, cache)
            yield f"decoding, {cache}, against forward", check
        tiny = bool(self.sizes.model)
        model = "a small model" if tiny else MODEL
        yield f"plan: step of {model}", lambda: plan_step(self.lay_out(tiny))
        yield f"measured: step of {model}", lambda: train_random_policy(self.lay_out(tiny), 2)


class Report:
    """Rows of finished checks; each is printed and saved at once."""

    def __init__(self, folder: str, private: list[str]):
        self._path = pathlib.Path(folder, FILE) if folder else None
        self._private = [name for name in private if len(name) > 1]
        self.rows: dict[str, Figures] = {}

    def run(self, name: str, check: Callable[[], Figures]) -> None:
        """Run a check; it fails if it raises, or if its `difference` is not within its `limit`."""
        self.rows[name] = {"ok": False, "error": "the process ended during this check"}
        self._save()
        print(f"{name:<34}", end="", flush=True)
        started = time.perf_counter()
        try:
            figures = check()
            ok = figures.get("difference", 0.0) <= figures.get("limit", math.inf)
            row = {"ok": bool(ok)} | figures
        except Exception as error:  # a failure must not hide the other checks
            text = " ".join(f"{type(error).__name__}: {error}".split())[:500]
            row = {"ok": False, "error": self._hide(text)}
        self.rows[name] = row | {"seconds": round(time.perf_counter() - started, 2)}
        self._save()
        shown = ", ".join(f"{key} {_text(value)}" for key, value in row.items() if key != "ok")
        verdict = "ok" if row["ok"] else "FAILED"
        print(f"{verdict:<7}{self.rows[name]['seconds']:>6.1f} s  {processes.printable(shown)}")

    def _hide(self, text: str) -> str:
        """Replace paths, host name and user name in an error message."""
        text = PATH.sub("PATH", text)
        for name in self._private:
            text = re.sub(rf"(?<!\w){re.escape(name)}(?!\w)", "HIDDEN", text)
        return text

    def _save(self) -> None:
        if self._path is None:
            return
        try:
            self._path.write_text(json.dumps(self.rows, indent=1) + "\n")
        except OSError as error:
            allowed = f"a folder that can be written ({error.strerror})"
            require(False, "out", str(self._path.parent), allowed)


def _text(value: Any) -> str:
    if not isinstance(value, float):
        return f"{value}"
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def examine(flags: experiment.DoctorConfig) -> int:
    """Run all checks; return the exit code."""
    exists = not flags.out or pathlib.Path(flags.out).is_dir()
    require(exists, "out", flags.out, "a local folder that exists")
    exists = not flags.bucket or is_remote(flags.bucket) or pathlib.Path(flags.bucket).is_dir()
    require(exists, "bucket", flags.bucket, "gs://NAME/FOLDER, or a folder that exists")
    private = [flags.out, flags.bucket, socket.gethostname()]
    with contextlib.suppress(KeyError, OSError):  # a user without a name
        private.append(getpass.getuser())
    report = Report(flags.out, private)
    machine = Machine(flags.short)
    for name, check in machine.checks():
        report.run(name, check)
    for name, folder in {"output folder": flags.out, "bucket": flags.bucket}.items():
        if folder:
            report.run(name, functools.partial(check_speed, folder, machine.sizes.file_bytes))
    failed = [name for name, row in report.rows.items() if not row["ok"]]
    print(
        f"\n{len(report.rows) - len(failed)} ok, {len(failed)} FAILED"
        + f"; written to {FILE}" * bool(flags.out)
    )
    return 1 if failed else 0


def main() -> int:
    """Run the command."""
    name = "dapo-jax doctor"
    return command_line.run(experiment.DoctorConfig, __doc__, examine, single_process=name)
