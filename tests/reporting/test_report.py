"""The report page: what it says of runs, what it refuses, and that no text in it is ever run."""

import base64
import hashlib
import json
import pathlib
import re
import sys

import numpy as np
import pytest
from reports import HOSTILE, Scripts, data_of, response, row
from row_files import read_table

from dapo_jax.algorithms import PRESETS
from dapo_jax.commands import command_line
from dapo_jax.config.experiment import Optimizer, ReportConfig, Reward
from dapo_jax.extras.report import command as report
from dapo_jax.extras.report import page, recorded_run
from dapo_jax.extras.report.comparison import (
    differences,
    differing_settings,
    experiments,
    from_defaults,
    from_preset,
    headlines,
    mean_interval,
    welch_interval,
)
from dapo_jax.extras.report.curves import asset
from dapo_jax.extras.report.recorded_run import (
    SHOWN_CHARACTERS,
    read_run,
    sample_groups,
)
from dapo_jax.reporting.console import Progress
from dapo_jax.runtime.settings import ConfigError


def make(*folders: str, **settings) -> str:
    return page.page([read_run(folder) for folder in folders], ReportConfig(**settings))


def test_text_that_a_model_wrote_is_never_markup(write_run):
    turns = [["policy", 4, HOSTILE], ["environment", 9, HOSTILE * 2000]]
    own = {"response": HOSTILE, "prompt": HOSTILE, "prompt_id": HOSTILE, "turns": turns}
    lines = [response(0, i, **own, token_texts=[HOSTILE] * 4) for i in range(2)]
    hostile = write_run("</title><script>alert(1)<", rollouts=[(1, lines)], rows=[row(0)])
    text = make(hostile)
    result = Scripts(text)
    assert [tag for tag, _ in result.tags].count("script") == len(result.scripts) == 4
    assert not any(name.startswith("on") for _, attrs in result.tags for name in attrs)
    (group,) = data_of(text)["rollouts"]
    assert group["prompt"] == group["prompt_id"] == group["responses"][0]["response"] == HOSTILE
    (_, _, drawn), (_, _, observed) = group["responses"][0]["turns"]
    assert drawn == HOSTILE and len(observed) < 1.1 * SHOWN_CHARACTERS
    assert "token_texts" not in group["responses"][0]  # of a trajectory that long
    assert data_of(text)["experiments"][0]["name"] == hostile.rsplit("/")[-1]
    code = asset("page.js")
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(", code)


def test_the_page_needs_no_other_file_and_lets_no_other_script_run(write_run):
    text = make(write_run("a"))
    result = Scripts(text)
    assert not any(tag == "link" or "src" in attrs for tag, attrs in result.tags)
    policy = next(a["content"] for t, a in result.tags if a.get("http-equiv"))
    assert "default-src 'none'" in policy and "unsafe-inline" not in policy.partition("style")[0]
    assert "file:" not in policy
    for script in filter(None, result.scripts[2:]):
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        assert f"'sha256-{digest}'" in policy


def test_seeds_of_one_experiment_are_a_band_and_settings_tell_others_apart(write_run):
    seeds = [write_run(f"dapo_seed{i}", seed=i, rows=[row(0), row(1, reward=i)]) for i in (0, 2)]
    other = write_run("other", optimizer=Optimizer(learning_rate=0.5))
    data = data_of(make(*seeds, other))
    first, second = data["experiments"]
    assert (first["name"], second["name"]) == ("dapo (2 seeds)", "other")
    line = first["curves"]["lines"]["reward"]
    assert (line["mean"][1], line["low"][1], line["high"][1]) == (1, 0, 2)
    assert "low" not in second["curves"]["lines"]["reward"]
    shown = experiments([read_run(folder) for folder in (*seeds, other)])
    differing = differing_settings(shown)
    assert ["optimizer.learning_rate", -1.0, 0.5] in differing
    assert not any(name in ("seed", "run_dir") for name, *_ in differing)
    assert from_defaults(shown[1].settings)[0][0] == "run_dir"


def spread_run(write_run, name: str = "own", **more) -> str:
    reward = Reward(parts="mine:score=1", correct="spread")
    return write_run(name, algorithm=PRESETS["grpo"](), reward=reward, **more)


def test_the_reward_leads_if_no_response_counts_as_correct(write_run):
    own = spread_run(write_run, rollouts=[(1, [response(0, i) for i in range(2)])])
    names = [one["name"] for one in headlines(experiments([read_run(own)])[0])]
    assert names[:3] == ["Held-out reward before", "Held-out reward after", names[2]]
    assert names[2].startswith("Reward, last") and names[3].startswith("Held-out accuracy")
    text = make(own)
    titles = re.findall("<h3>(.*?)</h3>", text.partition('id="charts"')[2])
    assert titles[0] == "Reward" and titles.index("Held-out accuracy") > titles.index("Entropy")
    assert data_of(text)["reward_leads"] is True
    other = write_run("graded")
    graded = make(other)
    titles = re.findall("<h3>(.*?)</h3>", graded.partition('id="charts"')[2])
    assert titles[:2] == ["Held-out accuracy", "Reward"]
    assert not any(data_of(text)["reward_leads"] for text in (graded, make(own, other)))


def write_evaluation(folder: str, lines: list[dict]) -> None:
    path = pathlib.Path(folder, "evaluations")
    path.mkdir()
    (path / "step_000005.jsonl").write_text("\n".join(map(json.dumps, lines)))


def test_the_held_out_reward_of_seeds_has_an_interval_over_the_seeds(write_run):
    rewards = ((0, 1.0), (1, 2.0), (2, 3.0))
    folders = [
        spread_run(
            write_run,
            f"a{seed}",
            rows=[row(0), row(5, heldout_reward=mean, heldout_accuracy=0.4)],
            seed=seed,
        )
        for seed, mean in rewards
    ]
    (seeds,) = experiments([read_run(folder) for folder in folders])
    (after,) = [one for one in headlines(seeds) if one["name"] == "Held-out reward after"]
    np.testing.assert_allclose(after["value"], [2, -0.484, 4.484], atol=1e-3)  # above 1: no share
    assert after["over"] == "over 3 seeds"


def test_headlines_have_the_intervals_of_the_run_or_over_its_seeds(write_run):
    run = read_run(write_run("a"))
    result = {one["name"]: one for one in headlines(experiments([run])[0])}
    assert result["Held-out accuracy after"]["value"] == [0.4, 0.3, 0.5]
    np.testing.assert_allclose(result["Held-out reward after"]["value"], [-0.2, -0.4, 0])
    # By a table of Student's t: 4.303 for three values, whose standard error is 1 / sqrt(3).
    np.testing.assert_allclose(mean_interval(np.array([1.0, 2, 3])), [2, -0.484, 4.484], atol=1e-3)
    assert mean_interval(np.array([1.0])) == [1, None, None]
    assert mean_interval(np.ones(3)) == [1, 1, 1]
    np.testing.assert_allclose(mean_interval(np.ones(10), True), [1, 0.722, 1], atol=1e-3)


def test_single_runs_are_compared_over_their_problems(write_run):
    grpo = Optimizer(learning_rate=0.5)
    folders = [
        write_run(name, rows=[row(0), row(5)], **changes)
        for name, changes in (
            ("a", {}),
            ("b", {"optimizer": grpo}),
            ("c", {"optimizer": grpo, "seed": 1}),
        )
    ]
    for folder, right in zip(folders, (4, 6, 6), strict=True):
        lines = [response(index, 0, correct=index < right) for index in range(40)]
        write_evaluation(folder, lines)
    a, b = (experiments([read_run(folder)])[0] for folder in folders[:2])
    value, low, high = differences(b, a)["Held-out accuracy after"]
    # Standard errors of 0.048 and 0.057, so 0.075 of the difference.
    assert value == pytest.approx(0.05) and -0.11 < low < -0.09 and 0.19 < high < 0.21
    (several,) = experiments([read_run(folder) for folder in folders[1:]])
    for _, low, high in differences(several, a).values():  # one run has no spread of its seeds
        assert low is high is None
    assert "+5.0 points" in make(*folders[:2])


def test_differences_of_independent_values_have_welchs_interval():
    # By hand: variances 2.5 and 10 of 5 values each, so an error of sqrt(2.5), and 5.88 degrees
    # of freedom, so t = 2.459.
    ones, others = np.arange(5.0) + 1, 2 * np.arange(5.0) + 2
    expected = [-3, -3 - 2.459 * 2.5**0.5, -3 + 2.459 * 2.5**0.5]
    np.testing.assert_allclose(welch_interval(ones, others), expected, atol=2e-3)
    assert welch_interval(ones, others[:1]) == [1, None, None]
    assert welch_interval(np.ones(3), np.ones(3)) == [0, None, None]
    assert welch_interval(ones, np.zeros(0)) == [None, None, None]


def test_the_mean_of_nothing_is_a_gap(write_run):
    nothing = {
        "clip_fraction_high": 0.0,
        "up_clipped_probability": 0.0,
        "response_tokens_wrong": 0.0,
    }
    some = {"clip_fraction_high": 0.1, "up_clipped_probability": 0.0, "response_tokens_wrong": 4.0}
    rows = [row(0), row(1, **some), row(2, **nothing), row(3, reward=float("nan"), **some)]
    lines = data_of(make(write_run("a", rows=rows)))["experiments"][0]["curves"]["lines"]
    assert lines["up_clipped_probability"]["mean"] == [None, 0, None, 0]
    assert lines["response_tokens_wrong"]["mean"] == [None, 4, None, 4]
    assert lines["clip_fraction_high"]["mean"] == [0.01, 0.1, 0, 0.1]
    assert lines["reward"]["mean"][3] is None
    assert lines["heldout_accuracy"]["mean"] == [0.4, None, None, None]


def test_the_preset_is_the_nearest_or_the_one_that_was_named(write_run):
    settings = read_run(write_run("a")).settings
    assert from_preset(settings) == ("dapo", [])
    name, changed = from_preset(settings, "grpo")
    assert name == "grpo" and ["algorithm.clip_high", 0.28, 0.2] in changed
    with pytest.raises(ConfigError, match="preset = 'gpro'"):
        from_preset(settings, "gpro")


def test_thousands_of_steps_and_long_responses_are_sampled(write_run):
    files = [
        (step, [response(g, i, response="x" * 9000) for g in range(6) for i in range(4)])
        for step in range(1, 61)
    ]
    folder = write_run("long", rollouts=files, rows=[row(s) for s in range(5001)])
    text = make(folder)
    data = data_of(text)
    assert f"{len(data['rollouts'])} groups from at most {recorded_run.MAX_FILES}" in text
    (one,) = data["experiments"]
    assert one["curves"]["steps"] == 5001 and one["curves"]["points"] <= page.MAX_POINTS
    assert {group["step"] for group in data["rollouts"]} >= {1, 60}
    assert all(len(r["response"]) < 7000 for g in data["rollouts"] for r in g["responses"])
    twice = data_of(make(folder, write_run("other", seed=1, rollouts=files)))["rollouts"]
    assert {group["run"] for group in twice} == {0, 1} and len(twice) == len(data["rollouts"])


def test_groups_of_each_outcome_are_shown_and_those_with_tokens_first(write_run, monkeypatch):
    right = [response(0, i, correct=True) for i in range(2)]
    more = [response(9, i, correct=True) for i in range(2)]
    wrong = [response(1, i, correct=False) for i in range(2)]
    details = [response(2, i, token_texts=["a"], token_logprobs=[-1.0]) for i in range(2)]
    monkeypatch.setattr(recorded_run, "GROUPS_PER_STEP", 3)
    run = read_run(write_run("a", rollouts=[(1, [*right, *more, *wrong, *details])]))
    (result,) = sample_groups(run)
    assert [group["prompt_id"] for group in result] == ["p2", "p0", "p1"]
    assert [group["outcome"] for group in result] == ["mixed", "all right", "all wrong"]
    assert result[0]["responses"][0]["token_logprobs"] == [-1.0]


def test_files_of_a_run_that_was_killed_are_read_as_far_as_they_go(write_run, tmp_path):
    folder = write_run("a", rollouts=[(1, [response(0, 0)])])
    for name in "metrics.jsonl", "rollouts/step_000001.jsonl":
        with (tmp_path / "a" / name).open("a") as file:
            file.write('[1]\n"x"\n{"step": "x"}\n{"step": 21, "rew')
    (tmp_path / "a/rollouts/step_x.jsonl").write_text("")
    data = data_of(make(folder))
    assert data["experiments"][0]["curves"]["steps"] == 21 and data["rollouts"]


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
            f"--run={tmp_path}/a*", f"--run={folders[2]}", f"--run={folders[0]}", f"--out={out}"
        )
        assert code == 0 and "3 runs" in capsys.readouterr().out
    assert len(data_of(out.read_text())["experiments"][0]["runs"]) == 3
    assert [path.name for path in tmp_path.glob("*page*")] == ["page.html"]
    assert not [*tmp_path.glob("*.js")]


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


