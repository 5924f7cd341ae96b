"""Learning from own examples and from offline pairs: gradients, runs, adapters, resumption."""

import os
import pathlib
import signal
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import TINY
from learners import assert_close, logprobs_alone
from output_folders import KINDS, snapshot
from row_files import write_lines
from safetensors.numpy import load_file
from several import COMMAND, Several, assert_rounded_alike
from supervised_runs import example_rows, pair_rows, read_metrics, settings

from dapo_jax import algorithms
from dapo_jax.config.experiment import Compute, Lora, Optimizer, Packing
from dapo_jax.config.validation import validate
from dapo_jax.extras.sft import training as supervised
from dapo_jax.extras.sft.rows import Example, Turns
from dapo_jax.extras.sft.settings import DpoConfig, SftConfig
from dapo_jax.extras.sft.training import imitation_batch, train_supervised
from dapo_jax.learner.advantages import estimate
from dapo_jax.learner.packing import pack
from dapo_jax.learner.policy import PolicySettings, policy_learner
from dapo_jax.run.export import SavedPolicy
from dapo_jax.runtime import processes, registry
from dapo_jax.runtime.sharding import to_host
from dapo_jax.runtime.storage.output_folder import replace
from dapo_jax.types.errors import ConfigError

ROW_TOKENS = 20
RNG = np.random.default_rng(5)


def draw(size: int) -> np.ndarray:
    return RNG.integers(2, 32, size).astype(np.int32)


def make_examples() -> list[Example]:
    """Of one answer, of several with turns between them, and one in two parts."""
    parts = []
    for sizes in ((3, 5), (1, 1), (4, 12), (2, 9)):
        trained = RNG.random(sizes[1]) < 0.6
        trained[-1] = True
        parts.append(Turns(draw(sizes[0]), draw(sizes[1]), trained))
    return [Example("a", (parts[0],)), Example("b", (parts[1],)), Example("c", tuple(parts[2:]))]


def make_pairs() -> list[Example]:
    pairs = []
    for size, chosen, rejected in ((3, 5, 2), (1, 1, 9), (6, 7, 7)):
        prompt = draw(size)
        pairs.append(Example("", tuple(Turns.of(prompt, draw(n)) for n in (chosen, rejected))))
    return pairs


def alone(params, turns: Turns):
    """Log-probs of the response's tokens, in a row of its own."""
    row = np.zeros(ROW_TOKENS, np.int32)
    length = len(turns.prompt) + len(turns.response)
    row[:length] = np.concatenate([turns.prompt, turns.response])
    return logprobs_alone(params, row, length)[len(turns.prompt) : length]


def open_learner(algorithm, mesh):
    return policy_learner(PolicySettings(algorithm, Compute()), Optimizer(), TINY, mesh)


def test_the_gradient_is_that_of_the_cross_entropy_over_the_answers(tiny_params, one_device):
    examples = make_examples()
    turns = [one for example in examples for one in example.turns]
    segments = supervised.own_segments(examples)
    batch, used = imitation_batch(segments, Packing(ROW_TOKENS, 2))

    def loss(params):
        total = sum((alone(params, one) * one.trained).sum() for one in turns)
        return -total / sum(one.trained.sum() for one in turns)

    learner = open_learner(algorithms.sft(), one_device)
    gradient = learner.loss_and_gradient(
        jax.device_put(tiny_params, learner.shardings.params), batch, used
    )[1]
    assert_close(gradient, jax.grad(loss)(tiny_params), 1e-5)


def test_the_gradient_is_that_of_dpos_loss(tiny_params, one_device):
    pairs, beta = make_pairs(), 0.7
    algorithm = supervised.algorithm_of(DpoConfig(beta=beta))
    other = jax.tree.map(
        lambda leaf: leaf + 0.05 * jnp.cos(jnp.arange(leaf.size)).reshape(leaf.shape), tiny_params
    )

    def loss(params):
        def gain(turns):
            return alone(params, turns).sum() - alone(other, turns).sum()

        margins = jnp.stack([gain(chosen) - gain(rejected) for _, (chosen, rejected) in pairs])
        return -jax.nn.log_sigmoid(beta * margins).mean()

    learner = open_learner(algorithm, one_device)
    placed = jax.device_put(tiny_params, learner.shardings.params)
    segments = supervised.pair_segments(pairs)
    rollouts, used = pack(segments, ROW_TOKENS, 2)
    policy = to_host(learner.score(placed, rollouts, used).values)
    reference = [np.asarray(alone(other, one)) for _, pair in pairs for one in pair]
    feedback = supervised.pair_feedback(rollouts, policy, reference)
    batch = supervised.supervised_batch(
        algorithm, segments, rollouts, estimate(algorithm, feedback)
    )
    expected = jax.grad(loss)(tiny_params)
    assert_close(learner.loss_and_gradient(placed, batch, used)[1], expected, 1e-5)
    assert max(np.abs(leaf).max() for leaf in jax.tree.leaves(expected)) > 1e-3


