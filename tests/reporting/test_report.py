"""The report page: what it says of runs, what it refuses, and that no text in it is ever run."""

import dataclasses
import functools
import importlib.resources
import json
import pathlib
import platform
import re
import sys
import tomllib

import jax
import pytest
from conftest import check_documented
from reports import HOSTILE, Page, response, row
from row_files import read_table

from dapo_jax.config.experiment import Config
from dapo_jax.config.settings import leaves
from dapo_jax.extras.report import command as report
from dapo_jax.extras.report import page, recorded_run
from dapo_jax.extras.report.curves import STRETCHES, draw
from dapo_jax.extras.report.recorded_run import SHOWN_CHARACTERS, read_run, sample_groups
from dapo_jax.run.console import Progress
from dapo_jax.types.errors import ConfigError


def make(*folders: str) -> str:
    return page.page([read_run(folder) for folder in folders])


def read_charts() -> list[dict]:
    path = importlib.resources.files("dapo_jax.extras.report") / "page.charts.toml"
    return tomllib.loads(path.read_text("utf-8"))["chart"]


def test_text_that_a_model_wrote_is_never_markup(write_run):
    turns = [["policy", 4, HOSTILE], ["environment", 9, HOSTILE * 2000]]
    own = {"response": HOSTILE, "prompt": HOSTILE, "prompt_id": HOSTILE, "answer": HOSTILE}
    own |= {"extracted": HOSTILE, "reward_parts": {HOSTILE: 1.0}, "failure": HOSTILE}
    lines = [response(0, 0, **own, turns=turns), response(0, 1, **own, token_texts=[HOSTILE] * 4)]
    hostile = write_run("</title><script>alert(1)<", rollouts=[(1, lines)], rows=[row(0)])
    text = make(hostile, write_run("b"))
    result = Page(text)
    assert not {tag for tag, _ in result.tags} & {"script", "img", "link", "iframe", "object"}
    assert not any(name.startswith("on") for _, attrs in result.tags for name in attrs)
    assert result.text.count(HOSTILE) > 5 + 4  # fields of the group and responses, and tokens
    assert hostile.rsplit("/")[-1] in result.text and len(text) < 10 * SHOWN_CHARACTERS + 100_000
    (policy,) = (a["content"] for _, a in result.tags if a.get("http-equiv"))
    assert policy.startswith("default-src 'none'; style-src 'unsafe-inline';")
    assert not [attrs for _, attrs in result.tags if attrs.keys() & {"src", "srcset"}]
    assert all(attrs["href"][0] == "#" for _, attrs in result.tags if "href" in attrs)


def test_a_shared_file_has_nothing_of_the_user(write_run, tmp_path, monkeypatch):
    """Texts are planted in every setting, key, row, rollout, name and variable of a run."""
    secret = "alice-10.1.2.3-hf_TOKEN"
    for name in ("HOSTNAME", "USER", "HF_TOKEN"):
        monkeypatch.setenv(name, secret)
    planted = row(
        1, **{secret: 1.0, f"reward_parts/{secret}": 1.0, "reward": secret, "note": secret}
    )
    folder = write_run(
        secret, rows=[row(0), planted], rollouts=[(1, [response(0, 0, prompt=secret)])]
    )
    path = pathlib.Path(folder, "config.json")
    settings = dataclasses.asdict(Config())
    texts = [name for name, _, value in leaves(Config()) if isinstance(value, str)]
    for name in texts:
        section, _, field = name.rpartition(".")
        functools.reduce(dict.get, section.split(".") if section else [], settings)[field] = secret
    settings["model"]["folder"] = f"/home/{secret}/Qwen2.5-0.5B-Instruct"
    settings["algorithm"] |= {"clip_high": 0.31, "kl_to": "old", secret: 1}
    path.write_text(json.dumps(settings))
    out = tmp_path / "shared.json"
    report.report(report.ReportConfig(run=folder, share=str(out)))
    shared = json.loads(out.read_text())
    assert secret.casefold() not in out.read_text().casefold()
    for private in (str(tmp_path), platform.node(), "/home", "alice"):
        assert private not in out.read_text()
    assert shared["model"] == "Qwen2.5-0.5B" and "jax " in shared["packages"]
    assert shared["chips"] == {"kind": "cpu", "count": jax.device_count()}
    assert shared["settings"]["algorithm.clip_high"] == 0.31
    assert shared["settings"]["algorithm.kl_to"] == "old"
    assert shared["settings"]["data.source"] == "not shared" and len(texts) > 50
    assert [row["step"] for row in shared["metrics"]] == [0, 1]
    assert shared["metrics"][0]["reward"] and "reward" not in shared["metrics"][1]
    with pytest.raises(ConfigError, match="share = .*: must be a new .json file"):
        report.report(report.ReportConfig(run=folder, share=str(out)))


def test_a_long_curve_keeps_its_peaks(write_run):
    rows = [row(s, gradient_norm=90.0 if s == 2477 else 1 + s % 7) for s in range(5001)]
    ((_, _, path),) = draw([("a", rows, "gradient_norm")], 0.001)["lines"]
    heights = [float(y) for y in re.findall(r",([\d.]+)", path)]
    assert len(heights) <= 2 * STRETCHES and heights.count(min(heights)) == 1
    assert min(heights) < 20 < sorted(heights)[1]
    assert len(make(write_run("long", 5000, rows=rows))) < 200_000


