"""The ladder and the four switches: what they set, and that what is shown of them was measured."""

import importlib
import json
import pathlib
import sys

import numpy as np
import pytest

from dapo_jax import algorithms
from dapo_jax.runtime.settings import ConfigError

ROOT = pathlib.Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
ladder = importlib.import_module("configs.ladder")
measured = importlib.import_module("notebooks.measured")
measure = importlib.import_module("notebooks.measure")


def switched(name: str) -> dict:
    """What a rung's algorithm has otherwise than the first one."""
    first, other = (vars(ladder.get_config(one).algorithm) for one in ("1_naive", name))
    return {key: value for key, value in other.items() if value != first[key]}


def test_the_first_rung_is_dapo_without_its_tricks_and_the_last_is_dapo():
    assert ladder.get_config("6_dynamic_sampling").algorithm == algorithms.preset("dapo")
    naive, grpo = ladder.get_config("1_naive").algorithm, algorithms.preset("grpo")
    without_kl = {"reference": False, "kl": "none", "kl_coefficient": 0.0, "dual_clip": 10.0}
    assert vars(naive) == vars(grpo) | without_kl


def test_a_rung_adds_one_trick():
    punished = {"overlong_punishment": True, "clip_high": 0.28}
    token_level = punished | {"aggregate": "token_mean"}
    assert [switched(name) for name in ladder.RUNGS] == [
        {},
        {"overlong_filtering": True},
        {"overlong_filtering": True, "clip_high": 0.28},
        punished,
        token_level,
        token_level | {"dynamic_sampling": True},
    ]
    # And nothing else of the experiment changes but where it is written.
    for name in ladder.RUNGS:
        config = ladder.get_config(name)
        assert config.run_dir == f"runs/ladder/{name}"
        naive = ladder.get_config("1_naive")
        config.algorithm, config.run_dir = naive.algorithm, naive.run_dir
        assert config == naive


def test_combinations_are_all_sixteen_and_a_wrong_switch_is_named():
    assert len(set(measured.COMBINATIONS)) == 16
    assert set(measured.LADDER.values()) - set(measured.COMBINATIONS) == {
        "overlong_filtering",
        "clip_higher+overlong_filtering",
    }
    with pytest.raises(ConfigError, match="clip_lower.*one of 1_naive"):
        ladder.get_config("clip_lower")


def test_every_run_was_measured_with_the_settings_of_today():
    wanted = {(name, seed) for name in measured.LADDER.values() for seed in range(5)}
    wanted |= {(name, seed) for name in measured.COMBINATIONS for seed in range(3)}
    found = {}
    for path in measured.FOLDER.glob("*.json"):
        one = json.loads(path.read_text())
        found[one["name"], one["seed"]] = one
    assert set(found) == wanted
    for (name, _), one in found.items():
        assert one["settings"] == measure.decisive(ladder.get_config(name)), name
        assert all(len(column) == 16 for column in one["steps"].values())


def test_the_page_shows_what_was_measured():
    page = measure.PAGE.read_text()
    assert measure.with_tables(page) == page
    assert page.count("<!-- ") == 6 and len(measure.tables()) == 3


def test_a_run_is_measured_from_end_to_end(base, tmp_path, monkeypatch, alone):
    """A small one, whose figures are counted again from what it wrote."""
    (tmp_path / "base").symlink_to(base)
    of_ladder = ladder.get_config

    def small(name):
        config = of_ladder(name)
        config.total_steps, config.rollout.updates_per_rollout = 2, 2
        config.rollout.prompts_per_step, config.data.heldout_problems = 4, 6
        config.data.min_terms, config.data.max_terms, config.sampler.slots = 2, 3, 16
        return config

    monkeypatch.setattr(ladder, "get_config", small)
    monkeypatch.setattr(measured, "FOLDER", tmp_path / "found")
    measure.run("dynamic_sampling", 3, tmp_path)
    (run,) = measured.runs("dynamic_sampling")
    assert (run.name, run.seed, len(run.after)) == ("dynamic_sampling", 3, 6)
    folder = tmp_path / "dynamic_sampling_seed3"
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert run.after.mean() == pytest.approx(rows[-1]["heldout_accuracy"])
    assert run.before.mean() == pytest.approx(rows[0]["heldout_accuracy"])
    for row, sampled in zip(rows[1:], run.columns["sampled_tokens"], strict=True):
        path = folder / f"rollouts/step_{row['step']:06d}.jsonl"
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        trained = sum(line["tokens"] for line in lines if line["advantage"] is not None)
        assert sampled == pytest.approx(row["sampled_to_kept_tokens"] * trained, abs=1)


def test_the_cost_counts_tokens_up_to_the_step_that_got_there():
    columns = {"accuracy": np.array([0.1, 0.6, 0.8, 0.7, 0.9]), "sampled_tokens": np.arange(5)}
    run = measured.Run("x", 0, columns, np.zeros(1), np.zeros(1))
    assert run.reached(0.7) == 4 and run.tokens_until(4) == 6 and run.reached(0.95) is None
