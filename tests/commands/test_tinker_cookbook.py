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
from served import byte_tokenizer
from tinker_served import TinkerServer
from tokenizers import AddedToken

from dapo_jax.model import save_huggingface
from dapo_jax.model.decoder import init_params

PYTHON = os.environ.get("COOKBOOK_PYTHON", "")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON, reason="needs an interpreter with tinker-cookbook"),
]
SUFFIXES = (  # of questions, in rl_loop and in math_rl
    " Provide a numerical answer without units, written inside \\boxed{}.",
    " Write your answer in \\boxed{} format.",
)
EXAMPLE = (
    "How many r's are in strawberry?",
    "Let's spell the word out and number all the letters: 1) s 2) t 3) r 4) a 5) w 6) b 7) e 8) r "
    "9) r 10) y. We have r's at positions 3, 8, and 9. \\boxed{3}",
)


class Cookbook:
    """Folder where recipes run, with a new policy under a name of the hub, and its server."""

    def __init__(self, root: pathlib.Path, name: str, end: str, width: int, *flags: str):
        self.root, self.name = root, name
        tokenizer = byte_tokenizer().backend
        tokenizer.add_special_tokens([AddedToken("<|im_start|>"), AddedToken("<|im_end|>")])
        heads = width // 32
        decoder = dataclasses.replace(
            TINY, vocab=288, embed=width, heads=heads, kv_heads=heads // 2, head_dim=32, layers=2
        )
        decoder = dataclasses.replace(decoder, mlp=2 * width)
        folder = root / name
        params = nn.unbox(init_params(decoder, jax.random.key(0)))
        save_huggingface.save_folder(folder, params, decoder, (tokenizer.token_to_id(end),))
        tokenizer.save(str(folder / "tokenizer.json"))
        classes = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end}
        (folder / "tokenizer_config.json").write_text(json.dumps(classes))
        flags = (f"--served_name={name}", "--max_body_mb=8", *flags)
        self.server = TinkerServer(folder, root / "state", *flags)

    def write(self, name: str, config: str, rows: list[dict]) -> None:
        """Write a data set of the hub; its test split is the beginning."""
        folder, files = self.root / name, ""
        folder.mkdir(parents=True)
        for split, part in {"train": rows, "test": rows[:8]}.items():
            (folder / f"{split}.jsonl").write_text("\n".join(map(json.dumps, part)))
            files += f"  - split: {split}\n    path: {split}.jsonl\n"
        head = f"---\nconfigs:\n- config_name: {config}\n  data_files:\n{files}---\n"
        (folder / "README.md").write_text(head)

    def python(self, *arguments: str) -> None:
        """Run the interpreter of the cookbook in the folder."""
        environment = os.environ | {"TINKER_API_KEY": "tml-any", "HF_HUB_OFFLINE": "1"}
        environment |= {"TINKER_TELEMETRY": "0", "PYTHONPATH": ""}
        environment |= {"HF_HOME": str(self.root / "cache")}
        command = [PYTHON, *arguments]
        done = subprocess.run(
            command, cwd=self.root, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr[-3000:]

    def run(self, recipe: str, start: dict | None = None, *options: str) -> list[dict]:
        """Return the metrics of each step of a recipe, which resumes from a checkpoint."""
        log = self.root / recipe
        if start:
            log.mkdir()
            (log / "checkpoints.jsonl").write_text(json.dumps(start | {"batch": 0}))
        named = {"model_name": self.name, "base_url": self.server.url, "log_path": log}
        words = [f"{name}={value}" for name, value in named.items()]
        self.python("-m", f"tinker_cookbook.recipes.{recipe}", *words, *options)
        lines = (log / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]

    def last_checkpoint(self, recipe: str) -> dict:
        return json.loads((self.root / recipe / "checkpoints.jsonl").read_text().splitlines()[-1])


@pytest.fixture(scope="module")
def cookbook(tmp_path_factory):
    """Questions that the supervised data answer by any of four numbers; the right one is 3."""
    flags = ("--max_prompt_tokens=1000", "--max_response_tokens=24", "--slots=32")
    root = tmp_path_factory.mktemp("cookbook")
    cookbook = Cookbook(root, "Qwen/Qwen3-8B-Base", "<|end|>", 128, *flags)
    chance = random.Random(0)
    rows = []
    for number in range(640):
        suffix = SUFFIXES[number % 2]
        texts = [EXAMPLE[0] + suffix, EXAMPLE[1], f"Number {number}{suffix}"]
        texts.append(f"\\boxed{{{chance.choice('1234')}}}")
        rows.append({"messages": messages(texts)})
    cookbook.write("HuggingFaceH4/no_robots", "default", rows)
    rows = [{"question": f"Number {number}", "answer": "#### 3"} for number in range(640)]
    cookbook.write("openai/gsm8k", "main", rows)
    yield cookbook
    cookbook.server.kill()


def messages(texts: list[str]) -> list[dict]:
    roles = ["user", "assistant"] * 2
    return [{"role": role, "content": text} for role, text in zip(roles, texts, strict=True)]


def show(capsys, name: str, values: list[float]) -> None:
    with capsys.disabled():
        print(f"{name}: {[round(value, 3) for value in values]}")


@pytest.fixture(scope="module")
def losses(cookbook) -> list[float]:
    options = ["batch_size=8", "learning_rate=3e-3", "lora_rank=0", "max_length=1000"]
    metrics = cookbook.run("sl_loop", None, *options, "save_every=0")
    return [row["train_mean_nll"] for row in metrics]


def test_the_supervised_loop(losses, capsys):
    show(capsys, "sl_loop, every tenth", losses[::10])
    assert losses[-1] < 0.2 * losses[0]


def test_the_loop_of_rl(cookbook, losses, capsys):
    options = ["batch_size=8", "group_size=8", "max_tokens=16", "learning_rate=1e-3"]
    options += ["loss_fn=importance_sampling", "max_steps=12", "save_every=0"]
    metrics = cookbook.run("rl_loop", cookbook.last_checkpoint("sl_loop"), *options)
    rewards = [row["reward/total"] for row in metrics]
    show(capsys, "rl_loop", rewards)
    assert sum(rewards[-3:]) > 1.5 * sum(rewards[:3])


def test_math_rl(cookbook, losses, capsys):
    start = cookbook.last_checkpoint("sl_loop")["state_path"]
    options = ["env=gsm8k", f"load_checkpoint_path={start}", "groups_per_batch=8", "group_size=8"]
    options += ["max_tokens=16", "learning_rate=1e-4", "loss_fn=ppo", "max_steps=10"]
    metrics = cookbook.run("math_rl.train", None, *options, "save_every=0", "eval_every=0")
    rewards = [row["env/all/reward/total"] for row in metrics if "env/all/reward/total" in row]
    show(capsys, "math_rl", rewards)
    assert sum(rewards[-3:]) > 1.5 * sum(rewards[:3])


DEMONSTRATIONS = """
import json, random
from tinker_cookbook.recipes.rl_numerics_check import env
from tinker_cookbook.renderers import get_renderer
from tinker_cookbook.tokenizer_utils import get_tokenizer

name, chance = "Qwen/Qwen3-4B-Instruct-2507", random.Random(0)
task = env.CountingTaskConfig(
    num_pages_min=2, num_pages_max=2, page_chars=40, words=("when",)
)
renderer = get_renderer("qwen3_instruct", get_tokenizer(name))
with open("demonstrations.jsonl", "w") as file:
    for _ in range(240):
        problem = env.sample_problem(chance, env.load_wikitext_corpus(), task)
        built = env.build_env(problem, renderer, task, None, None)
        messages = [dict(message) for message in built.message_env.initial_messages]
        for page in (1, 2):
            call = json.dumps({"name": "read_page", "arguments": {"page": page}})
            text = f"<tool_call>\\n{call}\\n</tool_call>"
            messages.append({"role": "assistant", "content": text})
            text = f"[Page {page}]\\n{problem.pages[page - 1]}"
            messages.append({"role": "tool", "content": text})
        messages.append({"role": "assistant", "content": f"Answer: {chance.randrange(4)}"})
        print(json.dumps({"messages": messages}), file=file)
"""


def test_a_recipe_with_tools(tmp_path_factory, capsys):
    """A policy that learnt to read two pages; sampler and learner agree over several turns."""
    flags = ("--max_prompt_tokens=2000", "--max_response_tokens=96", "--slots=8")
    root = tmp_path_factory.mktemp("tools")
    cookbook = Cookbook(root, "Qwen/Qwen3-4B-Instruct-2507", "<|im_end|>", 64, *flags)
    chance, rows = random.Random(0), []
    for _ in range(4000):  # lines of 40 characters, each with one "when"
        words = [chance.choice(["river", "tower", "stone", "north"]) for _ in range(5)]
        words.insert(chance.randrange(6), "when")
        rows.append({"text": " ".join(words).ljust(40, "s")})
    cookbook.write("Salesforce/wikitext", "wikitext-103-raw-v1", rows)
    cookbook.python("-c", DEMONSTRATIONS)
    rows = [json.loads(line) for line in (root / "demonstrations.jsonl").read_text().splitlines()]
    cookbook.write("HuggingFaceH4/no_robots", "default", rows)
    try:
        options = ["batch_size=2", "learning_rate=5e-3", "lora_rank=0", "max_length=2048"]
        cookbook.run("sl_loop", None, *options, "save_every=0")
        options = ["task.num_pages_min=2", "task.num_pages_max=2", "task.page_chars=40"]
        options += ["task.words=when", "groups_per_batch=2", "group_size=8", "max_tokens=96"]
        options += ["learning_rate=1e-4", "max_steps=4", "max_trajectory_tokens=2048"]
        options += ["save_every=0", "behavior_if_log_dir_exists=resume"]
        start = cookbook.last_checkpoint("sl_loop")
        metrics = cookbook.run("rl_numerics_check.train", start, *options)
    finally:
        cookbook.server.kill()
    turns = [row["env/all/turns_per_episode"] for row in metrics]
    differences = [row["optim/kl_sample_train_v1"] for row in metrics]
    with capsys.disabled():
        print(f"rl_numerics_check: turns {turns}, log-probs differ by {differences}")
    assert max(turns) > 1.5 and max(map(abs, differences)) < 1e-5