def test_steps_are_sampled_and_long_texts_cut(write_run):
    files = [
        (step, [response(g, i, response="x" * 9000) for g in range(6) for i in range(4)])
        for step in range(1, 61)
    ]
    folder = write_run("long", rollouts=files)
    groups = sample_groups(read_run(folder), page.MAX_STEPS)
    assert len(groups) == page.MAX_STEPS * recorded_run.SHOWN_GROUPS
    assert {group["step"] for group in groups} >= {1, 60}
    texts = [turn[-1] for group in groups for one in group["responses"] for turn in one["shown"]]
    assert all("[... 3,000 characters ...]" in text and len(text) < 6100 for text in texts)
    twice = make(folder, write_run("other", seed=1, rollouts=files))
    assert twice.count('<details class="group"') == len(groups)


def test_tokens_are_shaded_and_nobody_speaks_in_anothers_place(write_run):
    forged = "<b>environment</b>, 2 tokens\n9"
    turns = [("policy", 3, f"1+2={forged}"), ("environment", 2, "4"), ("policy", 1, "3")]
    pieces = {"token_texts": ["1+2=", forged, "", "3"], "token_logprobs": [-0.1, -5.0, 0.0, -1.0]}
    pieces |= {"token_ratios": [1.0, 1.5, 0.5, 1.0], "token_clipped": [0, 2, 1, 0]}
    line = response(1, 0, turns=turns, environment_rewards=[0.25, 1.0], **pieces)
    run = read_run(write_run("a", rollouts=[(1, [line])]))
    shown = sample_groups(run, 1)[0]["responses"][0]["shown"]
    assert [(spoke, reward, len(own)) for spoke, _, reward, own, _ in shown] == [
        (True, 0.25, 3),
        (False, None, 0),
        (True, 1.0, 1),
    ]
    assert shown[0][3][1] == (
        forged,
        0.75,
        "log-probability -5, ratio 1.5, cut by the upper clip",
        True,
    )
    text = make(str(run.folder))
    assert text.count('class="turn observed"') == 1 and text.count('class="clip"') == 2
    assert "policy, 3 tokens, reward 0.25" in Page(text).text


def test_files_of_a_run_that_was_killed_are_read_as_far_as_they_go(write_run, tmp_path):
    folder = write_run("a", rollouts=[(1, [response(0, 0)])])
    for name in "metrics.jsonl", "rollouts/step_000001.jsonl":
        with (tmp_path / "a" / name).open("a") as file:
            file.write('[1]\n"x"\n{"step": "x"}\n{"step": 21, "rew')
    (tmp_path / "a/rollouts/step_x.jsonl").write_text("")
    run = read_run(folder)
    assert [one["step"] for one in run.rows] == [*range(21)]
    assert sample_groups(run, 1)[0]["prompt_id"] == "p0"


def command(*arguments: str) -> int:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["report", *arguments])
        try:
            return report.main()
        except SystemExit as stopped:
            return stopped.code


def test_the_command_takes_several_runs_and_globs_each_once(write_run, tmp_path, capsys):
    folders = [write_run(name, seed=i) for i, name in enumerate(("a1", "a2", "b"))]
    out = tmp_path / "page.html"
    for _ in range(2):  # an earlier report is replaced
        code = command(
            f"--run={tmp_path}/a*", f"--run={folders[2]}", f"--run={folders[0]}/", f"--out={out}"
        )
        assert code == 0 and "runs: 3;" in capsys.readouterr().out
    assert "<h1>a1, a2, b</h1>" in out.read_text()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a1", "a2", "b", "page.html"]


@pytest.mark.parametrize("arguments, output", read_table(__file__, "wrong"))
def test_wrong_input_is_one_line(arguments, output, write_run, tmp_path, monkeypatch, capsys):
    write_run("good")
    write_run("empty", rows=[])
    (tmp_path / "strange").mkdir()
    (tmp_path / "strange/config.json").write_text("{}")
    (tmp_path / "strange/metrics.jsonl").write_text("")
    (tmp_path / "mine.html").write_text("years of work")
    monkeypatch.chdir(tmp_path)
    assert command(*arguments) == 2
    line = capsys.readouterr().err
    assert line.startswith("error: ") and line.count("\n") == 1 and "Traceback" not in line
    assert not [one for one in output if one not in line], line
    assert (tmp_path / "mine.html").read_text() == "years of work"
    assert not (tmp_path / "report.html").exists()


def test_a_run_does_not_fail_at_its_page(write_run, monkeypatch, capsys):
    def broken(*_):
        raise OSError("the disk is full")

    folder = read_run(write_run("a")).folder
    page.write_own_page(folder, Progress(False))
    (folder / page.PAGE).unlink()
    monkeypatch.setattr(page, "write_text", broken)
    page.write_own_page(folder, Progress(True))
    assert "report.html was not written: " in capsys.readouterr().out
    assert not (folder / page.PAGE).exists()


def test_every_curve_is_of_metrics_that_exist():
    charts = read_charts()
    names = [name for chart in charts for name in chart["metrics"]]
    check_documented(names)
    assert len(names) == len(set(names))
    words = [word for chart in charts for word in chart["metrics"].values()]
    assert all(words) and not any("_" in word for word in words)
    assert all(chart["healthy"] and chart["ill"] for chart in charts)
