"""Distillation against loops from the papers and in whole runs; two steps of every preset."""

import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import TINY, make_completion, make_prompt
from learners import SEGMENTS, assert_close, make_batch, place
from row_files import read_table
from small_runs import equal, make_groups, make_quick_config, open_run, read_rows, start, step_on
from teachers import LARGE, divergence_by_definition, make_teacher, write_teacher

from dapo_jax import algorithms
from dapo_jax.config.experiment import Checkpoint, Compute, Config, Mesh, Optimizer
from dapo_jax.extras.distillation.divergence import Divergence
from dapo_jax.extras.distillation.teacher import told_segments
from dapo_jax.learner.advantages import estimate
from dapo_jax.learner.packing import Segment
from dapo_jax.learner.policy import TEACHER, PolicySettings, policy_learner
from dapo_jax.model.decoder import Decoder, abstract_params, head_kernel
from dapo_jax.run import checks
from dapo_jax.run.build import build
from dapo_jax.runtime import sharding
from dapo_jax.types.errors import ConfigError
from dapo_jax.types.structs import Problem, Turn

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
    kind = Divergence(beta=0.5, temperature=0.8)
    settings = {"beta": 0.5, "temperature": 0.8, "coefficient": 2.0}
    changes = {f"distillation_{name}": value for name, value in settings.items()}
    algorithm = dataclasses.replace(algorithms.gkd(), **changes)
    learner = make_distiller(one_device, teacher, algorithm)
    batch, used = make_batch(algorithm, segments=HOLES)
    batch = batch.replace(advantages=0 * batch.advantages)
    assert used > 1
    actual, (means, _) = learner.differentiate(place(tiny_params, learner), batch, used)
    value, expected = jax.jit(jax.value_and_grad(lambda p: 2 * loop_loss(p, teacher, kind)))(
        tiny_params
    )
    np.testing.assert_allclose(means["loss"].total, value, rtol=1e-5)
    assert_close(actual, expected, 1e-5)


# --- whole runs with a teacher -------------------------------------------------------------------


@pytest.fixture(scope="module")
def large_folder(tiny_folder, tmp_path_factory):
    return write_teacher(tmp_path_factory.mktemp("teachers") / "large", tiny_folder)


def make(tiny_folder, teacher, run_dir, preset="gkd", **changes) -> Config:
    given = {"extras": {"teacher": {"folder": str(teacher)}}} | changes
    return make_quick_config(tiny_folder, run_dir, preset, updates=1, **given)


def test_a_teacher_has_the_policys_vocabulary_and_its_sharding(tiny_folder, large_folder, tmp_path):
    changes = {"preset": "on_policy_distillation", "mesh": Mesh(2, 2, 2)}
    parts = build(make(tiny_folder, large_folder, tmp_path, **changes))
    parts.close()
    mesh = parts.learners.policy.mesh
    places = sharding.flatten(sharding.tree_shardings(mesh, abstract_params(SHAPE)))
    held = sharding.flatten(parts.learners.scorers[TEACHER].params)
    assert held.keys() == places.keys() and held["head"].shape[1] == parts.decoder.vocab
    for path, exact in sharding.flatten(make_teacher()).items():
        assert held[path].sharding.is_equivalent_to(places[path], exact.ndim)
        np.testing.assert_array_equal(held[path], exact[tuple(map(slice, held[path].shape))])


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


# --- the policy as its own teacher, with a prompt that tells more ---------------------------------


def tell(tiny_folder, run_dir, prompt, preset="sdft", average=0.0, **changes) -> Config:
    teacher = {"prompt": prompt, "average": average}
    given = {"extras": {"teacher": teacher}} | changes
    return make_quick_config(tiny_folder, run_dir, preset, updates=1, **given)


def scores_by_loop(parts, decoder, params, group, text):
    """Log-probs of each response behind its teacher's prompt, one at a time; None: not told."""
    problem = parts.prompts.problem(group.prompt.index)
    for i, completion in enumerate(group.completions):
        right = [j for j in range(len(group.correct)) if group.correct[j] and j != i]
        told = {
            "answer": problem.answer,
            "sibling": group.completions[right[0]].text if right else "",
        }
        if text and not any(told[name] for name in told if f"{{{name}}}" in text):
            yield None
            continue
        prompt = group.prompt.tokens
        if text:
            prompt = parts.prompts.encode(problem, text.format(problem=problem.text, **told))
        row = np.zeros((1, 32), np.int32)
        tokens = np.array([*prompt, *completion.tokens])
        row[0, : tokens.size] = tokens
        segments, places = (np.arange(32)[None] < tokens.size) * 1, np.arange(32)[None]
        hidden = Decoder(decoder).apply({"params": params}, row, segments, places)
        logits = np.float64(hidden[0] @ head_kernel(params)) / parts.config.sampler.temperature
        logprobs = logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)
        yield np.array([logprobs[t - 1, row[0, t]] for t in range(len(prompt), tokens.size)])


