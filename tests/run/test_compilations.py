"""A run compiles nothing after its first steps, whatever the response lengths."""

import dataclasses
import json
import os
import subprocess
import sys

import jax
import numpy as np
import pytest
from small_runs import make_quick_config

import dapo_jax
from dapo_jax.config.experiment import Log

COMPILED = "/jax/core/compile/backend_compile_duration"
WARM_STEPS, STEPS = 6, 20


@pytest.mark.slow
def test_twenty_steps_of_varied_lengths_compile_in_the_first_ones_only(
    base, tmp_path, alone, fresh_programs
):
    compiled, by_step, lengths = [0], [], []

    def count(event: str, seconds: float, **_) -> None:
        compiled[0] += event == COMPILED

    def on_step(step: int, values: dict[str, float]) -> None:
        by_step.append(compiled[0])
        lengths.append((values["response_tokens_mean"], values["trained_groups"]))

    config = make_quick_config(base, tmp_path / "run", total_steps=STEPS)
    jax.monitoring.register_event_duration_secs_listener(count)
    dapo_jax.train(config, on_step=on_step)
    assert len(set(lengths)) > STEPS / 2 and len(by_step) == STEPS
    assert by_step[0] > 0 and by_step[WARM_STEPS - 1] == by_step[-2], np.diff(by_step)


TWICE = """
import collections, sys
import jax

import dapo_jax
from dapo_jax.config.files import read_config

events = collections.Counter()
jax.monitoring.register_event_listener(lambda event, **_: events.update([event]))
jax.jit(lambda x: x + 1)(1)  # a notebook has compiled something before
for run in range(int(sys.argv[3])):
    config = read_config(dapo_jax.Config, sys.argv[1])
    config.run_dir = f"{sys.argv[2]}/{run}"
    before = events.copy()
    dapo_jax.train(config)
    cache = "/jax/compilation_cache"
    asked, hits = (events[f"{cache}/{name}"] - before[f"{cache}/{name}"]
                   for name in ("compile_requests_use_cache", "cache_hits"))
    print(asked, hits, jax.config.jax_compilation_cache_dir)
"""


@pytest.mark.slow
def test_a_second_run_and_the_next_process_compile_nothing(base, tmp_path):
    """By the Python API, in a cache of its own beside that of the tests."""
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path)}
    for name in ("JAX_COMPILATION_CACHE_DIR", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"):
        environment.pop(name, None)
    environment["XLA_FLAGS"] += " --xla_force_host_platform_device_count=1"  # the last counts

    settings = make_quick_config(base, tmp_path, log=Log(console=False, report=False))
    (tmp_path / "config.json").write_text(json.dumps(dataclasses.asdict(settings)))

    def call(folder: str, runs: int) -> list[list[str]]:
        command = [
            sys.executable,
            "-c",
            TWICE,
            tmp_path / "config.json",
            tmp_path / folder,
            str(runs),
        ]
        output = subprocess.check_output(command, env=environment, text=True)
        return [line.split() for line in output.splitlines() if line.endswith("/dapo_jax")]

    first, second = call("one", 2)
    (third,) = call("two", 1)
    assert first[1] != first[0] and first[2] == f"{tmp_path}/dapo_jax"
    assert second[0] == "0" and third[0] == third[1] != "0"


def test_compilation_cache_of_the_program_is_kept(tmp_path):
    code = (
        "import jax; from dapo_jax.runtime import processes\n"
        f"jax.config.update('jax_compilation_cache_dir', '{tmp_path}')\n"
        "processes.set_compilation_cache(); print(jax.config.jax_compilation_cache_dir)"
    )
    environment = {n: v for n, v in os.environ.items() if n != "JAX_COMPILATION_CACHE_DIR"}
    output = subprocess.check_output([sys.executable, "-c", code], env=environment, text=True)
    assert output.strip() == str(tmp_path)
