"""The report as a browser shows it: no error, no network, both widths, names, keys."""

import json
import pathlib
import random

import pytest
from browser import CHROMIUM, browser
from reports import HOSTILE, response, row
from test_report import read_charts

from dapo_jax.config.experiment import Optimizer, ReportConfig
from dapo_jax.extras.report import command as report

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium on PATH"),
]
NAMED = {"link", "image", "region", "DisclosureTriangle"}
# Pictures that leave their card, and texts in them that are cut or lie on each other.
MISPLACED = pathlib.Path(__file__).with_suffix(".js").read_text()
SHOTS = pathlib.Path("build/report")


@pytest.fixture
def report_of_three(write_run, tmp_path):
    """Three runs of 1,000 steps with every metric and hostile texts."""
    chance = random.Random(0)
    names = [n for chart in read_charts() for n in chart["metrics"] if "heldout" not in n]

    def rows() -> list[dict]:
        return [row(s, **{name: chance.random() for name in names}) for s in range(1001)]

    pieces = {"token_texts": ["so ", "<b>2", ""], "token_logprobs": [-0.1, -5.0, 0.0]}
    pieces |= {"token_ratios": [1.0, 1.5, 0.5], "token_clipped": [0, 2, 1]}
    details = [response(1, i, prompt=HOSTILE, **pieces) for i in range(4)]
    turns = [("policy", 3, "1+2="), ("environment", 2, HOSTILE * 40), ("policy", 1, "3")]
    long = [response(2, i, turns=turns, advantage=None) for i in range(4)]
    files = [(step, details + long) for step in (1, 500, 1000)]
    runs = [write_run(f"a_seed{i}", 1000, files, i, rows()) for i in range(2)]
    runs.append(write_run("<b>", 1000, (), 0, rows(), optimizer=Optimizer(learning_rate=0.1)))
    out = tmp_path / "report.html"
    report.report(ReportConfig(run="\n".join(runs), out=str(out)))
    return out


def names_of_controls(page) -> list[tuple[str, str]]:
    """(role, name) of whatever has a role that asks for a name."""
    nodes = page.call("Accessibility.getFullAXTree")["nodes"]
    shown = [node for node in nodes if not node["ignored"]]
    output = [(n["role"]["value"], n.get("name", {}).get("value", "")) for n in shown]
    return [(role, name) for role, name in output if role in NAMED]


def test_no_error_no_network_and_both_widths(report_of_three, tmp_path):
    SHOTS.mkdir(parents=True, exist_ok=True)
    with browser(tmp_path / "profile") as page:
        for width in 390, 1100, 1400:
            page.open(report_of_three, width)
            assert page.run("document.documentElement.scrollWidth") <= width
            assert page.run(MISPLACED) == []
            page.screenshot(SHOTS / f"{width}.png")
        names = names_of_controls(page)
        assert {role for role, _ in names} == NAMED, names
        assert [role for role, name in names if not name.strip()] == []
        assert page.run("document.querySelectorAll('img, script').length") == 0
        assert not page.trouble, json.dumps(page.trouble)[:2000]
        assert {*page.asked} == {report_of_three.as_uri()}


def test_the_keyboard_opens_a_group(report_of_three, tmp_path):
    with browser(tmp_path / "profile") as page:
        page.open(report_of_three, 1400)
        for _ in range(20):
            press(page, "Tab", 9)
            if page.run("document.activeElement.parentElement.className") == "group":
                break
        press(page, "Enter", 13, "\r")
        assert page.run("document.activeElement.parentElement.open")


def press(page, key: str, code: int, text: str = "") -> None:
    for kind in "keyDown", "keyUp":
        page.call(
            "Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=code, text=text
        )
