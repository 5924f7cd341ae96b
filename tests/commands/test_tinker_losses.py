"""The loss functions of Tinker's API against this library's learner and against loops in numpy."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import TINY
from tinker_served import loss_message

from dapo_jax.config.algorithms import preset
from dapo_jax.config.experiment import Compute, Optimizer
from dapo_jax.extras.serve.fields import RequestError
from dapo_jax.extras.serve.policy import ServedModel
from dapo_jax.extras.serve.settings import ServeConfig
from dapo_jax.extras.tinker.losses import OPTIONS, loss_learner
from dapo_jax.extras.tinker.models import Model, pack_data, run_loss
from dapo_jax.extras.tinker.requests import Datum, LossRequest, read_loss_request
from dapo_jax.learner.batches import ScoredBatch, TrainBatch
from dapo_jax.learner.packing import Segment, pack, take_tokens
from dapo_jax.learner.policy import PolicySettings, policy_learner
from dapo_jax.learner.update import apply_gradient, make_optimizer
from dapo_jax.model.decoder import Decoder, head_kernel
from dapo_jax.types.structs import Completion, Prompt

LENGTHS = (5, 9, 3, 12)


@pytest.fixture(scope="module")
def learner(one_device):
    return loss_learner(TINY, one_device, None)


def make_data(loss: str, seed: int = 0, columns: int = 1) -> list[Datum]:
    random = np.random.default_rng(seed)
    data = []
    for length in LENGTHS:
        row = random.integers(0, TINY.vocab, length + 1).astype(np.int32)
        others = random.integers(0, TINY.vocab, (length, columns - 1))
        targets = np.concatenate([row[1:, None], others], axis=1).astype(np.int32)
        weights = random.normal(size=targets.shape).astype(np.float32)
        inputs = {"target_tokens": targets, "weights": weights}
        if loss != "cross_entropy":
            # About as likely as under the tiny policy, so that some ratios are clipped.
            inputs["logprobs"] = random.uniform(-5, -2, length).astype(np.float32)
            inputs["advantages"] = np.full(length, random.normal(), np.float32)
            if loss == "gspo":
                inputs["sequence_ratio_mask"] = np.ones(length, np.float32)
            else:
                inputs["advantages"] = random.normal(size=length).astype(np.float32)
            for name, value in OPTIONS[loss].items():
                inputs[name] = np.full(length, value, np.float32)
        inputs = {name: values.reshape(length, -1) for name, values in inputs.items()}
        data.append(Datum(row[:-1], inputs, targets.shape))
    return data


@jax.jit
def padded_logprobs(params, tokens: jax.Array, targets: jax.Array) -> jax.Array:
    """Log-probs [T, K] of the targets [T, K], by a plain forward pass of one sequence."""
    rows = (tokens[None], jnp.ones_like(tokens)[None], jnp.arange(len(tokens))[None])
    hidden = Decoder(TINY).apply({"params": params}, *rows)
    logits = (hidden[0] @ head_kernel(params)).astype(jnp.float32)
    return jnp.take_along_axis(jax.nn.log_softmax(logits), targets, axis=1)


@jax.jit
def pull_back(params, tokens, targets, slope: jax.Array):
    """Gradient by the parameters, from slopes [T, K] of a loss in the log-probs."""
    return jax.grad(lambda p: jnp.sum(slope * padded_logprobs(p, tokens, targets)))(params)


def pad(values: np.ndarray) -> np.ndarray:
    """Sequences of one length are one program; attention sees no later token."""
    return np.pad(values, [(0, max(LENGTHS) - len(values)), *[(0, 0)] * (values.ndim - 1)])


def sequence(datum: Datum) -> tuple[np.ndarray, np.ndarray]:
    return pad(datum.tokens), pad(datum.inputs["target_tokens"])


def logprobs_of(params, datum: Datum) -> np.ndarray:
    """Log-probs [n, K] of the targets."""
    return np.asarray(padded_logprobs(params, *sequence(datum)))[: len(datum.tokens)]


def loop(loss: str, options: dict, datum: Datum, logprobs: np.ndarray):
    """Loss and its slope in each log-prob, by the formulas of docs/tinker.md."""
    total, slope = 0.0, np.zeros_like(logprobs)
    mean = 0.0
    if loss == "gspo":
        mean = np.mean(logprobs[:, 0] - datum.inputs["logprobs"][:, 0])
    for t in range(len(logprobs)):
        if loss == "cross_entropy":
            for k in range(logprobs.shape[1]):
                total -= datum.inputs["weights"][t, k] * logprobs[t, k]
                slope[t, k] = -datum.inputs["weights"][t, k]
            continue
        p, old, advantage = (
            logprobs[t, 0],
            datum.inputs["logprobs"][t, 0],
            datum.inputs["advantages"][t, 0],
        )
        ratio = np.exp(mean if loss == "gspo" else p - old)
        low, high = options.get("clip_low_threshold"), options.get("clip_high_threshold")
        if loss == "dro":
            total -= p * advantage - 0.5 * options["beta"] * (p - old) ** 2
            slope[t] = -(advantage - options["beta"] * (p - old))
        elif loss == "cispo":
            total -= np.clip(ratio, low, high) * p * advantage
            slope[t] = -np.clip(ratio, low, high) * advantage
        elif loss == "importance_sampling":
            total -= ratio * advantage
            slope[t] = -ratio * advantage
        else:
            total -= min(ratio * advantage, np.clip(ratio, low, high) * advantage)
            clipped = ratio < low if advantage < 0 else ratio > high
            slope[t] = 0.0 if clipped else -ratio * advantage
    return total, slope


def norm(tree) -> float:
    return float(jnp.sqrt(sum(jnp.sum(jnp.square(leaf)) for leaf in jax.tree.leaves(tree))))


def relative(actual, expected) -> float:
    return norm(jax.tree.map(jnp.subtract, actual, expected)) / norm(expected)


@pytest.mark.parametrize(
    "loss",
    [pytest.param(loss, marks=[pytest.mark.slow] * (loss in ("cispo", "dro"))) for loss in OPTIONS],
)
def test_gradients_are_those_of_a_loop(loss, learner, tiny_params):
    columns = 3 if loss == "cross_entropy" else 1
    data = make_data(loss, columns=columns)
    options = dict(OPTIONS[loss])
    batch, used = pack_data(data, loss, 1)
    gradient, outputs = learner.differentiate(tiny_params, batch, used)
    total, expected = 0.0, None
    for datum in data:
        part, slope = loop(loss, options, datum, logprobs_of(tiny_params, datum).astype(float))
        back = pull_back(tiny_params, *sequence(datum), pad(slope).astype(np.float32))
        expected = back if expected is None else jax.tree.map(jnp.add, expected, back)
        total += part
    taken = take_tokens(np.asarray(outputs.token_logprobs), batch.rows.response_index)
    for actual, datum in zip(taken, data, strict=True):
        actual = actual[:, : datum.columns]
        np.testing.assert_allclose(actual, logprobs_of(tiny_params, datum), rtol=0, atol=1e-5)
    assert abs(float(outputs.means["loss"].total) - total) < 1e-5 * max(1, abs(total)) * 10
    assert relative(gradient, expected) < 1e-5


def batch_of_training(data: list[Datum]) -> tuple[TrainBatch, int]:
    """The same data as responses to prompts of one token, each token with weight 1."""
    segments = [
        Segment(
            Prompt(i, "", "", datum.tokens[:1], "", ""),
            Completion(
                datum.inputs["target_tokens"][:, 0], datum.inputs["logprobs"][:, 0], False, 0, ""
            ),
            i,
        )
        for i, datum in enumerate(data)
    ]
    rows, used = pack(segments, 32, 2)
    index = np.asarray(rows.response_index)
    advantages = np.zeros(index.shape, np.float32)
    for i, datum in enumerate(data):
        advantages[index == i] = datum.inputs["advantages"][:, 0]
    weights = (index >= 0).astype(np.float32)
    return TrainBatch(ScoredBatch(rows, rows.sampler_logprobs), advantages, weights), used


def test_steps_of_dapo_are_those_of_training(learner, one_device, tiny_params):
    """The client divides advantages by the tokens, as docs/tinker.md does."""
    optimizer = Optimizer(weight_decay=0.0)
    settings = PolicySettings(dataclasses.replace(preset("dapo"), dual_clip=0.0), Compute())
    trainer = policy_learner(settings, optimizer, TINY, one_device)
    step = jax.jit(functools.partial(apply_gradient, make_optimizer(optimizer)))
    ours, theirs = trainer.start(tiny_params), learner.start(tiny_params)
    for seed in range(3):
        data = make_data("ppo", seed)
        total = sum(LENGTHS)
        batch, used = batch_of_training(data)
        batch = batch.replace(loss_weights=batch.loss_weights / np.float32(total))
        ours, _ = trainer.update(ours, batch, used, 1e-3)
        for datum in data:
            datum.inputs["advantages"] /= np.float32(total)
            datum.inputs["clip_high_threshold"][:] = 1.28
        gradient, _ = learner.differentiate(theirs.params, *pack_data(data, "ppo", 1))
        theirs, _ = step(theirs, gradient, np.float32(1e-3))
    moved = jax.tree.map(jnp.subtract, ours.params, tiny_params)
    difference = jax.tree.map(jnp.subtract, ours.params, theirs.params)
    assert norm(difference) < 1e-3 * norm(moved)


def test_accumulated_gradients_are_those_of_one_call(learner, tiny_params):
    data = make_data("ppo")
    whole, parts = (Model(None, learner.start(tiny_params)) for _ in range(2))
    run_loss(learner, whole, LossRequest(data, "ppo", False))
    for half in (data[:2], data[2:]):
        run_loss(learner, parts, LossRequest(half, "ppo", False))
    assert relative(parts.gradient, whole.gradient) < 1e-5
    before = jax.tree.map(np.asarray, parts.gradient)
    run_loss(learner, parts, LossRequest(data, "ppo", True))  # forward only
    assert jax.tree.all(jax.tree.map(np.array_equal, before, parts.gradient))


def test_rows_of_a_request_are_of_few_sizes():
    datum = make_data("cross_entropy")[0]
    shapes = set()
    for count in range(1, 400, 7):
        shapes.add(pack_data([datum] * count, "cross_entropy", 1)[0].tokens.shape)
    assert len(shapes) <= 8, shapes


def test_long_rows_have_no_square_of_scores(learner):
    """The longest datum of a request decides; [T, T] scores of 16,384 tokens take 1 GiB a head."""
    datum = make_data("cross_entropy")[0]
    squares = []
    for length in (1000, 1100):
        inputs = {name: np.resize(values, (length, 1)) for name, values in datum.inputs.items()}
        long = Datum(np.resize(datum.tokens, length), inputs, (length,))
        batch = pack_data([long], "cross_entropy", 1)[0]
        side = batch.tokens.shape[2]
        squares.append(f"{side}x{side}x" in learner.lower("update", batch).as_text())
    assert squares == [True, False]


def served(**settings) -> ServedModel:
    return ServedModel(ServeConfig(**settings), 64, None, TINY, None)


def test_stable_reinforce_is_computed_as_the_loss_that_is_named():
    inputs = {name: [1.0] for name in ("logprobs", "advantages")} | {"target_tokens": [1]}
    body = loss_message("m", 1, [([1], inputs)], loss="stable_reinforce")
    with pytest.raises(RequestError, match="loss_fn = 'stable_reinforce': must be one of"):
        read_loss_request(body, served())
    assert read_loss_request(body, served(tinker_stable_reinforce="cispo")).loss == "cispo"


def test_a_body_that_is_no_message_is_one_error():
    for body in (b"\xff", b"not a message", b"\x0a\xff\xff\xff\xff\x0f"):
        with pytest.raises(RequestError):
            read_loss_request(body, served())
