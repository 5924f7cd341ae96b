"""lm-evaluation-harness against a served policy: its scores are those of `dapo-jax evaluate`.

LM_EVAL_PYTHON names an interpreter with lm-eval, its `api` extra and transformers; none of them is
installed in CI.
"""

import json
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_runs import ROOT
from soak_server import server

from dapo_jax.config.experiment import Compute
from dapo_jax.data.arithmetic import make_problem
from dapo_jax.data.prompts.tokenizer import Tokenizer
from dapo_jax.model import load_huggingface
from dapo_jax.model.logprobs import Rows, token_logprobs
from dapo_jax.run.compute import numerics
from dapo_jax.runtime.sharding import make_mesh

PROBLEMS = 200
EVALUATED = """
from configs.arithmetic import get_config as arithmetic

def get_config():
    config = arithmetic()
    config.data.heldout_source, config.data.fields = "FILE", "problem=problem,answer=answer"
    config.data.heldout_problems = -1
    return config
"""


def write_problems(folder: pathlib.Path) -> pathlib.Path:
    """Write chains of two to four sums, with first steps to choose from."""
    rows, drawn = [], {}
    for number in range(2 * PROBLEMS):
        problem = make_problem("harness", 0, number, 2, 4)
        drawn[problem.text] = problem  # a repeated problem is one to `evaluate`
    for problem in list(drawn.values())[:PROBLEMS]:
        first = sum(map(int, problem.text.rstrip("=").split("+")[:2]))
        choices = [f"{first + wrong}" for wrong in range(4)]
        answer = {"problem": problem.text, "answer": problem.answer}
        rows.append(answer | {"choices": choices, "label": 0})
    path = folder / "sums.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    for task in pathlib.Path(__file__).with_name("harness_tasks").glob("*.yaml"):
        (folder / task.name).write_text(task.read_text().replace("FILE", str(path)))
    (folder / "evaluated.py").write_text(EVALUATED.replace("FILE", str(path)))
    return path


def harness(folder: pathlib.Path, model: pathlib.Path, port: int, name: str) -> dict:
    """Scores that lm-evaluation-harness gives the model served as `policy`."""
    url = f"http://127.0.0.1:{port}/v1/completions"
    arguments = f"model=policy,base_url={url},num_concurrent=8,max_retries=1,tokenizer={model}"
    arguments += ",tokenizer_backend=huggingface"
    command = [os.environ["LM_EVAL_PYTHON"], "-m", "lm_eval", "--model", "local-completions"]
    command += ["--model_args", arguments, "--include_path", str(folder), "--tasks", name]
    command += ["--batch_size", "4", "--output_path", str(folder / "out" / name)]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "PYTHONPATH": ""}
    caches = {"HF_HOME": str(folder / "hf"), "HF_DATASETS_CACHE": str(folder / "hf")}
    subprocess.run(command, check=True, env=os.environ | offline | caches)
    (found,) = (folder / "out" / name).rglob("results_*.json")
    return json.loads(found.read_text())["results"][name]


def chosen_rightly(model: pathlib.Path, path: pathlib.Path) -> float:
    """Share of problems whose right first step has the largest log-prob, by the trainer's pass."""
    mesh, tokenizer = make_mesh(1, 1, 1, jax.devices()[:1]), Tokenizer.from_folder(model)
    config = load_huggingface.read_config(model, **numerics(Compute(), mesh))
    loaded = jax.device_get(load_huggingface.load_params(str(model), config, mesh))
    params = jax.tree.map(jnp.asarray, loaded)

    @jax.jit
    def score(ids):
        ones, positions = jnp.ones_like(ids), jnp.arange(ids.size)[None]
        options = {"temperature": 1.0, "chunk_tokens": 64}
        return token_logprobs(params, config, Rows(ids, ones, positions), **options)[0][0]

    right = []
    for row in map(json.loads, path.read_text().splitlines()):
        before, scores = tokenizer.encode(row["problem"]), []
        for choice in row["choices"]:
            ids = np.array([before + tokenizer.encode(choice)])
            scores.append(float(score(ids)[len(before) :].sum()))
        right.append(max(scores) == scores[row["label"]])
    return sum(right) / len(right)


@pytest.mark.slow
def test_the_harness_gives_the_scores_of_evaluate(base, tmp_path):
    if "LM_EVAL_PYTHON" not in os.environ:
        pytest.skip("needs lm-evaluation-harness: set LM_EVAL_PYTHON")
    model = pathlib.Path(os.environ.get("LM_EVAL_MODEL", base))
    problems = write_problems(tmp_path)
    described = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>"}
    tokenizer = tmp_path / "tokenizer"
    tokenizer.mkdir()
    (tokenizer / "tokenizer_config.json").write_text(json.dumps(described))
    (tokenizer / "tokenizer.json").write_bytes((model / "tokenizer.json").read_bytes())
    with server(str(model), 0.0, ["--max_prompt_tokens=auto", "--max_response_tokens=auto"]) as (
        _,
        port,
    ):
        drawn = harness(tmp_path, tokenizer, port, "sums")
        chosen = harness(tmp_path, tokenizer, port, "sums_choice")
    command = [sys.executable, "-m", "dapo_jax", "evaluate", f"--model={model}", "--k=1"]
    command += [f"--config={tmp_path / 'evaluated.py'}", "--temperature=0"]
    command += [f"--out={tmp_path / 'evaluation'}"]
    ours = subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    scores = json.loads(ours.stdout.splitlines()[-1])
    ours_chosen = chosen_rightly(model, problems)
    print(f"lm-evaluation-harness: {drawn} {chosen}; ours: {scores} {ours_chosen}")
    assert drawn["exact_match,strict"] == pytest.approx(scores["heldout_accuracy"], abs=1e-9)
    assert chosen["acc,none"] == pytest.approx(ours_chosen, abs=1e-9)