@pytest.mark.parametrize(
    ("preset", "text"),
    [
        ("sdft", "{answer}={problem}"),
        ("rlsd", "{sibling}{problem}"),
        # A folder, which reads the policy's prompts.
        pytest.param("on_policy_distillation", "", marks=pytest.mark.slow),
    ],
)
def test_the_teacher_scores_responses_behind_a_prompt_of_its_own(
    base, large_folder, alone, tmp_path, monkeypatch, preset, text
):
    """log p_T - log p_S; RLSD: A (1 - c + c clip((p_T / p_S)^sign(A), 0.8, 1.2)), c = 0.5."""
    config = make(base, large_folder, tmp_path, preset)
    if text:
        config = tell(base, tmp_path, text, preset)
    parts = build(config)
    groups = [
        dataclasses.replace(
            group,
            completions=tuple(
                dataclasses.replace(completion, text=f"{i}+")
                for i, completion in enumerate(group.completions)
            ),
            correct=np.arange(4) == first,
        )
        for first, group in enumerate(make_groups(config))
    ]
    state = start(parts)
    model = parts.decoder, jax.device_get(state.learners.policy.params)
    if not text:
        shape = dataclasses.replace(LARGE, vocab=parts.decoder.vocab)
        model = shape, jax.device_get(parts.learners.scorers[TEACHER].params)
    expected = [s for group in groups for s in scores_by_loop(parts, *model, group, text)]
    # The batches in place of updates, which need not be compiled.
    monkeypatch.setattr("dapo_jax.step.update", lambda _, states, *rest: (states, [rest[2]]))
    _, record = step_on(parts, state, groups)
    parts.close()
    index = record.feedback.response_index
    unclipped = dataclasses.replace(record.feedback, teacher_log_ratios=None)
    plain = estimate(config.algorithm, unclipped)[0]
    old = record.updates[0].scored.old_logprobs
    for i, scores in enumerate(expected):
        at = index == i
        gaps = 0.0 if scores is None else scores - np.float64(old)[at[0]]
        wanted = gaps + 0 * plain[at]
        if preset == "rlsd":
            share = np.clip(np.exp(np.sign(plain[at]) * gaps), 0.8, 1.2)
            wanted = plain[at] * (0.5 + 0.5 * share)
        np.testing.assert_allclose(record.advantages[at], wanted, rtol=1e-4, atol=2e-5)
    # The only correct response of a group has no sibling.
    assert sum(scores is None for scores in expected) == (4 if preset == "rlsd" else 0)


def test_a_teacher_is_told_what_the_environment_said_and_the_columns_of_the_row():
    config = Config()
    config.extras.teacher.prompt = "{problem}|{hint}|{sibling}|{feedback}"
    problem = Problem("id", "1+2", "3", "file", columns='{"hint": null}')
    stub = types.SimpleNamespace(problem=lambda i: problem, encode=lambda _, text: [*text.encode()])
    tell = told_segments(config, stub)
    turns = Turn(True, 1, "4"), Turn(False, 1, "too high"), Turn(True, 1, "3")
    talked = dataclasses.replace(make_completion([5, 6, 7]), text="3", turns=turns)
    silent = dataclasses.replace(make_completion([5]), text="4")
    prompts = make_prompt(0, [3]), make_prompt(1, [3])

    def texts(*segments):
        return {s.index: bytes(s.prompt.tokens.tolist()).decode() for s in tell(segments)}

    both = Segment(prompts[0], talked, 0), Segment(prompts[0], silent, 1, correct=False)
    other = Segment(prompts[1], silent, 2, correct=False)  # knows nothing
    assert texts(*both, other) == {0: "1+2|||too high", 1: "1+2||3|"}


def test_an_averaged_teacher_follows_the_policy_and_resumes_bit_for_bit(base, alone, tmp_path):
    """m += 0.25 (p - m) after each update; its scores decide the next step."""

    def states(run_dir, stops):
        changes = {"checkpoint": Checkpoint(every_steps=1)}
        config = tell(base, run_dir, "{answer}={problem}", "sdpo", 0.25, **changes)
        seen = []
        for steps in stops:
            with open_run(config) as run:
                seen.append(jax.device_get(run.state.learners.by_name()))
                for _ in range(steps):
                    run.step()
                    run.keep()
                    seen.append(jax.device_get(run.state.learners.by_name()))
        return seen

    whole, resumed = states(tmp_path / "a", [2]), states(tmp_path / "b", [1, 1])
    for before, after in zip(whole, whole[1:], strict=False):
        pairs = before["teacher"].params, after["policy"].params
        wanted = jax.tree.map(lambda m, p: m + np.float32(0.25) * (p - m), *pairs)
        assert_close(after["teacher"].params, wanted, 1e-6)
        assert not equal(after["teacher"].params, after["policy"].params)
    assert equal(whole[-1], resumed[-1])


@pytest.mark.parametrize(("text", "words"), read_table(__file__, "bad templates"))
def test_a_bad_template_of_a_teacher_is_refused_before_anything_is_loaded(
    base, alone, tmp_path, monkeypatch, text, words
):
    monkeypatch.delattr("dapo_jax.run.build.load_frozen")
    with pytest.raises(ConfigError, match=words) as error:
        build(tell(base, tmp_path, text))
    assert "\n" not in str(error.value)


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
