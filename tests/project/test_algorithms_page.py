"""The page of algorithms: its table has every preset as it is, its figure what the library does."""

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


def said_of(algorithm: Algorithm) -> list[str]:
    """Texts that the row of a preset must have in its coefficient."""
    found = [f"`{algorithm.advantage}`", *["whitened"] * algorithm.whiten]
    if algorithm.region != "none":
        found.append(REGIONS[algorithm.region](algorithm.clip_low, algorithm.clip_high))
    if algorithm.weight == "ratio" and algorithm.ratio != "none" and not algorithm.weight_high:
        found.append(f"{RATIOS[algorithm.ratio]} A")
    if algorithm.region_sides == "both":
        found.append("on both sides")
    if algorithm.weight_high:
        found.append(f"min({RATIOS[algorithm.ratio]}, {algorithm.weight_high:g}) A")
    if algorithm.weight == "sapo":
        found.append(f"τ {algorithm.decay_positive:g} / {algorithm.decay_negative:g}")
    if algorithm.weight == "gamma":
        found.append(f"k {algorithm.power_positive:g} / {algorithm.power_negative:g}")
        found.append(f"λ {algorithm.decay_positive:g} / {algorithm.decay_negative:g}")
    if algorithm.dual_clip:
        found.append(f"dual clip {algorithm.dual_clip:g}")
    if algorithm.importance_cap:
        found.append(f"min({OTHERS[algorithm.importance_ratio]}, {algorithm.importance_cap:g})")
    if algorithm.rejection != "none":
        ratio = REJECTIONS[algorithm.rejection]
        ratio = ratio if algorithm.rejection_of == "old" else "mean p / p_sampler"
        high = f"{algorithm.rejection_high:g}]" if algorithm.rejection_high else "∞)"
        found.append(f"unless {ratio} in [{algorithm.rejection_low:g}, {high}")
        found += ["where A < 0"] * (algorithm.rejection_sign == "negative")
    if algorithm.kl != "none":
        found.append(f"β {algorithm.kl_coefficient:g}")
    if algorithm.advantage_scale != "none":
        found.append(SCALES[algorithm.advantage_scale])
    if algorithm.advantage == "pass_at_k":
        found.append(f"k {algorithm.pass_k}")
    return found


def test_every_preset_has_one_row_in_the_order_of_the_presets():
    assert [name for name, *_ in ROWS] == list(PRESETS)


@pytest.mark.parametrize("row", ROWS, ids=[row[0] for row in ROWS])
def test_a_row_is_the_preset(row):
    name, coefficient, weight, new, _ = row
    algorithm = preset(name)
    assert not [text for text in said_of(algorithm) if text not in coefficient]
    assert re.findall(r"`(\w+)`", coefficient) == [algorithm.advantage]
    assert weight == WEIGHTS[algorithm.aggregate]
    absent = {
        "dual clip": not algorithm.dual_clip,
        "β": algorithm.kl == "none" and algorithm.advantage != "preference",
        "unless": algorithm.rejection == "none",
        "whitened": not algorithm.whiten,
        "ρ": not algorithm.importance_cap and algorithm.rejection == "none",
    }
    assert not [text for text, is_absent in absent.items() if is_absent and text in coefficient]
    assert ("reward 0 / 1" in new) == (algorithm.reward_wrong == 0)
    assert ("dynamic sampling" in new) == (name == "dapo")
    assert not algorithm.critic or "critic" in new


@pytest.fixture(scope="module")
def figure():
    spec = importlib.util.spec_from_file_location("coefficients", ROOT / "docs/coefficients.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def numbers(figure):
    return figure.numbers()


def test_the_figure_shows_what_the_library_computes(figure, numbers):
    shown = figure.recorded()
    assert list(shown) == list(numbers)
    for name, lines in numbers.items():
        np.testing.assert_allclose(shown[name], lines, atol=2e-3, err_msg=name)


def bell(x):
    """sigmoid(x) sigmoid(-x)."""
    return 1 / (2 + np.exp(x) + np.exp(-x))


def binary_kl(old, p):
    return old * np.log(old / p) + (1 - old) * np.log((1 - old) / (1 - p))


# Coefficient at ratio r of probability p, old probability q and sign a, as the page has it.
FORMULAS = {
    "reinforce": lambda r, p, q, a: a + 0 * r,
    "grpo": lambda r, p, q, a: a * r * np.where(a > 0, r <= 1.2, r >= 0.8),
    "dapo": lambda r, p, q, a: a * r * np.where(a > 0, r <= 1.28, (r >= 0.8) & (r <= 10)),
    "gspo": lambda r, p, q, a: a * r * np.where(a > 0, r <= 1.0004, r >= 0.9997),
    "gmpo": lambda r, p, q, a: a * r * (a * np.log(r) <= 0.4),
    "dppo_tv": lambda r, p, q, a: a * r * (a * (p - q) <= 0.15),
    "dppo_kl": lambda r, p, q, a: a * r * ((a * (p - q) < 0) | (binary_kl(q, p) <= 0.05)),
    "prime_rl": lambda r, p, q, a: a * r * (a * (p - q) <= 0.2) - 0.002 * np.log(r),
    "ipo": lambda r, p, q, a: a * r * (np.abs(p - q) <= 0.1) - 0.002 * np.log(r),
    "deepseek_v3p2": lambda r, p, q, a: a * r * np.where(a > 0, r <= 1.2, r >= 0.9),
    "cispo": lambda r, p, q, a: a * np.minimum(r, 5),
    "sapo": lambda r, p, q, a: 4 * a * r * bell((1 if a > 0 else 1.05) * (r - 1)),
    "vespo": lambda r, p, q, a: (
        a * (r**2 * np.exp(3 * (1 - r)) if a > 0 else r**3 * np.exp(2 * (1 - r)))
    ),
    "topr": lambda r, p, q, a: a * (1 + 0 * r if a > 0 else np.minimum(r, 1)),
    "dro": lambda r, p, q, a: a - 0.1 * np.log(r),
}


@pytest.mark.parametrize("name", FORMULAS)
def test_a_coefficient_is_the_formula_of_the_page(figure, numbers, name):
    ratios = figure.RATIOS
    off_bounds = (np.abs(ratios - 4) > 1e-6) & (np.abs(ratios - 3) > 1e-6)  # dppo_tv's, ipo's
    for sign, found in zip(figure.SIGNS, numbers[name], strict=True):
        expected = FORMULAS[name](ratios, ratios * figure.OLD, figure.OLD, sign)
        np.testing.assert_allclose(np.array(found)[off_bounds], expected[off_bounds], atol=2e-4)


def test_every_term_of_the_figure_has_its_formula(figure):
    assert set(FORMULAS) == set(figure.TERMS)
