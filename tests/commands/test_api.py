"""What `import dapo_jax` offers a notebook or a script."""

import doctest
import importlib
import inspect
import json
import pydoc
import subprocess
import sys

import pytest

import dapo_jax
from dapo_jax.rewards import functions
from dapo_jax.runtime.settings import ConfigError

OFFERED = [getattr(dapo_jax, name) for name in dapo_jax.__all__]


def quick(base, run_dir, **changes) -> dapo_jax.Config:
    sections = {
        "total_steps": 2,
        "model": dapo_jax.Model(folder=str(base)),
        "data": dapo_jax.Data(min_terms=2, max_terms=3, max_prompt_tokens=8, heldout_problems=0),
        "rollout": dapo_jax.Rollout(4, 4, 2),
        "sampler": dapo_jax.Sampler(slots=16, burst_tokens=8, max_response_tokens=24),
        "packing": dapo_jax.Packing(row_tokens=64, rows_per_microbatch=8),
        "log": dapo_jax.Log(console=False, tensorboard=False),
    }
    return dapo_jax.Config(run_dir=str(run_dir), **sections | changes)


def test_importing_it_imports_nothing_heavy():
    code = (
        "import sys, dapo_jax; dir(dapo_jax); dapo_jax.Config; dapo_jax.train; dapo_jax.sample\n"
        "assert dapo_jax.is_equivalent(r'\\boxed{0.5}', '1/2')\n"
        "heavy = {'tensorflow', 'jetstream', 'orbax', 'matplotlib'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "import dapo_jax.train\n"
        "assert callable(dapo_jax.train) and callable(dapo_jax.evaluate)\n"
        "from dapo_jax.train import train_step\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_what_is_offered_is_there_and_explained():
    for name in dapo_jax.__all__:
        assert inspect.getdoc(getattr(dapo_jax, name)), name
    told = pydoc.plain(pydoc.render_doc(dapo_jax))
    assert "train(" in told and "on_step" in told and "samples per" not in told.split("NAME")[0]
    with pytest.raises(AttributeError, match="'dapo_jax' has no attribute 'trian'"):
        dapo_jax.trian  # noqa: B018


def test_type_checkers_see_the_same_names():
    text = inspect.getsource(dapo_jax)
    typed = text[text.index("if TYPE_CHECKING:") : text.index("def __getattr__")]
    assert all(name in typed for name in dapo_jax.__all__)


@pytest.mark.parametrize(
    "room",
    [
        "dapo_jax.commands.api",
        "dapo_jax.learner.losses",
        "dapo_jax.learner.advantages",
        "dapo_jax.verifier.algebra_process",
        "dapo_jax.algorithms",
    ],
)
def test_examples_in_docstrings_are_true(room, base, tmp_path, alone):
    module = importlib.import_module(room)
    names = {"base": str(base), "run_dir": str(tmp_path / "run"), "dapo_jax": dapo_jax}
    tried = doctest.testmod(module, extraglobs=names, optionflags=doctest.ELLIPSIS)
    assert tried.attempted > 0 and tried.failed == 0


def test_a_run_stops_goes_on_leaves_a_table_and_a_policy_and_is_repeated(base, tmp_path, alone):
    told = []

    def stop_after_one(step, values):
        told.append((step, values["reward"]))
        return True

    config = quick(base, tmp_path / "run")
    stopped = dapo_jax.train(config, on_step=stop_after_one)
    assert stopped.summary is None and [step for step, _ in told] == [1]
    result = dapo_jax.train(config, on_step=lambda *one: told.append(one))
    assert result.summary["steps"] == 2 and [step for step, _ in told] == [1, 2]
    assert result.metrics["step"].to_pylist() == [1, 2]
    assert result.metrics["reward"][0].as_py() == told[0][1]
    (answers,) = result.policy.sample(["1+2="], samples=3)
    assert len(answers) == 3 and result.policy.name.endswith("step 2")
    record = json.loads((tmp_path / "run/config.json").read_text())
    (tmp_path / "again.json").write_text(json.dumps(record | {"run_dir": str(tmp_path / "again")}))
    again = dapo_jax.train(str(tmp_path / "again.json"))
    assert again.metrics["loss"].to_pylist() == result.metrics["loss"].to_pylist()


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
    functions._here.clear()  # as in another program, which only asks the policy
    assert dapo_jax.Policy(config.run_dir).name.endswith("step 1")
    (tmp_path / "from_file").mkdir()
    with pytest.raises(ConfigError, match="must be given by the program"):
        unknown = dapo_jax.Reward(parts="in_process:nobody=1")
        dapo_jax.train(quick(base, tmp_path / "from_file", reward=unknown))


def test_functions_without_a_name_are_refused_at_once(tmp_path):
    config = quick("nowhere", tmp_path)
    for function in (lambda prompt, response, answer: 1.0, print.__call__, Nameless()):
        with pytest.raises(ConfigError, match="import by its name.*in_process=True"):
            dapo_jax.train(config, reward=function)
    with pytest.raises(ConfigError, match="a reward is called as .prompt="):
        dapo_jax.train(config, reward=lambda text: 1.0, in_process=True)


class Nameless:
    """A callable without a name of its own."""

    def __call__(self, prompt: str, response: str, answer: str) -> float:
        return 1.0


def test_wrong_prompts_are_refused(base, alone):
    policy = dapo_jax.Policy(str(base), max_prompt_tokens=8, max_response_tokens=8, slots=4)
    for prompts, words in ((["1+2+3+4+5="], "from 1 to max_prompt_tokens = 8"), ([""], "0 tokens")):
        with pytest.raises(ConfigError, match=words):
            policy.sample(prompts)
    with pytest.raises(ConfigError, match="a folder with a chat template"):
        policy.sample([[{"role": "user", "content": "1+2="}]])
    with pytest.raises(ConfigError, match="samples = 0: must be a whole number above 0"):
        policy.sample(["1+2="], samples=0)
