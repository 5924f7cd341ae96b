"""Configs, measured runs and page of the ablation agree."""

import importlib
import json
import pathlib
import re
import sys

import pytest

from dapo_jax import algorithms
from dapo_jax.config.checks import validate
from dapo_jax.types.errors import ConfigError

ROOT = pathlib.Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
two_strategies = importlib.import_module("configs.two_strategies")
measured = importlib.import_module("notebooks.measured")
measure = importlib.import_module("notebooks.measure")
NAMES = [*two_strategies.RUNGS, *measured.COMBINATIONS, *two_strategies.CLAIMS]


def test_the_first_rung_is_dapo_without_its_tricks_and_the_last_is_dapo():
    last = two_strategies.get_config("6_dynamic_sampling").algorithm
    naive, grpo = two_strategies.get_config("1_naive").algorithm, algorithms.preset("grpo")
    assert last == algorithms.preset("dapo")
    without_kl = {"reference": False, "kl": "none", "kl_coefficient": 0.0, "dual_clip": 10.0}
    assert vars(naive) == vars(grpo) | without_kl


@pytest.mark.parametrize("name", NAMES)
def test_every_experiment_passes_the_checks_before_a_run(name):
    validate(two_strategies.get_config(name))


def test_combinations_are_all_sixteen_and_a_wrong_name_is_refused(monkeypatch):
    assert len(set(measured.COMBINATIONS)) == 16
    others = set(measured.LADDER.values()) - set(measured.COMBINATIONS)
    assert others == {"overlong_filtering", "clip_higher+overlong_filtering"}
    monkeypatch.setattr(sys, "argv", ["measure.py", "--names", "clip_lower"])
    for call in (lambda: two_strategies.get_config("clip_lower"), measure.main):
        with pytest.raises(ConfigError, match="clip_lower.*one of 1_naive.*dr_grpo.*clip_higher"):
            call()


def test_every_run_was_measured_with_the_settings_of_today():
    assert len(list(measured.FOLDER.glob("*.json"))) == len(measured.PLAN)
    for name, seed in measured.PLAN:
        run = json.loads(measured.path(name, seed).read_text())
        config = two_strategies.get_config(name)
        assert (run["name"], run["seed"]) == (name, seed)
        assert run["settings"] == measure.decisive(config), name
        assert all(len(column) == config.total_steps for column in run["steps"].values()), name
        assert len(run["heldout_right_after"]) == config.data.heldout_problems


def test_the_page_shows_what_was_measured():
    page, figure = measure.PAGE.read_text(), re.compile(r"\d\.\d{3}")
    made = measure.with_tables(page)
    assert figure.sub("", made) == figure.sub("", page)
    pairs = zip(figure.findall(made), figure.findall(page), strict=True)
    # Releases of numpy resample a little differently: 2.5's interval has another last digit.
    assert max(abs(float(a) - float(b)) for a, b in pairs) < 0.0015
    assert page.count("<!-- ") == 8 and len(measured.tables()) == 4


def test_every_figure_in_the_text_of_the_page_stands_in_a_table():
    page, shown = measure.PAGE.read_text(), "".join(measured.tables().values())
    text = re.sub(r"<!-- (\w+) -->.*?<!-- /\1 -->", "", page, flags=re.S)
    figures = re.findall(r"[+-]?\b0\.\d{3}\b(?: \[.+?\])?", text)
    assert len(figures) > 5 and not [figure for figure in figures if figure not in shown]
