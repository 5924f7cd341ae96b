"""Recipes of tinker-cookbook, unmodified, against a server with a small policy over bytes.

    COOKBOOK_PYTHON=.../bin/python pytest -m slow tests/commands/test_tinker_cookbook.py -s

That interpreter has tinker-cookbook 0.6.1, torch and transformers. The recipes find the policy's
tokenizer and the data sets in the folder where they start, under the names of the hub.
"""

import dataclasses
import json
import os
import pathlib
import random
import subprocess

import flax.linen as nn
import jax
import pytest
from conftest import TINY
from served import TOKENIZER
from tinker_served import TinkerServer

from dapo_jax.model import save_huggingface
from dapo_jax.model.decoder import init_params

PYTHON = os.environ.get("COOKBOOK_PYTHON", "")
NAME = "Qwen/Qwen3-8B-Base"
DECODER = dataclasses.replace(
    TINY, vocab=288, embed=128, heads=4, kv_heads=2, head_dim=32, mlp=256, layers=2
)
SUFFIX = " Provide a numerical answer without units, written inside \\boxed{}."
EXAMPLE = (
    "How many r's are in strawberry?",
    "Let's spell the word out and number all the letters: 1) s 2) t 3) r 4) a 5) w 6) b 7) e 8) r "
    "9) r 10) y. We have r's at positions 3, 8, and 9. \\boxed{3}",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> pathlib.Path:
    """Folder of the recipes: the policy, and the two data sets."""
    root = tmp_path_factory.mktemp("cookbook")
    policy = root / NAME
    params = nn.unbox(init_params(DECODER, jax.random.key(0)))
    save_huggingface.save_folder(policy, params, DECODER, TOKENIZER.end_ids)
    TOKENIZER.backend.save(str(policy / "tokenizer.json"))
    classes = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>"}
    (policy / "tokenizer_config.json").write_text(json.dumps(classes))
    chance = random.Random(0)
    # The supervised answers are any of four numbers; the right one of the second set is always 3.
    rows = [{"messages": messages(f"Number {i}", chance.choice("1234"))} for i in range(640)]
    write(root / "HuggingFaceH4/no_robots", "default", {"train": rows, "test": rows[:8]})
    rows = [{"question": f"Number {i}", "answer": "#### 3"} for i in range(640)]
    write(root / "openai/gsm8k", "main", {"train": rows, "test": rows[:8]})
    return root


def messages(question: str, answer: str) -> list[dict]:
    texts = [EXAMPLE[0] + SUFFIX, EXAMPLE[1], question + SUFFIX, f"\\boxed{{{answer}}}"]
    return [
        {"role": role, "content": text}
        for role, text in zip(["user", "assistant"] * 2, texts, strict=True)
    ]


def write(folder: pathlib.Path, config: str, splits: dict[str, list]) -> None:
    folder.mkdir(parents=True)
    files = ""
    for name, rows in splits.items():
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
        files += f"  - split: {name}\n    path: {name}.jsonl\n"
    head = f"---\nconfigs:\n- config_name: {config}\n  data_files:\n{files}---\n"
    (folder / "README.md").write_text(head)


@pytest.fixture(scope="module")
def server(folder, tmp_path_factory):
    flags = [f"--served_name={NAME}", "--max_prompt_tokens=1000", "--max_response_tokens=24"]
    flags += ["--slots=32", "--max_body_mb=8"]
    server = TinkerServer(folder / NAME, tmp_path_factory.mktemp("state") / "tinker", *flags)
    yield server
    server.kill()


def run_recipe(name: str, folder: pathlib.Path, *options: str) -> list[dict]:
    """Return the metrics of each step of a recipe."""
    log = folder / name
    environment = os.environ | {"TINKER_API_KEY": "tml-any", "HF_HUB_OFFLINE": "1"}
    environment |= {"TINKER_TELEMETRY": "0", "PYTHONPATH": "", "HF_HOME": str(folder / "cache")}
    command = [PYTHON, "-m", f"tinker_cookbook.recipes.{name}", f"model_name={NAME}"]
    command += [f"log_path={log}", *options]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = (log / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


@pytest.mark.slow
@pytest.mark.skipif(not PYTHON, reason="needs an interpreter with tinker-cookbook")
def test_the_loops_of_the_cookbook(server, folder, capsys):
    url = f"base_url={server.url}"
    options = [url, "batch_size=8", "learning_rate=3e-3", "lora_rank=0", "max_length=1000"]
    metrics = run_recipe("sl_loop", folder, *options, "save_every=0")
    losses = [row["train_mean_nll"] for row in metrics]
    with capsys.disabled():
        print("sl_loop, every tenth:", [round(loss, 3) for loss in losses[::10]])
    assert losses[-1] < 0.2 * losses[0]
    # The second recipe resumes from the state of the first.
    final = json.loads((folder / "sl_loop/checkpoints.jsonl").read_text().splitlines()[-1])
    (folder / "rl_loop").mkdir()
    (folder / "rl_loop/checkpoints.jsonl").write_text(json.dumps(final | {"batch": 0}))
    options = [url, "batch_size=8", "group_size=8", "max_tokens=16", "learning_rate=1e-3"]
    options += ["loss_fn=importance_sampling", "max_steps=12", "save_every=0"]
    metrics = run_recipe("rl_loop", folder, *options)
    rewards = [row["reward/total"] for row in metrics]
    with capsys.disabled():
        print("rl_loop:", [round(reward, 3) for reward in rewards])
    assert sum(rewards[-3:]) > 1.5 * sum(rewards[:3])


@pytest.mark.slow
@pytest.mark.skipif(not PYTHON, reason="needs an interpreter with tinker-cookbook")
def test_math_rl_of_the_cookbook(server, folder):
    """Two steps; a new policy has no right answer yet."""
    options = [f"base_url={server.url}", "env=arithmetic", "groups_per_batch=4", "max_steps=2"]
    options += ["loss_fn=ppo", "lora_rank=8", "save_every=1", "eval_every=0"]
    metrics = run_recipe("math_rl.train", folder, *options)
    assert len(metrics) >= 2
