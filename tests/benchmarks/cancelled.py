"""Milliseconds a token of a long response of `dapo-jax serve`, beside seven that are cancelled.

python tests/benchmarks/cancelled.py            # alone, and beside them; cache slots and paged
python tests/benchmarks/cancelled.py CHECKOUT slots   # of the package in that folder, one cache
"""

import dataclasses
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1]))
sys.path.append(str(pathlib.Path(__file__).resolve().parents[1] / "support"))

import flax.linen as nn
import jax
from served import BYTES_DECODER, END, TOKENIZER, free_port, make_openai

from dapo_jax.model import save_huggingface
from dapo_jax.model.decoder import init_params

DECODER = dataclasses.replace(BYTES_DECODER, embed=64, heads=8, kv_heads=8, head_dim=32, mlp=128)
ROOT = pathlib.Path(__file__).resolve().parents[2]
TOKENS, CANCELLED_AT = 480, 240
FLAGS = "--slots=8 --max_prompt_tokens=40 --max_response_tokens=700 --temperature=0"


def stream(port: int, limit: int) -> list[float]:
    """Return when each token of a response came; leave after `limit` tokens."""
    asked = {"model": "policy", "prompt": "3+4=", "max_tokens": TOKENS, "stream": True}
    times: list[float] = []
    ids = {"return_token_ids": True}
    with make_openai(port).completions.create(**asked, extra_body=ids) as chunks:
        for chunk in chunks:
            times += [time.perf_counter()] * len(chunk.choices[0].token_ids)
            if len(times) >= limit:
                break
    return times


def measure(port: int, cancelled: int) -> float:
    """Return the milliseconds a token of the last third of a response."""
    limits = [TOKENS, *[CANCELLED_AT] * cancelled]
    with ThreadPoolExecutor(len(limits)) as pool:
        times, *_ = pool.map(stream, [port] * len(limits), limits)
    first = TOKENS * 2 // 3
    return 1000 * (times[-1] - times[first]) / (len(times) - first)


def main() -> None:
    package = sys.argv[1] if len(sys.argv) > 1 else str(ROOT)
    params = nn.unbox(init_params(DECODER, jax.random.key(0)))
    params["head"] = (params["head"] * 20).at[:, END].set(0)  # no response ends by itself
    with tempfile.TemporaryDirectory() as folder:
        save_huggingface.save_folder(pathlib.Path(folder), params, DECODER, TOKENIZER.end_ids)
        TOKENIZER.backend.save(f"{folder}/tokenizer.json")
        for cache in sys.argv[2:] or ("slots", "paged"):
            port = free_port()
            flags = [f"--model={folder}", f"--http_port={port}", f"--cache={cache}"]
            command = [sys.executable, "-m", "dapo_jax", "serve", "--served_name=policy"]
            environment = os.environ | {"PYTHONPATH": package, "XLA_FLAGS": ""}
            server = subprocess.Popen(
                [*command, *flags, *FLAGS.split()],
                cwd=package,
                env=environment,
                stdout=subprocess.PIPE,
                text=True,
            )
            try:
                server.stdout.readline()
                measure(port, 7)  # compiles for grown caches
                rounds = [(measure(port, 0), measure(port, 7)) for _ in range(2)]
                alone, beside = map(min, zip(*rounds, strict=True))
                print(f"{cache}: alone {alone:.2f} ms, beside seven {beside:.2f} ms", flush=True)
            finally:
                server.terminate()
                server.wait()


if __name__ == "__main__":
    main()
