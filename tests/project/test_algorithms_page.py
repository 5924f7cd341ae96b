"""The page of algorithms: its table has every preset, its figure what the library computes."""

import importlib.util
import re

import numpy as np
import pytest
from shown_commands import ROOT

from dapo_jax.config.algorithms import PRESETS, preset

PAGE = (ROOT / "docs/algorithms.md").read_text(encoding="utf-8")
ROW = re.compile(r"^\| `(\w+)` \| (.+?) \| (.+?) \| (.+?) \| (.*?) ?\|$", re.MULTILINE)
ROWS = ROW.findall(PAGE.partition("## Presets")[2].partition("\nAny field")[0])
WEIGHTS = {
    "token_mean": "1 / N",
    "sequence_mean": "1 / (nᵢ B)",
    "sequence_sum": "1 / B",
    "token_sum_over_budget": "1 / (L B)",
    "pair_sum": "1 / pairs",
}


def test_every_preset_has_one_row_in_the_order_of_the_presets():
    assert [name for name, *_ in ROWS] == list(PRESETS)


@pytest.mark.parametrize("row", ROWS, ids=[row[0] for row in ROWS])
def test_a_row_is_the_preset(row):
    name, coefficient, weight, new, _ = row
    algorithm = preset(name)
    assert re.findall(r"`(\w+)`", coefficient) == [algorithm.advantage]
    assert weight == WEIGHTS[algorithm.aggregate]
    prefers = algorithm.advantage == "preference"
    beta = algorithm.preference_beta if prefers else algorithm.kl_coefficient
    parts = {
        f"dual clip {algorithm.dual_clip:g}": algorithm.dual_clip > 0,
        f"β {beta:g}": algorithm.kl != "none" or prefers,
        "unless": algorithm.rejection != "none",
        "covariance": algorithm.covariance != "none",
        "whitened": algorithm.whiten,
    }
    shown = [text for text in parts if re.search(rf"{re.escape(text)}(?![.\d])", coefficient)]
    assert shown == [text for text, is_there in parts.items() if is_there]
    assert ("reward 0 / 1" in new) == (algorithm.reward_wrong == 0)
    assert ("dynamic sampling" in new) == (name == "dapo")
    assert not algorithm.critic or "critic" in new


def test_the_figure_shows_what_the_library_computes():
    spec = importlib.util.spec_from_file_location("coefficients", ROOT / "docs/coefficients.py")
    figure = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(figure)
    shown, computed = figure.recorded(), figure.numbers()
    assert list(shown) == list(computed)
    for name, lines in computed.items():
        np.testing.assert_allclose(shown[name], lines, atol=2e-3, err_msg=name)
