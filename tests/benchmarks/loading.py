"""Measure the peak host memory of loading a random model, beyond the parameters.

    python tests/benchmarks/loading.py FOLDER           # writes about 2 GB there if it is new
    python tests/benchmarks/loading.py FOLDER experts   # the same for a mixture of experts

On a CPU the parameters are host memory themselves, so their bytes are taken off. Prints JSON.
"""

import dataclasses
import json
import pathlib
import re
import subprocess
import sys
import time

import jax
import numpy as np

from dapo_jax.model import load_huggingface, param_paths, save_huggingface
from dapo_jax.model.config_json import decoder_to_json
from dapo_jax.model.decoder import DecoderConfig
from dapo_jax.runtime.sharding import make_mesh

SHAPE = DecoderConfig(
    vocab=65_536, layers=20, embed=1024, heads=16, kv_heads=4, head_dim=64, mlp=6144
)
EXPERTS = dataclasses.replace(
    SHAPE,
    layers=12,
    mlp=384,
    family="qwen3_moe",
    qkv_bias=False,
    qk_norm=True,
    experts=32,
    experts_per_token=4,
)


def write(folder: pathlib.Path, config: DecoderConfig) -> None:
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    leaves = (
        (path, save_huggingface.layers_of(path, jax.device_put(rng.standard_normal(shape, "f4"))))
        for path, shape in param_paths.param_shapes(config).items()
    )
    save_huggingface.save_weights(folder, leaves, config, "float32", max_shard_gb=1.0)
    (folder / "config.json").write_text(json.dumps(decoder_to_json(config)))


def memory(field: str) -> int:
    """Return the bytes that this process holds (VmRSS) or has held at most (VmHWM)."""
    status = pathlib.Path("/proc/self/status").read_text()
    return 1024 * int(re.search(rf"{field}:\s+(\d+)", status)[1])


def measure(folder: pathlib.Path) -> dict[str, float]:
    """Load the folder onto one device; return sizes in 10^6 bytes."""
    mesh = make_mesh(1, 1, 1, jax.devices()[:1])
    config = load_huggingface.read_config(folder)
    before = memory("VmRSS")
    started = time.perf_counter()
    params = load_huggingface.load_params(folder, config, mesh)
    seconds = time.perf_counter() - started
    held = sum(array.nbytes for array in jax.tree.leaves(params))
    layers = jax.tree.leaves(params["layers"])
    largest = max(*(a[0].nbytes for a in layers), params["embedding"].nbytes)
    itemsize = {"float32": 4}.get(load_huggingface.stored_dtype(folder), 2)
    sizes = {
        "files": sum(path.stat().st_size for path in folder.glob("*.safetensors")),
        "params": held,
        "beyond_params": memory("VmHWM") - before - held,
        "largest_tensor": largest / 4 * itemsize,
    }
    return {name: size / 1e6 for name, size in sizes.items()} | {"seconds": seconds}


def main() -> None:
    """Measure in a process that has not written the folder."""
    folder = pathlib.Path(sys.argv[1])
    kind = "".join(sys.argv[2:3])
    if kind == "measure":
        print(json.dumps({name: round(value, 1) for name, value in measure(folder).items()}))
        return
    if not folder.exists():
        write(folder, EXPERTS if kind == "experts" else SHAPE)
    subprocess.run([sys.executable, __file__, str(folder), "measure"], check=True)


if __name__ == "__main__":
    main()