@pytest.mark.slow
@pytest.mark.usefixtures("alone")
def test_a_policy_learns_its_users_examples_and_goes_on_from_there(tiny_folder, tmp_path, capsys):
    config = SftConfig(**settings(tmp_path, example_rows(), tiny_folder, examples_per_step=28))
    train_supervised(config)
    told = capsys.readouterr().out
    assert "own.jsonl: 56 examples of 64 rows" in told and "Held out: 8" in told
    rows = read_metrics(config.out)
    assert [row["step"] for row in rows] == list(range(9))  # 4 passes of 2 steps
    assert rows[-1]["heldout_nll"] < 0.8 * rows[0]["heldout_nll"]
    assert rows[-1]["policy_nll"] < 0.8 * rows[1]["policy_nll"]
    assert (tmp_path / "out/tokenizer.json").exists()
    config.start, config.total_steps = config.out, 1
    train_supervised(config)
    assert read_metrics(config.out)[0]["heldout_nll"] == pytest.approx(rows[-1]["heldout_nll"])


@pytest.mark.parametrize("command", ["sft", "dpo"])
def test_ctrl_c_leaves_the_earlier_folder_and_no_traceback(
    command, tiny_folder, alone, tmp_path, monkeypatch, capfd
):
    with replace("out", str(tmp_path / "out"), KINDS[command]) as folder:
        (folder / "config.json").write_text("the earlier one")
    rows = example_rows() if command == "sft" else pair_rows()
    source = write_lines(tmp_path / "own.jsonl", rows)
    before, open_start = snapshot(tmp_path / "out"), supervised.open_start

    def interrupted(*args):
        os.kill(os.getpid(), signal.SIGINT)
        return open_start(*args)

    monkeypatch.setattr(supervised, "open_start", interrupted)
    line = [f"--config.out={tmp_path}/out", f"--config.data.source={source}"]
    monkeypatch.setattr(sys, "argv", [command, *line, f"--config.start={tiny_folder}"])
    assert registry.find("commands", command)() == 130
    error = capfd.readouterr().err
    assert "SIGINT: stopping at the next safe point" in error
    assert "stopped by SIGINT: " in error and "No step is kept" in error
    assert len(error.splitlines()) == 2
    assert snapshot(tmp_path / "out") == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "own.jsonl"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.slow
def test_two_processes_learn_from_files_as_one_does(tiny_folder, tmp_path):
    common = ["--config.packing.row_tokens=32", "--config.total_steps=3"]
    common += [f"--config.start={tiny_folder}", "--config.optimizer.learning_rate=1e-3"]
    for command, rows in (("sft", example_rows()), ("dpo", pair_rows())):
        source = write_lines(tmp_path / f"{command}.jsonl", rows)
        found = {}
        for count in (1, 2):
            out = tmp_path / f"{command}{count}"
            line = [*common, f"--config.data.source={source}", f"--config.out={out}"]
            devices = {"XLA_FLAGS": f"--xla_force_host_platform_device_count={4 // count}"}
            said = tmp_path / f"{command}{count}_said"
            ended = Several(said, COMMAND, count, command, *line, **devices).wait()
            assert [one.code for one in ended] == [0] * count, [one.err for one in ended]
            found[count] = load_file(out / "model.safetensors"), read_metrics(out)
        assert_rounded_alike(found[1][0], found[2][0], moved=3 * 1e-3)
        assert len(found[1][1]) == len(found[2][1]) == 4


LORA = Lora(rank=4, alpha=8.0, targets="query,value,out,down")
TRAINED_BY = {"sft": (SftConfig, example_rows), "dpo": (DpoConfig, pair_rows)}


def make_lora_config(command, path, folder, **changes):
    kind, rows = TRAINED_BY[command]
    size = {"examples_per_step" if command == "sft" else "pairs_per_step": 28}
    quick = {"lora": LORA, "optimizer": Optimizer(learning_rate=2e-2, warmup_steps=2)}
    return kind(**settings(path, rows(), folder, **quick | size | changes))


def stored(folder) -> dict[str, np.ndarray]:
    return load_file(pathlib.Path(folder) / "model.safetensors")


