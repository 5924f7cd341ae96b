"""Parts of run.sh: `python parts.py PART FILE FOLDER [toy]` appends lines of JSON to FILE.

A line has a part, a case, and figures or an error. A case that fails does not stop the others.
"""

import functools
import importlib.metadata
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np

PART, FILE, FOLDER, *TOY = sys.argv[1:]
if PART != "versions":  # which works without this library
    from flax.traverse_util import flatten_dict, unflatten_dict

    from dapo_jax import algorithms
    from dapo_jax.config.experiment import Compute, Lora, Optimizer
    from dapo_jax.learner import batches, policy
    from dapo_jax.model import caches, decode_attention, trainable, training_attention
    from dapo_jax.model.decoder import DecoderConfig, init_params
    from dapo_jax.model.save_huggingface import save_folder
    from dapo_jax.run.build import numerics
    from dapo_jax.runtime import sharding
    from dapo_jax.runtime.storage.models import model_path

PACKAGES = "jax jaxlib jax-cuda13-plugin nvidia-cudnn-cu13 flax optax orbax-checkpoint numpy"
# Tokens per second of prime-rl on one H100 80GB (its benchmarks/baselines, February 2026).
ROWS = {
    "Qwen3-0.6B RL 16384": 11_896,
    "Qwen3-0.6B SFT 16384": 25_486,
    "Qwen3-0.6B RL LoRA 16384": 13_342,
    "Qwen3-0.6B SFT 8192": 26_005,
    "Qwen3-0.6B RL 65536": 10_147,
    "Qwen3-0.6B RL LoRA 65536": 9_967,
    "Qwen3-4B RL LoRA 16384": 6_229,
    "Qwen3-4B RL LoRA 65536": 4_164,
}
WIDTHS = "layers", "embed", "heads", "kv_heads", "head_dim", "mlp", "vocab"
SHAPES = {
    "Qwen3-0.6B": (28, 1024, 16, 8, 128, 3072, 151_936),
    "Qwen3-4B": (36, 2560, 32, 8, 128, 9728, 151_936),
    "SmolLM2-135M": (30, 576, 9, 3, 64, 1536, 49_152),
    "toy": (2, 64, 4, 2, 16, 128, 512),
}
RANDOM = np.random.default_rng(0)
HEADS, KV_HEADS, WIDTH = (4, 2, 16) if TOY else (16, 8, 128)


def attempt(case, function, *arguments, **figures):
    """Write the figures that a function returns, or its error; return True without error."""
    started = time.perf_counter()
    try:
        figures |= function(*arguments)
    except Exception as error:
        figures["error"] = f"{type(error).__name__}: {error}"[:300]
    seconds = round(time.perf_counter() - started, 1)
    line = json.dumps({"part": PART, "case": case, **figures, "seconds": seconds})
    with open(FILE, "a") as file:
        file.write(line + "\n")
    print(line, flush=True)
    return "error" not in figures


def milliseconds(function, *arguments):
    """Return the median time of five calls, after one that compiles."""

    def call(_):
        started = time.perf_counter()
        jax.block_until_ready(function(*arguments))
        return 1e3 * (time.perf_counter() - started)

    return round(sorted(map(call, range(6)))[2], 3)


def distance(actual, expected):
    """Return the norm of the difference of arrays, relative to that of `expected`."""
    a, b = (np.asarray(x, np.float64) for x in (actual, expected))
    return float(f"{np.linalg.norm(a - b) / np.linalg.norm(b):.2e}")


def random_arrays(*shapes):
    return [jnp.asarray(RANDOM.normal(size=shape), jnp.bfloat16) for shape in shapes]


def shape_of(model):
    return dict(zip(WIDTHS, SHAPES["toy" if TOY else model], strict=True)) | {"qkv_bias": False}


def versions():
    device = jax.devices()[0]
    memory = (device.memory_stats() or {}).get("bytes_limit", 0)
    installed = {d.name: d.version for d in importlib.metadata.distributions()}
    figures = {"python": sys.version.split()[0], "card": device.device_kind}
    figures |= {name: installed.get(name, "none") for name in PACKAGES.split()}
    attempt("versions", dict, memory_gib=round(memory / 2**30, 1), **figures)
    query = "nvidia-smi --query-gpu=memory.total,driver_version --format=csv,noheader"
    attempt("driver", lambda: {"text": subprocess.getoutput(query)[:200]})


