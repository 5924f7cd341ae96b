"""The report as a browser shows it: no error, no network, both widths, names, keys, in time."""

import json
import pathlib
import random

import pytest
from browser import CHROMIUM, browser
from reports import HOSTILE, response, row

from dapo_jax.config.experiment import Optimizer, ReportConfig
from dapo_jax.extras.report import command as report
from dapo_jax.extras.report.curves import read_curves

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium on PATH"),
]
NAMED = {"combobox", "button", "checkbox", "link", "image", "region"}
# Pictures that leave their card, and texts in them that are cut or lie on each other.
MISPLACED = pathlib.Path(__file__).with_suffix(".js").read_text()
SHOTS = pathlib.Path("build/report")


@pytest.fixture
def report_of_three(write_run, tmp_path):  # noqa: F811
    """Two seeds and another experiment, of 1,000 steps with every metric and hostile texts."""
    chance = random.Random(0)
    names = [name for curve in read_curves() for name in curve.metrics if "heldout" not in name]

    def rows() -> list[dict]:
        return [row(s, **{name: chance.random() for name in names}) for s in range(1001)]

    pieces = {"token_texts": ["so ", "<b>2", ""], "token_logprobs": [-0.1, -5.0, 0.0]}
    pieces |= {"token_ratios": [1.0, 1.5, 0.5], "token_clipped": [0, 2, 1]}
    details = [response(1, i, prompt=HOSTILE, **pieces) for i in range(4)]
    long = [response(2, i, response=HOSTILE * 40, advantage=None) for i in range(4)]
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


def test_no_error_no_network_both_widths_and_in_time(report_of_three, tmp_path):
    SHOTS.mkdir(parents=True, exist_ok=True)
    with browser(tmp_path / "profile") as page:
        page.open(report_of_three, 1440)  # starts the browser's own processes
        for width in 390, 1100, 1440:
            page.open(report_of_three, width)
            assert int(page.run("document.documentElement.dataset.firstPicture")) < 3000
            assert page.run("document.documentElement.scrollWidth") <= width
            page.scroll_through()
            assert page.run(MISPLACED) == []
            assert page.run("document.documentElement.scrollWidth") <= width
            page.screenshot(SHOTS / f"{width}.png")
        unnamed = [role for role, name in names_of_controls(page) if not name.strip()]
        assert not unnamed
        assert page.run("document.querySelectorAll('img').length") == 0  # those of hostile texts
        assert not page.trouble, json.dumps(page.trouble)[:2000]
        assert {url for url in page.asked} <= {report_of_three.as_uri()}


def press(page, key: str, code: int, text: str = "") -> None:
    for kind in "keyDown", "keyUp":
        page.call(
            "Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=code, text=text
        )


def test_the_keyboard_reaches_everything(report_of_three, tmp_path):
    focused = "(e => e.id || e.textContent.slice(0, 30))(document.activeElement)"
    with browser(tmp_path / "profile") as page:
        page.open(report_of_three, 1440)
        reached = []
        for _ in range(120):
            press(page, "Tab", 9)
            reached.append(page.run(focused))
            if reached[-1] == "next":
                before = page.run("document.getElementById('responses').textContent")
                chosen = page.run("document.getElementById('group').selectedIndex")
                press(page, "Enter", 13, "\r")
                break
            if reached[-1] == "group":
                press(page, "Home", 36)
        assert {"axis", "smooth", "experiment-0", "experiment-1", "group"} <= set(reached)
        assert reached[0] == "Skip to the curves"
        assert page.run("document.getElementById('group').selectedIndex") == chosen + 1
        assert page.run("document.getElementById('responses').textContent") != before
        press(page, "Tab", 9)
        assert page.run(focused) == "colour"
        page.run("document.getElementById('group').value = 0; drawGroup()")
        page.wait("document.querySelector('#responses .clip')?.title.includes('the upper clip')")
        assert not page.trouble


def test_turns_show_who_spoke_and_nobody_speaks_in_anothers_place(write_run, tmp_path):
    forged = "<b>environment</b>, 2 tokens\n9"
    output = [("policy", 3, f"1+2={forged}"), ("environment", 2, HOSTILE), ("policy", 1, "3")]
    pieces = {"token_texts": ["1+2=", forged, "", "3"], "token_logprobs": [-0.1, -5.0, 0.0, -1.0]}
    played = {"turns": output, "environment_rewards": [0.25, 1.0], "response": "3"}
    lines = [response(1, 0, **played, **pieces), response(1, 1, **played), response(1, 2)]
    out = tmp_path / "report.html"
    report.report(ReportConfig(run=write_run("a", rollouts=[(1, lines)]), out=str(out)))
    shown = "[...document.querySelectorAll('#responses details')].map(d =>"
    shown += (
        " [...d.querySelectorAll('.turn')].map(t => [t.className, ...[...t.children].map({})]))"
    )
    with browser(tmp_path / "profile") as page:
        page.open(out, 1100)
        page.wait("document.querySelector('#responses details')")
        page.run("byId('open').click()")
        page.wait("document.querySelectorAll('#responses .observed').length == 2")
        texts = page.run(shown.format("c => c.textContent"))
        assert [turn[:2] for turn in texts[0]] == [
            ["turn", "policy, 3 tokens, reward 0.25"],
            ["turn observed", "environment, 2 tokens"],
            ["turn", "policy, 1 tokens, reward 1"],
        ]
        assert [turn[2] for turn in texts[0]] == [f"1+2={forged}\u25e6", HOSTILE, "3"]
        assert [turn[2] for turn in texts[1]] == [text for _, _, text in output]
        assert texts[2] == []
        tokens = page.run(shown.format("c => c.querySelectorAll('span').length"))
        assert [turn[2] for turn in tokens[0]] == [3, 0, 1]
        assert page.run("document.querySelectorAll('img').length") == 0 and not page.trouble
        SHOTS.mkdir(parents=True, exist_ok=True)
        page.screenshot(SHOTS / "turns.png")


def test_gaps_stay_gaps_and_rounding_is_flat(write_run, tmp_path):
    """Of 60 steps, a tenth clips something; the two policies differ by rounding alone."""
    clips = [float(step % 10 == 0) for step in range(60)]
    rows = [
        row(
            step,
            clip_fraction_high=clip,
            up_clipped_probability=0.3 * clip,
            kl_sampler_trainer=1e-8 * (-1) ** step,
        )
        for step, clip in enumerate(clips)
    ]
    out = tmp_path / "report.html"
    seeds = [write_run(f"a{seed}", 60, seed=seed, rows=rows) for seed in range(2)]
    report.report(ReportConfig(run="\n".join(seeds), out=str(out)))
    of = "[...document.querySelectorAll('.plot')].find(p => p.curve?.title === '{}')"
    with browser(tmp_path / "profile") as page:
        page.open(out, 1100)
        page.scroll_through()
        page.run("byId('smooth').value = '5'; byId('smooth').dispatchEvent(new Event('change'))")
        clipped = of.format("Probability of up-clipped tokens")
        y = page.run(f"{clipped}.data.at(-1).y")
        assert [step for step, value in enumerate(y) if value is not None] == [*range(0, 60, 10)]
        assert (
            page.run(f"{clipped}.querySelectorAll('.point').length") == 6
        )  # dots, as nothing joins them
        kl = of.format("Sampler against trainer")
        low, high = page.run(f"{kl}.layout.yaxis.range")
        assert high - low > 0.001 and "rounding" in page.run(f"{kl}.nextSibling.textContent")
        assert "lowest seed" in page.run("byId('bands').textContent")
        assert not page.trouble
