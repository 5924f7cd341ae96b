"""Commands that write a folder, and what a folder holds."""

import dataclasses
import json
import pathlib
import shutil
import sys
from unittest import mock

import jax
from conftest import TINY

from dapo_jax import algorithms
from dapo_jax.commands import export, train
from dapo_jax.commands.evaluate import main as evaluate_main
from dapo_jax.config.experiment import Checkpoint, Compute, Config, Model, Optimizer
from dapo_jax.config.settings import leaves
from dapo_jax.extras.sft import commands as supervised
from dapo_jax.learner.policy import PolicySettings, policy_learner
from dapo_jax.model import load_huggingface
from dapo_jax.run.build import load_frozen, load_trained
from dapo_jax.run.identity import Record, frozen_content
from dapo_jax.run.store import Checkpoints
from dapo_jax.runtime.storage.output_folder import PREFERRING, TRAINED

ROOT = pathlib.Path(__file__).parents[2]
RL = f"--config={ROOT}/configs/arithmetic.py"
MODEL = "--model=dapo_jax:arithmetic_base"
PAIRS = f"--config.data.source={ROOT}/tests/verifier/verifier_cases.jsonl"
# What each command is called with, the folder to write last.
COMMANDS = {
    "sft": (supervised.sft, [f"--config={ROOT}/configs/arithmetic_base.py"], "--config.out="),
    "dpo": (supervised.dpo, ["--config.start=nowhere", PAIRS], "--config.out="),
    "train": (train.main, [RL], "--config.run_dir="),
    "evaluate": (evaluate_main, [RL, MODEL], "--out="),
    "evaluate_below": (evaluate_main, [RL, MODEL], "--config.run_dir="),
    "export": (export.main, ["--run=RUN"], "--out="),
}
KINDS = {"sft": TRAINED, "dpo": PREFERRING}


def snapshot(folder: pathlib.Path) -> dict[str, tuple]:
    contents = {}
    for path in sorted(folder.rglob("*")):
        status, content = path.lstat(), path.read_bytes() if path.is_file() else None
        contents[str(path)] = status.st_mode, status.st_mtime_ns, content
    return contents


def call(command: str, folder, run_dir: str = "nowhere") -> int:
    function, arguments, flag = COMMANDS[command]
    line = [argument.replace("RUN", run_dir) for argument in arguments]
    with mock.patch.object(sys, "argv", [command, *line, f"{flag}{folder}"]):
        try:
            return function()
        except SystemExit as stopped:
            return stopped.code


def save_run(tiny_folder, eight_devices, tmp_path_factory) -> tuple[str, pathlib.Path]:
    """Two checkpoints of a policy on eight devices, the first layer frozen; and its folder."""
    source, run_dir = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("run")
    shutil.copytree(tiny_folder, source, dirs_exist_ok=True)
    (source / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages }}"}))
    values = json.loads((source / "config.json").read_text()) | {"max_position_embeddings": 77}
    (source / "config.json").write_text(json.dumps(values))
    half = dataclasses.replace(TINY, frozen_layers=1)
    frozen = load_frozen(source, half, eight_devices)
    learner = policy_learner(
        PolicySettings(algorithms.dapo(), Compute()), Optimizer(), half, eight_devices, frozen
    )
    state = learner.start(load_trained(source, half, eight_devices, seed=0))
    config = Config(model=Model(folder=str(source), freeze_layers=0.5))
    settings = {name: value for name, _, value in leaves(config)}
    settings[frozen_content("model.folder")] = load_huggingface.fingerprint(source)
    checkpoints = Checkpoints(run_dir, Checkpoint())
    for step in (1, 2):
        state = state.replace(params=jax.tree.map(lambda leaf: leaf * 1.01, state.params))
        checkpoints.save(Record(step, settings), {"state": state, "critic": None})
    checkpoints.close()
    return str(run_dir), source
