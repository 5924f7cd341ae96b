"""Check this machine: versions, devices, attention kernels, decoding with a training step.

    dapo-jax doctor --short --out=runs

It prints a row per check; doctor.json in --out=FOLDER, a bucket's too, has the rows without the
texts of errors. Exit code 0: all passed; 1: one failed; 2: wrong arguments.
"""

import contextlib
import functools
import json
import pathlib
import platform
import tempfile
import time
import types
from collections.abc import Callable, Iterator
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from dapo_jax.config.experiment import Compute, Config
from dapo_jax.config.settings import Section, assign_text, setting
from dapo_jax.extras.plan.chips import parse
from dapo_jax.extras.plan.plan import amount
from dapo_jax.extras.plan.programs import PACKAGES, lay_out, versions
from dapo_jax.extras.plan.published_shapes import config_values
from dapo_jax.model.decoder import init_params
from dapo_jax.model.training_attention import TRAINING_ATTENTION, AttentionOptions, Context, Window
from dapo_jax.rewards.group_rewards import reward_group
from dapo_jax.rollout.scheduler import Scheduler
from dapo_jax.rollout.source import RolloutSource
from dapo_jax.run import command_line
from dapo_jax.run.build import numerics
from dapo_jax.run.metrics import take_steps
from dapo_jax.runtime import processes, sharding
from dapo_jax.runtime.storage.files import folder_at, is_remote
from dapo_jax.types.errors import ConfigError, require
from dapo_jax.types.structs import Prompt, Verdict, present

