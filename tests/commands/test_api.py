"""The Python API: what `import dapo_jax` provides."""

import dataclasses
import doctest
import importlib
import inspect
import json
import pydoc
import subprocess
import sys
import threading

import numpy as np
import pytest
from supervised_runs import pair_rows, settings

import dapo_jax
from dapo_jax.commands import api
from dapo_jax.runtime.workers import pickled_functions
from dapo_jax.types.errors import ConfigError


def quick(base, run_dir, **changes) -> dapo_jax.Config:
    sections = {
        "total_steps": 2,
        "model": dapo_jax.Model(folder=str(base)),
        "data": dapo_jax.Data(min_terms=2, max_terms=3, max_prompt_tokens=8, heldout_problems=0),
        "rollout": dapo_jax.Rollout(4, 4, 2),
        "sampler": dapo_jax.Sampler(slots=16, max_response_tokens=24),  # as in the examples
        "packing": dapo_jax.Packing(row_tokens=64, rows_per_microbatch=8),
        "log": dapo_jax.Log(console=False, tensorboard=False),
    }
    return dapo_jax.Config(run_dir=str(run_dir), **sections | changes)


def test_a_list_of_rewards_is_rejected_with_what_to_write():
    with pytest.raises(ConfigError, match=r"must be a function, or weights by function: reward={f"):
        dapo_jax.train(dapo_jax.Config(), reward=[len])  # pyright: ignore[reportArgumentType]


def test_a_preset_behind_a_file_works_in_python(tmp_path):
    (tmp_path / "mine.yaml").write_text("run_dir: runs/mine")
    config = api.load(tmp_path / "mine.yaml:grpo", dapo_jax.Config)
    assert config.algorithm == dapo_jax.preset("grpo") and config.run_dir == "runs/mine_grpo"


