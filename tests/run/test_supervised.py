"""Learning from own examples and from offline pairs: gradients, runs, adapters, resumption."""

import os
import pathlib
import shutil
import signal
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import TINY
from learners import assert_close, logprobs_alone
from output_folders import snapshot
from row_files import write_lines
from safetensors.numpy import load_file, save_file
from several import COMMAND, Several, assert_rounded_alike
from supervised_runs import example_rows, pair_rows, read_metrics, settings

from dapo_jax import step
from dapo_jax.config.checks import validate
from dapo_jax.config.experiment import Compute, Config, Lora, Optimizer, Packing
from dapo_jax.extras.sft import training as supervised
from dapo_jax.extras.sft.rows import Turns, make_group, placed
from dapo_jax.extras.sft.settings import DpoConfig, SftConfig
from dapo_jax.extras.sft.training import as_run, train_supervised, with_logprobs
from dapo_jax.learner import update
from dapo_jax.learner.advantages import estimate
from dapo_jax.learner.minibatches import make_minibatches, make_train_batches, row_choice
from dapo_jax.learner.policy import PolicySettings, policy_learner
from dapo_jax.learner.score_pass import make_feedback, score_pass
from dapo_jax.learner.update import LearnerPrograms, LearnerStates
from dapo_jax.run.export import SavedPolicy
from dapo_jax.runtime import registry
from dapo_jax.runtime.storage.output_folder import TRAINED, replace
from dapo_jax.types.errors import ConfigError
from dapo_jax.types.structs import Group

ROW_TOKENS = 20
RNG = np.random.default_rng(5)


def draw(prompt: list[int], size: int, share: float = 1.0) -> Turns:
    """Random tokens after a prompt, a share of them trained, and the last one."""
    trained = [*(RNG.random(size - 1) < share), True]
    return Turns("", prompt, RNG.integers(2, 32, size).tolist(), trained)


def make_groups() -> list[Group]:
    """Of answers, and of several of them with turns between."""
    sizes = ((3, 5), (1, 1), (4, 12), (2, 9))
    groups = [make_group(draw([*range(2, 2 + prompt)], n, 0.6)) for prompt, n in sizes]
    return [group for i, own in enumerate(groups) for group in placed([own], i)]


def make_pairs() -> list[Group]:
    sizes = ((3, 5, 2), (1, 1, 9), (6, 7, 7))
    pairs = [make_group(*(draw([*range(2, 2 + size)], n) for n in both)) for size, *both in sizes]
    return [group for i, own in enumerate(pairs) for group in placed([own], i)]


def alone(params, group: Group) -> list:
    """Log-probs of the tokens of each response, in a row of its own."""
    found = []
    for response in group.completions:
        row = np.zeros(ROW_TOKENS, np.int32)
        tokens = np.concatenate([group.prompt.tokens, response.tokens])
        row[: len(tokens)] = tokens
        logprobs = logprobs_alone(params, row, len(tokens))
        found.append(logprobs[len(group.prompt.tokens) : len(tokens)])
    return found


def gradient_of(config: Config, params, groups: list[Group], mesh):
    """The gradient of a step on the groups, by the functions of `train_step`."""
    learner = policy_learner(PolicySettings(config.algorithm, Compute()), Optimizer(), TINY, mesh)
    states = LearnerStates(learner.start(jax.device_put(params, learner.shardings.params)))
    minibatches = make_minibatches(config, groups, row_choice(config, TINY, 1))
    scored = score_pass(config, LearnerPrograms(learner), states, minibatches)
    estimates = estimate(config.algorithm, make_feedback(config, minibatches, scored, groups))
    (batch,) = make_train_batches(config, minibatches, scored, estimates)
    used = minibatches.microbatches[0]
    return learner.differentiate(states.policy.params, batch, used)[0]


COMMON: dict = {"packing": Packing(ROW_TOKENS, 2), "total_steps": 1}


def test_the_gradient_is_that_of_the_cross_entropy_over_the_answers(tiny_params, one_device):
    groups = make_groups()
    drawn = [group.completions[0].is_sampled for group in groups]

    def loss(params):
        total = sum((alone(params, g)[0] * own).sum() for g, own in zip(groups, drawn, strict=True))
        return -total / sum(own.sum() for own in drawn)

    config = as_run(SftConfig(examples_per_step=len(groups), **COMMON))
    gradient = gradient_of(config, tiny_params, groups, one_device)
    assert_close(gradient, jax.grad(loss)(tiny_params), 1e-5)


