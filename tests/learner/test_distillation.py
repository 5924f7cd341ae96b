"""Distillation against loops from the papers and in whole runs; two steps of every preset."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import TINY
from learners import RNG, SEGMENTS, assert_close, make_batch, place
from small_runs import equal, make_groups, make_quick_config, open_run, read_rows, start, step_on
from teachers import LARGE, divergence_by_definition, make_teacher, write_teacher

from dapo_jax import algorithms
from dapo_jax.config.experiment import Compute, Config, Optimizer
from dapo_jax.extras.distillation.divergence import Divergence
from dapo_jax.learner.advantages import estimate, gather_feedback
from dapo_jax.learner.policy import TEACHER, PolicySettings, policy_learner, policy_objective
from dapo_jax.model.decoder import Decoder, abstract_params, head_kernel
from dapo_jax.run import checks
from dapo_jax.run.build import build
from dapo_jax.runtime import sharding
from dapo_jax.types.errors import ConfigError

SHAPE = dataclasses.replace(LARGE, vocab=TINY.vocab)  # as a run holds it
# Every third token of a response has no loss.
HOLES = [
    segment._replace(token_weights=(np.arange(len(segment.completion)) % 3 != 1).astype(float))
    for segment in SEGMENTS
]
WIDTH = 24


@pytest.fixture(scope="module")
def teacher():
    return make_teacher(SHAPE)


def make_distiller(mesh, teacher, algorithm):
    """The learner of a policy with that teacher in its loss."""
    places = sharding.tree_shardings(mesh, abstract_params(SHAPE))
    frozen = {TEACHER: jax.device_put(teacher, places)}
    compute = Compute(logprob_chunk_tokens=7)
    settings = PolicySettings(algorithm, compute, teacher=SHAPE)
    return policy_learner(settings, Optimizer(learning_rate=1e-3), TINY, mesh, frozen)


def loop_loss(params, teacher, kind: Divergence):
    """Mean divergence over the trained tokens of all responses, each in a row of its own."""
    rows = np.zeros((len(HOLES), WIDTH), np.int32)
    drawn_from = np.zeros((len(HOLES), WIDTH), bool)  # places before the trained tokens
    for i, segment in enumerate(HOLES):
        prompt, response = segment.prompt.tokens, segment.completion.tokens
        rows[i, : segment.length] = np.concatenate([prompt, response])
        trained = np.asarray(segment.token_weights) > 0
        drawn_from[i, len(prompt) - 1 : segment.length - 1] = trained
    positions = np.tile(np.arange(WIDTH), (len(rows), 1))
    lengths = np.array([segment.length for segment in HOLES])
    alone = (positions < lengths[:, None]).astype(np.int32)

    def logits(params, config):
        hidden = Decoder(config).apply({"params": params}, rows, alone, positions)
        return hidden @ head_kernel(params)

    both = logits(teacher, SHAPE), logits(params, TINY)
    actual = divergence_by_definition(*both, kind)
    return jnp.sum(jnp.where(drawn_from, actual, 0.0)) / drawn_from.sum()


def test_the_update_descends_the_papers_mean_divergence(teacher, tiny_params, one_device):
    beta, top_k = 0.5, 4
    kind = Divergence(beta, top_k, 0.8)
    algorithm = dataclasses.replace(
        algorithms.gkd(),
        distillation_beta=beta,
        distillation_top_k=top_k,
        distillation_temperature=0.8,
        distillation_coefficient=2.0,
    )
    learner = make_distiller(one_device, teacher, algorithm)
    batch, used = make_batch(algorithm, segments=HOLES)
    batch = batch.replace(advantages=0 * batch.advantages)
    assert used > 1
    loss, actual = learner.loss_and_gradient(place(tiny_params, learner), batch, used)
    value, expected = jax.jit(jax.value_and_grad(lambda p: 2 * loop_loss(p, teacher, kind)))(
        tiny_params
    )
    np.testing.assert_allclose(loss, value, rtol=1e-5)
    assert_close(actual, expected, 1e-5)


# --- on drawn tokens ------------------------------------------------------------------------

INDEX = np.array([[[-1, 0, 0, -1, 1, 1, 1, -1], [-1, -1, 2, 3, 3, -1, -1, -1]]])
TRAINED = (INDEX >= 0) & (RNG.random(INDEX.shape) > 0.3)
EARNED = np.array([1.0, -1.0, 1.0, 1.0])
RATIOS = np.where(TRAINED, RNG.normal(0, 2, INDEX.shape), np.nan)


def feedback(ratios=RATIOS):
    parts = {"reward_parts": EARNED[None], "part_weights": np.ones(1)}
    known = parts | {"groups": np.array([0, 0, 1, 1]), "correct": EARNED > 0}
    return gather_feedback(INDEX, EARNED, trained=TRAINED, teacher_log_ratios=ratios, **known)


@pytest.mark.parametrize("advantage", ["zero", "group_zscore", "reward_to_go"])
@pytest.mark.parametrize("whiten", [False, True])
def test_each_trained_token_gets_its_own_log_ratio_beside_the_rewards(advantage, whiten):
    algorithm = dataclasses.replace(
        algorithms.dapo(),
        advantage=advantage,
        whiten=whiten,
        distillation="reverse",
        distillation_coefficient=0.7,
    )
    actual, plain = (estimate(algorithm, feedback(r))[0] for r in (RATIOS, None))
    for at in np.ndindex(INDEX.shape):
        pull = 0.7 * RATIOS[at] if TRAINED[at] else 0.0
        np.testing.assert_allclose(actual[at], plain[at] + pull, rtol=1e-6, atol=1e-6)
    assert plain.any() == (advantage != "zero")


def test_on_policy_the_gradient_is_that_of_the_sampled_reverse_kl():
    """-(log p_teacher - log p) grad log p, the mean over trained tokens, and its metric."""
    algorithm = algorithms.on_policy_distillation()
    batch, _ = make_batch(algorithm, rows=12, microbatches=1, segments=HOLES)
    batch = jax.tree.map(lambda array: jnp.asarray(array[0]), batch)
    old, weights = batch.scored.old_logprobs, batch.loss_weights
    gaps = jnp.asarray(RNG.normal(0, 1, old.shape), jnp.float32)
    scored = batch.scored.replace(scores={"teacher": old + gaps})
    batch = batch.replace(scored=scored, advantages=gaps)

    def loss(logprobs):
        return policy_objective(algorithm, batch, logprobs, jnp.zeros_like(logprobs))

    actual, metrics = jax.grad(loss, has_aux=True)(old)
    count = int((weights > 0).sum())
    expected = np.where(weights > 0, -gaps / count, 0.0)
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-8)
    np.testing.assert_allclose(
        metrics["teacher_kl"].value(), -np.asarray(gaps)[np.asarray(weights) > 0].mean(), rtol=1e-4
    )


# --- whole runs with a teacher -------------------------------------------------------------------


@pytest.fixture(scope="module")
def large_folder(tiny_folder, tmp_path_factory):
    return write_teacher(tmp_path_factory.mktemp("teachers") / "large", tiny_folder)


def make(tiny_folder, teacher, run_dir, preset="gkd", **changes) -> Config:
    weights = changes.pop("weights_dtype", "auto")
    settings = {"folder": str(teacher), "weights_dtype": weights}
    given = {"extras": {"teacher": settings}} | changes
    return make_quick_config(tiny_folder, run_dir, preset, updates=1, **given)


def test_the_policy_as_its_own_teacher_adds_nothing_to_an_advantage(tiny_folder, alone, tmp_path):
    algorithm = dataclasses.replace(algorithms.grpo(), distillation="reverse")
    config = make(tiny_folder, tiny_folder, tmp_path, "grpo", algorithm=algorithm)
    parts = build(config)
    _, record = step_on(parts, start(parts), make_groups(config))
    parts.close()
    assert not record.feedback.teacher_log_ratios.any()
    index = record.feedback.response_index
    assert len(np.unique(record.advantages[index == 0])) == 1 and record.advantages.any()


def test_a_teacher_that_does_not_fit_is_refused_before_anything_is_loaded(
    tiny_folder, large_folder, alone, tmp_path, monkeypatch
):
    with pytest.raises(ConfigError, match=r"config\.extras\.teacher\.folder"):
        checks.check_models(make(tiny_folder, tmp_path / "nothing", tmp_path))
    small = write_teacher(tmp_path / "small", tiny_folder, dataclasses.replace(LARGE, vocab=24))
    other = write_teacher(tmp_path / "other", tiny_folder)
    tokenizer = other / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text().replace("again", "gaina"))
    monkeypatch.delattr("dapo_jax.run.build.load_frozen")
    for folder, words in ((other, "tokenizer"), (small, "at least the policy's 32 tokens")):
        with pytest.raises(ConfigError, match=f"extras.teacher.folder = '{folder}'.*{words}"):
            build(make(tiny_folder, folder, tmp_path))


# --- two steps of every preset -------------------------------------------------------------------

QUICK = ("vapo",)  # a policy, a critic and a reference
RL_PRESETS = [
    pytest.param(name, marks=() if name in QUICK else pytest.mark.slow)
    for name in sorted(algorithms.PRESETS)
    if name != "sft"
]


@pytest.mark.parametrize("preset", RL_PRESETS)
def test_two_steps_of_a_preset_are_finite_and_change_the_trained_models(
    preset, base, large_folder, alone, tmp_path
):
    is_taught = algorithms.preset(preset).distillation != "none"
    changes = {"extras": {"teacher": {"folder": str(large_folder)}}} if is_taught else {}
    config = make_quick_config(base, tmp_path, preset, **changes)
    config.algorithm.pass_k = 2  # of four responses
    with open_run(config) as run:
        models = {"policy": lambda: run.state.learners.policy.params}
        if config.algorithm.critic:
            models["critic"] = lambda: run.state.learners.others["critic"].params
        before = jax.device_get({name: params() for name, params in models.items()})
        for _ in range(2):
            run.step()
            after = jax.device_get({name: params() for name, params in models.items()})
            assert not any(equal(before[name], after[name]) for name in models)
            assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(after))
            before = after
    rows = read_rows(tmp_path)
    assert len(rows) == 2
    for row in rows:
        assert None not in row.values()  # what is not finite has no number in JSON
        assert row["skipped_updates"] == row["empty_updates"] == 0
        assert row["gradient_norm"] > 0 and row["trained_groups"] == 4
        assert ("teacher_kl" in row) == is_taught
        assert ("kl_reference" in row) == config.algorithm.reference
        assert ("explained_variance" in row) == config.algorithm.critic
        assert ("preference_loss" in row) == (preset == "dpo")


def test_no_two_presets_are_the_same_algorithm():
    values = {name: dataclasses.astuple(make()) for name, make in algorithms.PRESETS.items()}
    assert len(set(values.values())) == len(values)
