"""The teacher of a run: other shapes, int8, what it teaches, and rejected settings."""

import dataclasses

import jax
import numpy as np
import pytest
from small_runs import equal, learn, make_groups, make_quick_config, start, step_on
from teachers import LARGE, write_teacher

from dapo_jax import algorithms
from dapo_jax.commands import checks
from dapo_jax.config.experiment import Config, Lora, Mesh, Packing, Teacher
from dapo_jax.run import components, memory
from dapo_jax.run.components import build
from dapo_jax.runtime.settings import ConfigError

PRESETS = ("on_policy_distillation", "gkd")


@pytest.fixture(scope="module")
def large_folder(tiny_folder, tmp_path_factory):
    return write_teacher(tmp_path_factory.mktemp("teachers") / "large", tiny_folder)


def make(tiny_folder, teacher, run_dir, preset="gkd", **changes) -> Config:
    weights = changes.pop("weights_dtype", "auto")
    given = {"teacher": Teacher(folder=str(teacher), weights_dtype=weights)} | changes
    return make_quick_config(tiny_folder, run_dir, preset, updates=1, **given)


def two_steps(config):
    """Metrics of two steps on the same groups, and whether each moved the policy."""
    parts, seen = build(config), []
    state = start(parts, 1)
    for _ in range(2):
        before = jax.device_get(state.learners.policy.params)
        state, values = learn(parts, state, make_groups(config))
        moved = not equal(before, jax.device_get(state.learners.policy.params))
        seen.append((values, moved))
    parts.close()
    return seen


@pytest.mark.parametrize(
    "preset", [PRESETS[0], *(pytest.param(name, marks=pytest.mark.slow) for name in PRESETS[1:])]
)
def test_a_wider_and_deeper_teacher_is_approached(
    preset, tiny_folder, large_folder, alone, tmp_path
):
    (first, moved), (second, moved_on) = two_steps(
        make(tiny_folder, large_folder, tmp_path, preset)
    )
    assert moved and moved_on and first["skipped_updates"] == 0
    assert abs(second["teacher_kl"]) < abs(first["teacher_kl"])  # of either sign on given tokens


@pytest.mark.slow
@pytest.mark.parametrize("preset", PRESETS)
def test_a_mesh_of_eight_and_adapters_learn_from_the_same_teacher(
    preset, tiny_folder, large_folder, tmp_path
):
    rows = Packing(row_tokens=64, rows_per_microbatch=8)
    changes = {"mesh": Mesh(2, 2, 2), "packing": rows, "lora": Lora(rank=2)}
    (first, moved), _ = two_steps(make(tiny_folder, large_folder, tmp_path, preset, **changes))
    changes["mesh"] = Mesh(1, 1, 1)
    with pytest.MonkeyPatch.context() as patch:
        devices = jax.devices()
        patch.setattr(jax, "devices", lambda *args: devices[:1])
        (alone, _), _ = two_steps(make(tiny_folder, large_folder, tmp_path, preset, **changes))
    assert moved and first["skipped_updates"] == 0
    for name in ("teacher_kl", "gradient_norm", "loss"):
        np.testing.assert_allclose(first[name], alone[name], rtol=1e-4, atol=1e-6)


def test_the_policy_as_its_own_teacher_adds_nothing_to_an_advantage(tiny_folder, alone, tmp_path):
    algorithm = dataclasses.replace(algorithms.grpo(), distillation="reverse")
    config = make(tiny_folder, tiny_folder, tmp_path, "grpo", algorithm=algorithm)
    parts = build(config)
    _, record = step_on(parts, start(parts), make_groups(config))
    parts.close()
    assert not record.feedback.teacher_log_ratios.any()
    index = record.feedback.response_index
    assert len(np.unique(record.advantages[index == 0])) == 1 and record.advantages.any()


def test_int8_teacher_gives_similar_scores_in_a_quarter_of_the_memory(
    tiny_folder, large_folder, alone, tmp_path
):
    results = {}
    for dtype in ("auto", "int8"):
        config = make(tiny_folder, large_folder, tmp_path, PRESETS[0], weights_dtype=dtype)
        parts = build(config)
        params = parts.learners.teacher_params
        held = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
        mesh = parts.learners.policy.mesh
        counted = memory.resident_bytes(config, parts.decoder, mesh, training=True)
        assert counted["teacher"] == held
        _, values = learn(parts, start(parts, 1), make_groups(config))
        parts.close()
        results[dtype] = params["layers"]["gate"]["kernel"], values["teacher_kl"]
    (whole, exact), (small, near) = results["auto"], results["int8"]
    assert small.nbytes * 4 == whole.nbytes and small.dtype == "int8"
    assert exact != near and abs(near - exact) < 0.05 * abs(exact)


def test_a_teacher_that_does_not_fit_is_refused_before_anything_is_loaded(
    tiny_folder, large_folder, alone, tmp_path, monkeypatch
):
    with pytest.raises(ConfigError, match=r"config\.teacher\.folder"):
        checks.check_models(make(tiny_folder, tmp_path / "nothing", tmp_path))
    small = write_teacher(tmp_path / "small", tiny_folder, dataclasses.replace(LARGE, vocab=24))
    other = write_teacher(tmp_path / "other", tiny_folder)
    tokenizer = other / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text().replace("again", "gaina"))
    monkeypatch.delattr(components, "load_frozen")
    for folder, words in ((other, "tokenizer"), (small, "at least the policy's 32 tokens")):
        with pytest.raises(ConfigError, match=f"teacher.folder = '{folder}'.*{words}"):
            build(make(tiny_folder, folder, tmp_path))