def test_import_loads_no_heavy_module():
    code = (
        "import sys, dapo_jax; dapo_jax.Config()  # as `--help` and a wrong flag do\n"
        "heavy = {'jax', 'numpy', 'asyncio', 'yaml'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "dir(dapo_jax); dapo_jax.train; dapo_jax.sample\n"
        "assert dapo_jax.is_equivalent(r'\\boxed{0.5}', '1/2')\n"
        "heavy = {'tensorflow', 'jetstream', 'orbax', 'matplotlib'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    importlib.import_module("dapo_jax.step")
    assert callable(dapo_jax.train) and callable(dapo_jax.evaluate)


def test_public_names_exist_and_have_docstrings():
    for name in dapo_jax.__all__:
        assert inspect.getdoc(getattr(dapo_jax, name)), name
    text = pydoc.plain(pydoc.render_doc(dapo_jax))
    assert "train(" in text and "on_step" in text and "samples per" not in text.split("NAME")[0]
    with pytest.raises(AttributeError, match="'dapo_jax' has no attribute 'trian'"):
        dapo_jax.trian  # noqa: B018


def test_type_checkers_see_the_same_names():
    text = inspect.getsource(dapo_jax)
    typed = text[text.index("if TYPE_CHECKING:") : text.index("def __getattr__")]
    assert all(name in typed for name in dapo_jax.__all__)


@pytest.mark.parametrize(
    "module_name",
    [
        "dapo_jax.commands.api",
        "dapo_jax.run.policy",
        "dapo_jax.learner.losses",
        "dapo_jax.learner.advantages",
        "dapo_jax.extras.math.algebra_process",
        "dapo_jax.config.algorithms",
    ],
)
def test_examples_in_docstrings_are_true(module_name, base, tmp_path, alone):
    module = importlib.import_module(module_name)
    names = {"base": str(base), "run_dir": str(tmp_path / "run"), "dapo_jax": dapo_jax}
    result = doctest.testmod(module, extraglobs=names, optionflags=doctest.ELLIPSIS)
    assert result.attempted > 0 and result.failed == 0


def test_run_stops_resumes_has_metrics_and_policy_and_is_repeatable(base, tmp_path, alone):
    steps = []

    def stop_after_one(step, values):
        steps.append((step, values["reward"]))
        return values["reward"] < np.float64(9)  # numpy's own True

    config = quick(base, tmp_path / "run")
    stopped = dapo_jax.train(config, on_step=stop_after_one)
    assert stopped.summary is None and [step for step, _ in steps] == [1]
    result = dapo_jax.train(config, on_step=lambda *row: steps.append(row))
    assert result.summary["steps"] == 2 and [step for step, _ in steps] == [1, 2]
    assert result.metrics["step"].to_pylist() == [1, 2]
    assert result.metrics["reward"][0].as_py() == steps[0][1]
    (answers,) = result.policy.generate(["1+2="], samples=3)
    assert len(answers) == 3 and result.policy.name.endswith("step 2")
    assert "step 2: prompts of at most 512 tokens" in repr(result.policy)
    assert "'steps': 2" in repr(result) and len(repr(result)) < 500
    exported = result.policy.save_pretrained(tmp_path / "exported", dtype="float32")
    again = dapo_jax.export(result.run_dir, tmp_path / "by_name", dtype="float32")
    weights = [(folder / "model.safetensors").read_bytes() for folder in (exported, again)]
    assert weights[0] == weights[1]
    assert {answer.policy_step for answer in answers} == {2}
    same = dapo_jax.sample(exported, ["1+2="], samples=3, max_response_tokens=512)
    assert [answer.text for answer in same[0]] == [answer.text for answer in answers]
    page = dapo_jax.report(result.run_dir, out=tmp_path / "page.html")
    assert page.is_file() and "<html" in page.read_text()[:1000]
    record = json.loads((tmp_path / "run/config.json").read_text())
    (tmp_path / "again.json").write_text(json.dumps(record | {"run_dir": str(tmp_path / "again")}))
    again = dapo_jax.train(str(tmp_path / "again.json"))
    assert again.metrics["loss"].to_pylist() == result.metrics["loss"].to_pylist()


def test_folders_of_supervised_training_have_a_table_and_a_policy(base, tmp_path, alone):
    changes = settings(tmp_path, pair_rows(), base)
    changes["data"].passes = 1.0
    preferring = dapo_jax.dpo(dapo_jax.DpoConfig(**changes))
    assert preferring.path == str(tmp_path / "out") and not preferring.stopped
    assert preferring.metrics["step"].to_pylist() == [0, 1, 2]
    assert preferring.metrics["gradient_norm"][2].as_py() > 0
    (answers,) = preferring.policy.sample(["1+2="], samples=2)
    assert len(answers) == 2
    with pytest.raises(ConfigError, match="a model folder is saved already, copy it"):
        preferring.policy.save_pretrained(tmp_path / "copy")


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: dapo_jax.sft(dapo_jax.Config()), "must be a SftConfig or a file's name"),
        (lambda: dapo_jax.sft(dapo_jax.SftConfig()), "config.total_steps = 0: must be above 0"),
        (lambda: dapo_jax.dpo(dapo_jax.DpoConfig()), "config.data.source = ''"),
        (lambda: dapo_jax.export("nowhere", "out"), "config.run = 'nowhere'"),
        (lambda: dapo_jax.export("a", "b", shards=3), "ExportConfig.shards: there is no such"),
        (lambda: dapo_jax.plan(dapo_jax.Config(), topology="v7:8"), "topology = 'v7:8'"),
        (lambda: dapo_jax.evaluate(dapo_jax.Config(), top_k=1), "no argument 'top_k'; did you"),
    ],
)
def test_wrong_arguments_raise_the_errors_of_the_commands(call, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as error:
        call()
    assert words in str(error.value)


def test_a_reward_is_a_python_function(base, tmp_path, alone, write_module):
    write_module("mine", "def digits(prompt, response, answer):\n    return len(response)\n")
    mine = importlib.import_module("mine")
    spread = dapo_jax.Reward(correct="spread")
    algorithm, rollout = dapo_jax.preset("reinforce"), dapo_jax.Rollout(4, 4, 1)
    sections = {"reward": spread, "algorithm": algorithm, "rollout": rollout}
    config = quick(base, tmp_path / "named", total_steps=1, **sections)
    named = dapo_jax.train(config, reward={"rule": 1.0, mine.digits: 0.5}).metrics
    assert min(named["reward_parts/mine:digits"].to_pylist()) > 0
    config.run_dir = str(tmp_path / "here")
    calls = []

    def count(prompt, response, answer):
        calls.append(response)
        return 0.5 * len(response)

    here = dapo_jax.train(config, reward={"rule": 1, count: 1}, in_process=True).metrics
    (column,) = [name for name in here.column_names if "in_process" in name]
    assert calls and here[column].to_pylist() == named["reward_parts/mine:digits"].to_pylist()
    assert here["loss"].to_pylist() == named["loss"].to_pylist()
    program = dapo_jax.train(
        dataclasses.replace(config, run_dir=str(tmp_path / "given")),
        reward={"rule": 1, (lambda prompt, response, answer: 0.5 * len(response)): 1},
    ).metrics
    assert program["loss"].to_pylist() == named["loss"].to_pylist()
    assert program["reward_parts/given:lambda"].to_pylist() == here[column].to_pylist()
    pickled_functions._functions.clear()  # as in another program, which only asks the policy
    assert dapo_jax.Policy(config.run_dir).name.endswith("step 1")
    (tmp_path / "from_file").mkdir()
    with pytest.raises(ConfigError, match="must be given by the program"):
        unknown = dapo_jax.Reward(parts="in_process:nobody=1")
        dapo_jax.train(quick(base, tmp_path / "from_file", reward=unknown))


def test_functions_that_workers_cannot_copy_or_call_are_rejected(tmp_path):
    config, lock = quick("nowhere", tmp_path), threading.Lock()
    with pytest.raises(ConfigError, match="variable `lock`: TypeError.*in_process=True"):
        dapo_jax.train(config, reward=lambda prompt, response, answer: float(lock.locked()))
    for in_process in (True, False):
        with pytest.raises(ConfigError, match="a reward is called as .prompt="):
            dapo_jax.train(config, reward=lambda text: 1.0, in_process=in_process)
    with pytest.raises(ConfigError, match="= 3: must be a function"):
        dapo_jax.train(config, reward=3)


class ReadsAnswer:
    """An environment that shows the answer, with which it was given."""

    def reset(self, problem):
        return f"{int(problem.answer)}+1="

    def step(self, text):
        return dapo_jax.Observation(done=True)


def test_an_environment_gets_the_answers(base, alone):
    policy = dapo_jax.Policy(str(base), max_prompt_tokens=8, max_response_tokens=8, slots=4)
    given = {"environment": ReadsAnswer, "answers": ["3", "4"]}
    found = policy.sample(["1+2=", "2+2="], temperature=0, **given)
    plain = policy.sample(["3+1=", "4+1="], temperature=0)
    assert [own[0].text for own in found] == [own[0].text for own in plain]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"max_tokens": 24}, "there is no argument 'max_tokens'; did you mean"),
        ({"top_p": 3.0}, "top_p = 3.0: must be"),
        ({"answers": ["1", "2"]}, "answers = ['1', '2']: must be a list of 1 texts"),
        ({"environment": "nix"}, "environment.name = 'nix': must be"),
        ({"environment": "nix_module:Nix"}, "No module named 'nix_module'"),
        ({"tools": [print]}, "tools = 1: must be none, or prompts that are messages"),
        ({"prompts": "1+2="}, "prompts = '1+2=': must be a list"),
    ],
)
def test_arguments_of_sample_are_checked_before_a_model_is_opened(arguments, words, monkeypatch):
    def opened(*_, **__):
        raise AssertionError("a model was opened")

    monkeypatch.setattr(dapo_jax.Policy, "__init__", opened)
    with pytest.raises(ConfigError) as raised:
        dapo_jax.sample("nowhere", **{"prompts": ["1+2="], **arguments})
    assert words in str(raised.value)
