"""The page of algorithms: its table has every preset, its figure what the library computes."""

import importlib.util
import re

import numpy as np
import pytest
from shown_commands import ROOT

from dapo_jax.algorithms import PRESETS, preset
from dapo_jax.config.algorithm import Algorithm

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
RATIOS = {"token": "r", "sequence": "s", "product": "W", "geometric": "g"}
REGIONS = {
    "ratio": lambda low, high: f"in [{1 - low:g}, {1 + high:g}]",
    "log_ratio": lambda low, high: f"in [e^−{low:g}, e^{high:g}]",
    "tv": lambda low, high: f"in −{low:g} ≤ p − p_old ≤ {high:g}",
    "kl": lambda low, high: f"in KL ≤ {high:g}",
}
OTHERS = {"product": "∏ ρ", "token": "ρ"}
REJECTIONS = {"token": "ρ", "sequence": "mean ρ", "worst": "every ρ"}
SCALES = {"batch": "/ std of the batch", "mean": "/ mean of the group", "informative": "x groups /"}


def required_texts(algorithm: Algorithm) -> list[str]:
    """Return texts that the row of a preset must have in its coefficient."""
    texts = [f"`{algorithm.advantage}`", *["whitened"] * algorithm.whiten]
    if algorithm.region != "none":
        texts.append(REGIONS[algorithm.region](algorithm.clip_low, algorithm.clip_high))
    if algorithm.weight == "ratio" and algorithm.ratio != "none" and not algorithm.weight_high:
        texts.append(f"{RATIOS[algorithm.ratio]} A")
    if algorithm.region_sides == "both":
        texts.append("on both sides")
    if algorithm.weight_high:
        texts.append(f"min({RATIOS[algorithm.ratio]}, {algorithm.weight_high:g}) A")
    if algorithm.weight == "sapo":
        texts.append(f"τ {algorithm.decay_positive:g} / {algorithm.decay_negative:g}")
    if algorithm.weight == "gamma":
        texts.append(f"k {algorithm.power_positive:g} / {algorithm.power_negative:g}")
        texts.append(f"λ {algorithm.decay_positive:g} / {algorithm.decay_negative:g}")
    if algorithm.dual_clip:
        texts.append(f"dual clip {algorithm.dual_clip:g}")
    if algorithm.importance_cap:
        texts.append(f"min({OTHERS[algorithm.importance_ratio]}, {algorithm.importance_cap:g})")
    if algorithm.rejection != "none":
        ratio = REJECTIONS[algorithm.rejection]
        ratio = ratio if algorithm.rejection_of == "old" else "mean p / p_sampler"
        high = f"{algorithm.rejection_high:g}]" if algorithm.rejection_high else "∞)"
        texts.append(f"unless {ratio} in [{algorithm.rejection_low:g}, {high}")
        texts += ["where A < 0"] * (algorithm.rejection_sign == "negative")
    if algorithm.covariance != "none":
        texts.append(f"{100 * algorithm.covariance_fraction:g} %")
        low, high = algorithm.covariance_low, algorithm.covariance_high
        texts += [f"covariance in ({low:g}, {high:g})"] * (algorithm.covariance == "clip")
    if algorithm.kl != "none":
        texts.append(f"β {algorithm.kl_coefficient:g}")
    if algorithm.advantage_scale != "none":
        texts.append(SCALES[algorithm.advantage_scale])
    if algorithm.advantage == "pass_at_k":
        texts.append(f"k {algorithm.pass_k}")
    return texts


def test_every_preset_has_one_row_in_the_order_of_the_presets():
    assert [name for name, *_ in ROWS] == list(PRESETS)


@pytest.mark.parametrize("row", ROWS, ids=[row[0] for row in ROWS])
def test_a_row_is_the_preset(row):
    name, coefficient, weight, new, _ = row
    algorithm = preset(name)
    assert not [text for text in required_texts(algorithm) if text not in coefficient]
    assert re.findall(r"`(\w+)`", coefficient) == [algorithm.advantage]
    assert weight == WEIGHTS[algorithm.aggregate]
    absent = {
        "dual clip": not algorithm.dual_clip,
        "β": algorithm.kl == "none" and algorithm.advantage != "preference",
        "unless": algorithm.rejection == "none",
        "covariance": algorithm.covariance == "none",
        "whitened": not algorithm.whiten,
        "ρ": not algorithm.importance_cap and algorithm.rejection == "none",
    }
    assert not [text for text, is_absent in absent.items() if is_absent and text in coefficient]
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