def test_the_gradient_is_that_of_dpos_loss(tiny_params, one_device):
    pairs, beta = make_pairs(), 0.7
    other = jax.tree.map(
        lambda leaf: leaf + 0.05 * jnp.cos(jnp.arange(leaf.size)).reshape(leaf.shape), tiny_params
    )

    def loss(params):
        def margin(pair):
            now, before = ([own.sum() for own in alone(p, pair)] for p in (params, other))
            return now[0] - before[0] - now[1] + before[1]

        return -jax.nn.log_sigmoid(beta * jnp.stack([*map(margin, pairs)])).mean()

    scored = [with_logprobs([p], iter(map(np.asarray, alone(other, p))))[0] for p in pairs]
    config = as_run(DpoConfig(pairs_per_step=len(pairs), beta=beta, **COMMON))
    expected = jax.grad(loss)(tiny_params)
    assert_close(gradient_of(config, tiny_params, scored, one_device), expected, 1e-5)
    assert max(np.abs(leaf).max() for leaf in jax.tree.leaves(expected)) > 1e-3


def test_ctrl_c_leaves_the_earlier_folder_and_no_traceback(
    tiny_folder, alone, tmp_path, monkeypatch, capfd
):
    with replace("out", str(tmp_path / "out"), TRAINED) as folder:
        (folder / "config.json").write_text("the earlier one")
    source = write_lines(tmp_path / "own.jsonl", example_rows())
    before, open_tokenizer = snapshot(tmp_path / "out"), supervised.open_tokenizer

    def interrupted(*args):
        os.kill(os.getpid(), signal.SIGINT)
        return open_tokenizer(*args)

    monkeypatch.setattr(supervised, "open_tokenizer", interrupted)
    line = [f"--config.out={tmp_path}/out", f"--config.data.source={source}"]
    monkeypatch.setattr(sys, "argv", ["sft", *line, f"--config.start={tiny_folder}"])
    assert registry.find("commands", "sft")() == 130
    told = capfd.readouterr()
    assert "SIGINT: stopping at the next safe point" in told.err
    assert f"stopped by SIGINT: {tmp_path}/out is as it was" in told.err
    assert len(told.err.splitlines()) == 2
    assert "stopped by SIGINT after step 0; saved in" in told.out
    assert snapshot(tmp_path / "out") == before
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


@pytest.mark.parametrize("command", ["sft", pytest.param("dpo", marks=pytest.mark.slow)])
def test_a_killed_run_resumes_bit_for_bit_and_one_of_other_settings_starts_from_scratch(
    command, tiny_folder, alone, tmp_path, monkeypatch, capfd
):
    kind, rows = (SftConfig, example_rows()) if command == "sft" else (DpoConfig, pair_rows())
    size: dict = {"examples_per_step": 14} if command == "sft" else {"pairs_per_step": 14}
    size["lora"] = LORA if command == "dpo" else Lora()

    start = shutil.copytree(tiny_folder, tmp_path / "start")

    def config_in(folder):
        folder.mkdir(exist_ok=True)
        changes = {"total_steps": 6, "save_every_steps": 3} | size
        return kind(**settings(folder, rows, start, **changes))

    whole, stopped = (config_in(tmp_path / side) for side in SIDES)
    halfway, rates = tmp_path / "stopped/out.halfway", update.learning_rates

    def learning_rates(config, step):
        if step == 4:
            raise Killed
        return rates(config, step)

    weights = stored(tiny_folder)
    for factor in (1.5, 1.0):  # the second run begins from other weights
        tensors = {name: factor * array for name, array in weights.items()}
        save_file(tensors, start / "model.safetensors", metadata={"format": "pt"})
        with monkeypatch.context() as patch, pytest.raises(Killed):
            patch.setattr(step, "learning_rates", learning_rates)
            train_supervised(config_in(tmp_path / "stopped"))
        assert (tmp_path / "stopped/out").exists() is False and halfway.is_dir()
    assert "has other settings or data: training starts from scratch" in capfd.readouterr().out
    parts = {path.split("/")[-1] for path in SavedPolicy(halfway).shapes()}
    assert parts == {"lora_a", "lora_b"} or command == "sft"
    train_supervised(whole)
    train_supervised(stopped)
    assert "after step 3" in capfd.readouterr().out and not halfway.exists()
    left, right = (read_metrics(tmp_path / side / "out") for side in SIDES)
    seconds = [name for name in left[-1] if "second" in name or name == "time"]
    for row in (*left, *right):
        for name in seconds:
            row.pop(name, None)
    assert left == right
    whole, other = (
        {path.name: path.read_bytes() for path in (tmp_path / side / "out").iterdir()}
        for side in SIDES
    )
    assert {"config.json", "metrics.jsonl", "tokenizer.json"} < whole.keys() == other.keys()
    assert whole["model.safetensors"] == other["model.safetensors"]
    if command == "dpo":
        return assert_merged(tmp_path / "whole/out", tiny_folder)
    assert left[-1]["heldout_nll"] < 0.9 * left[0]["heldout_nll"]
    stopped.start, stopped.total_steps = stopped.out, 1
    train_supervised(stopped)  # goes on from there
    assert read_metrics(stopped.out)[0]["heldout_nll"] == pytest.approx(left[-1]["heldout_nll"])