def assert_merged(folder, base):
    """Matrices with an adapter are W + alpha / r B A; all else is the base's."""
    after, before = stored(folder), stored(base)
    adapters, moved = load_file(f"{folder}.adapter/adapter_model.safetensors"), set()
    assert after.keys() == before.keys()
    for name, array in before.items():
        below = f"base_model.model.{name.removesuffix('.weight')}"
        if f"{below}.lora_A.weight" in adapters:
            moved.add(name.split(".")[-2])
            up, down = (adapters[f"{below}.lora_{part}.weight"] for part in "BA")
            assert np.abs(up).max() > 1e-3
            array = array + LORA.alpha / LORA.rank * up @ down
        np.testing.assert_allclose(after[name], array, atol=1e-6)
    assert moved == {"q_proj", "v_proj", "o_proj", "down_proj"}


@pytest.mark.slow
def test_adapters_learn_examples_and_the_folder_has_them_merged(tiny_folder, alone, tmp_path):
    config = make_lora_config("sft", tmp_path, tiny_folder)
    train_supervised(config)
    rows = read_metrics(config.out)
    assert rows[-1]["heldout_nll"] < 0.9 * rows[0]["heldout_nll"]
    assert_merged(config.out, tiny_folder)


@pytest.mark.parametrize(
    ("start", "lora", "words"),
    [
        ("", Lora(rank=2), "lora.*2.*must be"),
        ("", Lora(rank=-1), "lora.*-1.*must be"),
        ("", Lora(alpha=1.0), "lora.*alpha.*must be"),
        ("base", Lora(folder="here"), "lora.rank = 0: must be above 0 .*r of its adapter_config"),
    ],
)
def test_adapters_that_cannot_be_trained_are_refused(start, lora, words):
    with pytest.raises(ConfigError, match=words):
        validate(SftConfig(total_steps=1, start=start, lora=lora))


SIDES = ("whole", "stopped")


class Killed(BaseException):
    """Ends a run as a kill would: nothing is saved any more."""


@pytest.mark.parametrize(
    "command",
    ["sft", *(pytest.param(c, marks=pytest.mark.slow) for c in ("dpo", "dpo of adapters"))],
)
@pytest.mark.parametrize("end", ["kill", pytest.param("signal", marks=pytest.mark.slow)])
def test_a_stopped_run_goes_on_bit_for_bit(
    end, command, tiny_folder, alone, tmp_path, monkeypatch, capfd
):
    kind, rows = (SftConfig, example_rows()) if command == "sft" else (DpoConfig, pair_rows())
    size: dict = {"examples_per_step": 14} if command == "sft" else {"pairs_per_step": 14}
    size["lora"] = Lora(rank=3 * ("adapters" in command))

    def config_in(folder):
        folder.mkdir(exist_ok=True)
        return kind(**settings(folder, rows, tiny_folder, save_every_steps=3, **size))

    whole = config_in(tmp_path / "whole")
    train_supervised(whole)
    stopped, rate = config_in(tmp_path / "stopped"), supervised.learning_rate
    halfway = tmp_path / "stopped/out.halfway"

    def learning_rate(settings, step, total):
        if step == 4 and end == "kill":
            raise Killed
        if step == 4 and end == "signal":
            os.kill(os.getpid(), signal.SIGTERM)
        return rate(settings, step, total)

    monkeypatch.setattr(supervised, "learning_rate", learning_rate)
    if end == "kill":
        with pytest.raises(Killed):
            train_supervised(stopped)
    else:
        with processes.as_command():  # in a program the signal would act after the save
            assert train_supervised(stopped) is None
        assert "stopped by SIGTERM" in (error := capfd.readouterr().err)
        assert "Saved after step 3: the same command resumes" in error
    assert halfway.is_dir() and not (tmp_path / "stopped/out").exists()
    parts = {path.split("/")[-1] for path in SavedPolicy(halfway).shapes()}
    assert parts == {"lora_a", "lora_b"} or "adapters" not in command
    monkeypatch.setattr(supervised, "learning_rate", rate)
    train_supervised(stopped)
    assert not halfway.exists()
    ours, theirs = (read_metrics(tmp_path / side / "out") for side in SIDES)
    assert [row | {"time": 0} for row in ours] == [row | {"time": 0} for row in theirs]
    names = ("model.safetensors", "config.json", "metrics.jsonl")
    assert all((tmp_path / "stopped/out" / name).exists() for name in names)
    weights = [(tmp_path / side / "out/model.safetensors").read_bytes() for side in SIDES]
    assert weights[0] == weights[1]