def test_flags_that_are_given_again_are_joined():
    words = ["--run=a", "--out=x.html", "-run=b=c", "--run", "f"]
    config = command_line.override(ReportConfig(), words, {"run": "run", "out": "out"}, ["run"])
    assert (config.run, config.out) == ("a\nb=c\nf", "x.html")
    with pytest.raises(ConfigError, match="--runs: there is no such flag"):
        command_line.override(ReportConfig(), ["--runs=d"], {"run": "run"}, ["run"])


def test_positional_arguments_get_the_name_of_a_flag():
    words = ["a", "--out=x", "b=c", "--run", "d", "e", "–out=y"]
    named = ["--run=a", "--out=x", "--run=b=c", "--run", "d", "--run=e", "–out=y"]
    assert command_line.name_positional(words, "run", repeated=True) == named
    named = ["--run=a", "--out=x", "b=c", "--run", "d", "e", "–out=y"]
    assert command_line.name_positional(words, "run", repeated=False) == named
    assert command_line.name_positional(["--help", "mesh"], "run", repeated=True)[1] == "mesh"


def test_without_plotly_a_page_says_what_its_charts_need(write_run, monkeypatch):
    folder = read_run(write_run("a")).folder
    monkeypatch.setitem(sys.modules, "plotly", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    page.write_own_page(folder, Progress(False))
    text = (folder / page.PAGE).read_text()
    assert not any("src" in attrs for _, attrs in Scripts(text).tags)
    assert len(text) < 1e6 and "dapo_jax[report]" in text


def test_a_run_does_not_fail_at_its_page(write_run, monkeypatch, capsys):
    def broken():
        raise ModuleNotFoundError("No module named 'plotly'")

    monkeypatch.setattr("plotly.offline.get_plotlyjs", broken)
    folder = read_run(write_run("a")).folder
    page.write_own_page(folder, Progress(True))
    assert "report.html was not written: " in capsys.readouterr().out
    assert not (folder / page.PAGE).exists()