def attend(name, queries, keys, values, ids, window):
    if name == "jax.nn cudnn":  # for one segment
        options = {"is_causal": True, "implementation": "cudnn"}
        return jax.nn.dot_product_attention(queries, keys, values, **options)
    context = training_attention.Context(jnp.zeros_like(ids), ids)
    options = training_attention.AttentionOptions(window and training_attention.Window(window))
    kernel = training_attention.TRAINING_ATTENTION[name]
    return kernel(queries, keys, values, context, None, options)[0]


def packed(tokens, segments):
    """Return random queries, keys, values, loss weights, and segments with some padding."""
    place, used = np.arange(tokens), tokens if segments == 1 else tokens * 15 // 16
    ids = np.where(place < used, 1 + place * segments // used, 0)[None]
    heads = HEADS, KV_HEADS, KV_HEADS, HEADS
    arrays = random_arrays(*((1, tokens, count, WIDTH) for count in heads))
    return arrays, jnp.asarray(ids, jnp.int32)


@functools.partial(jax.jit, static_argnums=(0, 1))
@functools.partial(jax.grad, argnums=(3, 4, 5), has_aux=True)
def gradients(name, window, ids, queries, keys, values, weights):
    """Return gradients and output of an attention."""
    mixed = attend(name, queries, keys, values, ids, window)
    mixed = jnp.where(ids[..., None, None] > 0, mixed, 0)
    return jnp.sum(mixed.astype(jnp.float32) * weights), mixed


def attention():
    """Compare output and gradients with plain attention in float32, and time long rows."""
    short, long = (128, 256) if TOY else (2048, 16_384)
    forward = jax.jit(attend, static_argnums=(0, 5))

    def measure(name, dtype, segments, window):
        arrays, ids = packed(short, segments)
        exact, given = ([x.astype(kind) for x in arrays] for kind in (jnp.float32, dtype))
        near = window and window // 8
        with jax.default_matmul_precision("highest"):
            expected = gradients("plain", near, ids, *exact)
        trees = map(jax.tree.leaves, (gradients(name, near, ids, *given), expected))
        distances = (distance(*pair) for pair in zip(*trees, strict=True))
        figures = dict(zip(("queries", "keys", "values", "output"), distances, strict=True))
        if name != "plain":  # its scores of a long row don't fit
            arrays, ids = packed(long, segments)
            given = [x.astype(dtype) for x in arrays]
            figures["forward_ms"] = milliseconds(forward, name, *given[:3], ids, window)
            figures["with_gradient_ms"] = milliseconds(gradients, name, window, ids, *given)
        return figures

    cases = [("bfloat16", 6, None), ("bfloat16", 1, None), ("bfloat16", 6, long // 8)]
    for dtype, segments, window in (*cases, ("bfloat16", 40, None), ("float32", 6, None)):
        names = ["cudnn", "blocked", "plain"] + ["jax.nn cudnn"] * (segments == 1)
        for name in names:
            case = f"{dtype}, rows of {short} and {long}, {segments} segments, window {window}"
            attempt(case, measure, name, dtype, segments, window, kernel=name)


def decoding():
    slots, tokens = (4, 64) if TOY else (128, 4096)
    lengths = jnp.asarray(RANDOM.integers(1, tokens + 1, slots), jnp.int32)
    cached = (slots, KV_HEADS, tokens, WIDTH)
    arrays = random_arrays((slots, 1, HEADS, WIDTH), cached, cached)

    def ours(queries, keys, values):
        is_active = jnp.ones(slots, bool)
        context = decode_attention.SlotContext(lengths[:, None] - 1, is_active, None)
        cache = caches.KVCache(keys, values, time_last=False)
        return decode_attention.attend_slots(queries, None, None, context, cache)[0]

    def cudnn(queries, keys, values):
        from jax._src.cudnn import fused_attention_stablehlo as cudnn

        options = {"q_seqlen": jnp.ones(slots, jnp.int32), "kv_seqlen": lengths}
        options |= {"mask_type": cudnn.MaskType.PADDING, "qkv_layout": "BNTH"}
        arrays = queries.swapaxes(1, 2), keys, values
        return cudnn.dot_product_attention(*arrays, scale=WIDTH**-0.5, **options).swapaxes(1, 2)

    def measure(kernel, dtype):
        with jax.default_matmul_precision("highest"):
            expected = jax.jit(ours)(*(array.astype(jnp.float32) for array in arrays))
        call, given = jax.jit(kernel), [array.astype(dtype) for array in arrays]
        return {"output": distance(call(*given), expected), "ms": milliseconds(call, *given)}

    for kernel, dtype in ((ours, "bfloat16"), (cudnn, "bfloat16"), (ours, "float32")):
        case = f"{dtype}, {slots} slots of {tokens}"
        attempt(case, measure, kernel, dtype, kernel=kernel.__name__)


def start(*words, **options):
    """Start the command; its output goes to a file beside the runs."""
    with open(pathlib.Path(FOLDER, "output"), "ab") as output:
        words = sys.executable, "-m", "dapo_jax", *words
        return subprocess.Popen(words, stdout=output, stderr=output, **options)


def finish(*words, **options):
    if code := start(*words, **options).wait():
        output = pathlib.Path(FOLDER, "output").read_text()
        raise RuntimeError(f"exit code {code}: ...{output[-200:]}")


def read_rows(run_dir):
    path = pathlib.Path(run_dir, "metrics.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def train(run_dir, steps, *more):
    settings = {"run_dir": run_dir, "total_steps": steps, "data.heldout_problems": 0}
    if TOY:
        settings |= {"rollout.prompts_per_step": 4, "rollout.updates_per_rollout": 1}
        settings |= {"rollout.samples_per_prompt": 4, "algorithm.dynamic_sampling": "false"}
    words = (f"--config.{name}={value}" for name, value in settings.items())
    return "train", "arithmetic", *words, *more


def steps():
    """Train the packaged policy, and random weights of SmolLM2-135M's shape."""
    run_dir, random, folder = (f"{FOLDER}/{name}" for name in ("arithmetic", "random", "model"))

    def seconds(run_dir, *command):
        finish(*command)
        rows = [row for row in read_rows(run_dir) if "seconds_step" in row]
        names = ("seconds_rollout", "seconds_update", "seconds_step")
        figures = {name: float(np.median([row[name] for row in rows[1:]])) for name in names}
        return {"steps": len(rows), "first_step": rows[0]["seconds_step"]} | figures

    def on_random_weights():
        config = DecoderConfig(**shape_of("SmolLM2-135M"), family="llama")
        params = sharding.unbox(init_params(config, jax.random.key(0)))
        save_folder(folder, jax.device_get(params), config, (1,))
        for path in pathlib.Path(model_path("dapo_jax:arithmetic_base")).glob("tokenizer*"):
            shutil.copy(path, folder)
        more = f"--config.model.folder={folder}", "--config.compute.dtype=bfloat16"
        more += ("--config.reward.parts=dapo_jax.rewards.functions:coin=1",)
        return seconds(random, *train(random, 3 if TOY else 5, *more))

    attempt("arithmetic", seconds, run_dir, *train(run_dir, 3 if TOY else 10))
    attempt("SmolLM2-135M, random", on_random_weights)


def resume():
    """Kill a run within step 4, resume it, and compare it with an uninterrupted one."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_deterministic_ops=true"
    options = {"env": os.environ | {"XLA_FLAGS": flags}}
    folders = whole, killed = f"{FOLDER}/whole", f"{FOLDER}/killed"

    def timeless(row):
        clocks = ("seconds_", "time", "sampled_tokens_per", "trained_tokens_per")
        return {name: value for name, value in row.items() if not name.startswith(clocks)}

    def compare():
        more = "--config.checkpoint.every_steps=1", "--config.compute.dtype=bfloat16"
        more += ("--config.packing.row_tokens=192",)  # the fused attention can express such rows
        finish(*train(whole, 4, *more), **options)
        running = start(*train(killed, 4, *more), **options)
        while running.poll() is None and len(read_rows(killed)) < 3:
            time.sleep(0.02)
        running.kill()
        figures = {"killed": running.wait() == -signal.SIGKILL}
        finish(*train(killed, 4, *more), **options)
        for run_dir in folders:
            finish("export", run_dir, f"--out={run_dir}_exported", **options)
        weights = [pathlib.Path(f"{run_dir}_exported", "model.safetensors") for run_dir in folders]
        metrics = [list(map(timeless, read_rows(run_dir))) for run_dir in folders]
        figures["same_metrics"] = metrics[0] == metrics[1]
        return figures | {"same_weights": weights[0].read_bytes() == weights[1].read_bytes()}

    attempt("kill and resume", compare)


def train_rows(shape, adapters, algorithm, tokens, attention):
    """Return tokens/s of updates of two rows with full recomputation, three after the first."""
    mesh = sharding.make_mesh(1, 1, 1, jax.devices()[:1])
    compute = Compute(dtype="bfloat16", remat="full", attention=attention)
    config = DecoderConfig(**shape, **numerics(compute, mesh, tokens), qk_norm=True, family="qwen3")
    config = trainable.choose_trained(config, 0.0, Lora(rank=16 * adapters))

    def init(key):
        flat = flatten_dict(sharding.unbox(init_params(config, key)), sep="/")
        trained = {path: leaf for path, leaf in flat.items() if trainable.is_trained(path, config)}
        frozen = {p: leaf.astype(jnp.bfloat16) for p, leaf in flat.items() if p not in trained}
        return unflatten_dict(trained, sep="/"), unflatten_dict(frozen, sep="/")

    params, frozen = jax.jit(init)(jax.random.key(0))
    settings = policy.PolicySettings(algorithms.preset(algorithm), compute)
    learner = policy.policy_learner(settings, Optimizer(), config, mesh, frozen=frozen)
    state, size = learner.start(params), (2, 1, tokens)
    del params
    ids = RANDOM.integers(0, config.vocab, size).astype(np.int32)
    place = np.broadcast_to(np.arange(tokens, dtype=np.int32), size)
    old, advantages = RANDOM.normal(-10, 1, (2, *size)).astype(np.float32)
    rows = batches.PackedRows(ids, np.ones_like(ids), place, np.zeros_like(ids), old)
    weights, seconds = np.full(size, 1 / ids.size, np.float32), []
    batch = batches.TrainBatch(batches.ScoredBatch(rows, old), advantages, weights)
    for _ in range(4):
        started = time.perf_counter()
        state, outputs = learner.update(state, batch, 2, 1e-6)
        loss = float(outputs.means["loss"].total)
        seconds.append(time.perf_counter() - started)
    peak = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use", 0)
    figures = {"attention": config.attention, "first_step": round(seconds[0], 1), "loss": loss}
    figures |= {"tokens_per_second": round(3 * ids.size / sum(seconds[1:]))}
    return figures | {"peak_gib_so_far": round(peak / 2**30, 1)}


def rows(model):
    for name, theirs in ROWS.items():
        tokens = int(name.split()[-1])
        if name.startswith(model) and not (TOY and tokens != 16_384):
            algorithm = "sft" if "SFT" in name else "dapo"
            arguments = shape_of(model), "LoRA" in name, algorithm, tokens // (128 if TOY else 1)
            if not attempt(name, train_rows, *arguments, "auto", prime_rl=theirs):
                attempt(name, train_rows, *arguments, "blocked", prime_rl=theirs)


PARTS = {part.__name__: part for part in (versions, attention, decoding, steps, resume)}
PARTS["rows_0p6b"] = functools.partial(rows, "Qwen3-0.6B")
PARTS["rows_4b"] = functools.partial(rows, "Qwen3-4B")

if __name__ == "__main__":
    pathlib.Path(FOLDER).mkdir(parents=True)
    PARTS[PART]()