TINY = {"hidden_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 512}
# Largest differences: of attention, relative to the largest number, and of log-probs in nats.
LIMITS = {"float32": (2e-5, 1e-3), "bfloat16": (3e-2, 0.25)}
Row = dict[str, Any]


class DoctorConfig(Section):
    """Checks of this machine (`dapo-jax doctor`)."""

    out: str = setting("", "Folder for doctor.json; empty: nothing is written.")
    short: bool = setting(False, "Check small sizes, in a minute.")


class Prompts:
    """Endless prompts of 64 tokens."""

    position = 0

    def __next__(self) -> Prompt:
        self.position += 1
        return Prompt(self.position - 1, "", "", np.full(64, 2 + self.position % 500), "", "")


def check_training(cache: str, dtype: str, length: int) -> Row:
    """Train random weights for two steps; sampled log-probs against those of the update."""
    count = 1 << (jax.device_count().bit_length() - 1)  # a power of two
    config, rows = Config(), max(4, count)
    with tempfile.TemporaryDirectory() as folder:
        values = (config_values("Qwen2.5-0.5B") or {}) | TINY
        pathlib.Path(folder, "config.json").write_text(json.dumps(values))
        flags = (
            f"model.folder={folder} compute.dtype={dtype} data.max_prompt_tokens=64 sampler.cache="
            f"{cache} sampler.slots={rows} sampler.max_response_tokens={length} "
            f"rollout.prompts_per_step={rows // 2} rollout.samples_per_prompt=2 "
            "rollout.updates_per_rollout=1 algorithm.dynamic_sampling=false log.token_ratios=true "
            f"packing.row_tokens={64 + length} packing.rows_per_microbatch={rows} "
            "optimizer.learning_rate=1e-6 optimizer.warmup_steps=0"
        )
        for flag in flags.split():
            assign_text(config, *flag.split("=", 1))
        layout = lay_out(config, parse(f"cpu:{count}"), jax.devices()[:count])
    fresh = jax.jit(lambda key: sharding.unbox(init_params(layout.decoder, key)))
    params = jax.device_put(fresh(jax.random.key(0)), layout.learners.policy.shardings.params)
    params["embedding"] *= 4  # so that the context decides more
    both = Verdict(True, None), Verdict(False, None)
    judge: Any = types.SimpleNamespace(groups=list)
    judge.submit = lambda prompt, completions: reward_group(config, prompt, completions, both)
    text: Any = types.SimpleNamespace(pad_id=0, end_ids=(1,), decode_all=lambda r: [""] * len(r))
    sampler, prompts = Scheduler(layout.engine, text, 0), cast(Any, Prompts())
    source = RolloutSource(config, prompts, sampler, judge)
    *_, (record, metrics) = take_steps(source, layout.learners, layout.decoder, params, 2)
    batch, (update,) = present(record.minibatches, "minibatches").rollouts, record.updates
    difference = np.asarray(batch.sampler_logprobs[0]) - np.asarray(update.token_logprobs)
    largest = float(np.abs(difference[np.asarray(batch.response_index[0]) >= 0]).max())
    if metrics["skipped_updates"]:
        raise ArithmeticError("the update was skipped: numbers are not finite")
    return {"difference": largest, "limit": LIMITS[dtype][1], "step_s": metrics["seconds_step"]}


def check_attention(mesh: Any, name: str, dtype: str, tokens: int, width: int, window: Any) -> Row:
    """Compare output and gradients of a kernel with those of plain attention in float32."""
    rng = np.random.default_rng(0)
    arrays = [rng.normal(size=(2, tokens, heads, width)) for heads in (8, 2, 2, 8)]
    ids = jnp.repeat(jnp.asarray([[1, 2, 3, 0]] * 2, jnp.int32), tokens // 4, axis=1)  # 0: padding
    context, options = Context(jnp.zeros_like(ids), ids), AttentionOptions(window)

    def run(attention: str, dtype: str) -> list[Any]:
        def attend(*inputs: Any) -> Any:
            mixed, _ = cast(Any, TRAINING_ATTENTION[attention])(*inputs, context, None, options)
            return jnp.where(ids[..., None, None] > 0, mixed, 0)

        *inputs, weights = (jnp.asarray(array, dtype) for array in arrays)
        with sharding.activate(mesh):
            mixed, gradients = jax.vjp(jax.jit(attend), *inputs)
            return [mixed, *gradients(weights)]

    actual = run(name, dtype)
    with jax.default_matmul_precision("highest"):
        pairs = zip(actual, run("plain", "float32"), strict=True)
    largest = np.max([jnp.abs(a.astype(b.dtype) - b).max() / jnp.abs(b).max() for a, b in pairs])
    return {"difference": float(largest), "limit": LIMITS[dtype][0]}


def checks(flags: DoctorConfig) -> Iterator[tuple[str, Callable[[], Row]]]:
    """Yield the names and functions of all checks."""
    device, short = jax.devices()[0], flags.short
    yield "versions", lambda: {"python": platform.python_version(), "packages": versions(PACKAGES)}
    memory = (device.memory_stats() or {}).get("bytes_limit")
    found = {"kind": device.device_kind, "count": jax.device_count(), "memory_bytes": memory}
    yield "devices", lambda: found
    dtype, tokens = "float32" if device.platform == "cpu" else "bfloat16", 256 if short else 2048
    cases = ("heads of 64", 64, None), ("heads of 128", 128, None), ("window", 64, Window(64))
    mesh = sharding.make_mesh(1, 1, 1, [device])
    for name in TRAINING_ATTENTION:
        with contextlib.suppress(ConfigError):  # the kernel is for other devices
            numerics(Compute(attention=cast(Any, name)), mesh, tokens)
            for title, *case in cases:
                arguments = mesh, name, dtype, tokens, *case
                yield f"attention {name}, {title}", functools.partial(check_attention, *arguments)
    for cache in ("slots", "paged"):
        arguments = cache, dtype, 64 if short else 512
        yield f"training step, {cache}", functools.partial(check_training, *arguments)


def examine(flags: DoctorConfig) -> int:
    """Run all checks; return the exit code."""
    exists = not flags.out or is_remote(flags.out) or pathlib.Path(flags.out).is_dir()
    require(exists, "out", flags.out, "gs://NAME/FOLDER, or a folder that exists")
    rows: dict[str, Row] = {}
    for name, check in checks(flags):
        print(f"{name:<34}", end="", flush=True)
        started = time.perf_counter()
        try:
            row = check()
            shown = ", ".join(f"{k} {amount(v) if type(v) is float else v}" for k, v in row.items())
            row = {"ok": bool(row.get("difference", 0) <= row.get("limit", 0))} | row
        except Exception as error:  # a failure must not hide the other checks
            row, shown = {"ok": False, "error": type(error).__name__}, repr(error)[:500]
        row["seconds"], rows[name] = round(time.perf_counter() - started, 2), row
        verdict = "ok     " if row["ok"] else "FAILED "
        print(f"{verdict}{row['seconds']:>6.1f} s  {processes.printable(shown)}")
        if flags.out:
            folder_at(flags.out, "doctor.json").write_text(json.dumps(rows, indent=1) + "\n")
    failed = sum(not row["ok"] for row in rows.values())
    print(f"\n{len(rows) - failed} ok, {failed} FAILED", "(in doctor.json)" * bool(flags.out))
    return 1 if failed else 0


def main() -> int:
    return command_line.run(
        DoctorConfig, __doc__, examine, needs_arguments=False, single_process="dapo-jax doctor"
    )
