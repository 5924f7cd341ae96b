"""What people see: lines that fit, words while something is slow, and nothing a terminal obeys."""

import json
import os
import subprocess
import sys
import time

import forked
import numpy as np
import pytest
from conftest import make_completion, make_prompt
from disks import write_protected
from output_folders import snapshot
from rich.console import Console
from row_files import read_table
from small_runs import CLOCKED, ROOT, make_short_config, read_rows

from dapo_jax.extras.report.command import ReportConfig, report
from dapo_jax.run.console import PROGRAMS, WIDTH, Progress, step_lines
from dapo_jax.run.evaluate import evaluate
from dapo_jax.run.loop import train
from dapo_jax.runtime.processes import print_error, printable
from dapo_jax.types.errors import ConfigError
from dapo_jax.types.structs import Group, Verdict

STEP = dict(read_table(__file__, "step"))
HELDOUT = dict(read_table(__file__, "heldout"))
LARGE = dict(read_table(__file__, "large"))
HUGE = dict.fromkeys(STEP, -123_456.789) | {"gradient_norm": 1e30, "seconds_step": 1e9}


def shown(lines: list[str]) -> list[str]:
    """The lines as a terminal shows them, without their markup."""
    with open(os.devnull, "w") as nowhere:
        console = Console(file=nowhere, record=True, soft_wrap=True)
        for line in lines:
            console.print(line)
        return console.export_text().splitlines()


@pytest.mark.parametrize(
    ("step", "total", "values", "eta", "count"),
    [
        (1, 30, STEP, None, 2),
        (10, 30, STEP | HELDOUT, 58.0, 3),
        (10_000, 10_000, STEP | LARGE | {"truncated_fraction": 1.0}, None, 2),
        (9_999, 10_000, STEP | LARGE, 99.9 * 3600, 2),
        (9_999, 10_000, HUGE | HELDOUT, 1e9, None),
        (3, 10, STEP | {"entropy": float("nan"), "gradient_norm": float("inf")}, 1.0, 2),
    ],
)
def test_a_steps_lines_fit_80_columns(step, total, values, eta, count):
    lines = shown(step_lines(step, total, values, eta))
    assert max(map(len, lines)) <= WIDTH == 80, lines
    assert count is None or len(lines) == count
    assert ("ETA" in lines[0] + lines[1]) == (eta is not None)
    assert lines[0].startswith("step ") and all(line.startswith("  ") for line in lines[1:])


HOSTILE = "\x1b]0;owned\x07\x1b[2J\x9b31m[red]a[/red]\r\u202eb\ud800 \u6f22\n\n"


def test_text_of_models_and_files_is_never_obeyed(capsys):
    speaker = Progress()
    completions = tuple(make_completion([5] * 40_000) for _ in range(2))
    for completion in completions:
        object.__setattr__(completion, "text", HOSTILE + "\u6f22" * 40)
    prompt = make_prompt(0, [3])
    object.__setattr__(prompt, "text", "x" * 900 + HOSTILE)
    verdicts = (Verdict(True, "1"), Verdict(False, "1"))
    rewards, right = np.full(2, -1234.5), np.array([True, False])
    speaker.group(Group(prompt, completions, verdicts, {}, rewards, rewards, right))
    speaker.alarm(HOSTILE, HOSTILE)
    speaker.warn("a reward raised: \x1b[2J")
    print_error(f"error: {HOSTILE}")
    output = capsys.readouterr()
    for text in output.out, output.err:
        assert text and not any(code in text for code in "\x1b\x07\x9b\r\u202e\ud800")
    assert "\\x1b[2J" in output.out and "[red]a[/red]" in output.err
    console = Console()
    widths = [console.measure(line).maximum for line in output.out.splitlines()]
    assert max(widths) <= 80
    assert printable("a\tb\n\u6f22 \u00e9") == "a\tb\n\u6f22 \u00e9"


RUN = """
import os, sys
import jax
from small_runs import make_short_config
from dapo_jax.run import console as progress
from dapo_jax.run.loop import train
jax.config.update("jax_compilation_cache_dir", sys.argv[2] + "_cache")
progress.SLOW_SECONDS, progress.COMPILING_SECONDS = 0.0, 0.1
train(make_short_config(*sys.argv[1:]))
"""


@pytest.fixture(scope="module")
def piped(base, tmp_path_factory):
    """A run whose output went to a pipe, with an empty cache: its folder, and what it said."""
    folder = tmp_path_factory.mktemp("piped")
    done = forked.run(RUN, base, folder / "run", XLA_FLAGS=forked.one_device())
    assert done.returncode == 0, done.stderr
    return folder, done.stdout, done.stderr


def test_a_pipe_gets_neither_codes_nor_live_lines_but_names_of_what_is_compiled(piped):
    folder, out, err = piped
    out = out.replace(str(folder.parent), "")  # as long as pytest likes
    assert err == ""  # nothing of a third party either
    assert "\x1b" not in out and "\r" not in out
    lines = out.splitlines()
    steps = [line for line in lines if line.startswith("step ")]
    assert len(steps) == 2 and max(map(len, lines)) <= 80, out
    assert not [line for line in lines if "groups kept" in line or "·" in line]
    assert "loading " in out and "compiling the update (kept for later runs) ..." in out
    assert not [name for name in PROGRAMS.values() if f"compiled {name} in " not in out]
    rows = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
    times = [row["time"] for row in rows]
    assert times == sorted(times) and abs(times[-1] - time.time()) < 3600
    assert all("time" not in row for row in read_rows(folder / "run")) and "time" in CLOCKED


LONG = """
import pathlib, sys, time
from dapo_jax.run.console import Progress
from dapo_jax.runtime import processes
def work():
    progress = Progress()
    for step in range(2_000):
        progress.say(f"step {step}")
    processes.print_error("an error's line")
    pathlib.Path(sys.argv[1]).touch()
    return 0
sys.exit(processes.run(work))
"""


@pytest.mark.parametrize(
    "reader",
    [
        *(pytest.param(reader, marks=pytest.mark.slow) for reader in ("head -3", "true")),
        "head -3; exec >&-",
    ],
)
def test_a_closed_console_ends_nothing(reader, tmp_path):
    (tmp_path / "long.py").write_text(LONG)
    program = f"'{sys.executable}' '{tmp_path}/long.py' '{tmp_path}/done'"
    both = "2>&1" if "exec" in reader else ""
    line = f"({program} {both}; echo $? >'{tmp_path}/code') | ({reader})"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, cwd=ROOT)
    assert (tmp_path / "done").exists() and (tmp_path / "code").read_text() == "0\n"
    if not both:
        assert done.stderr == "an error's line\n"


def test_a_finished_folder_says_so_and_what_to_do(piped, base, alone, capsys):
    """A look at it writes nothing, so that the folder may be read-only."""
    folder = piped[0] / "run"
    config = make_short_config(base, folder)
    before = snapshot(folder)
    with write_protected(folder):
        summary = train(config)
    assert summary == json.loads((folder / "summary.json").read_text())
    output = capsys.readouterr().out
    assert "is already finished: 2 steps, held-out" in output and "--config.total_steps=4" in output
    assert "dapo-jax evaluate" in output and "dapo-jax export" in output and "policy:" not in output
    config.seed = 1
    with pytest.raises(ConfigError, match="seed = 1"):
        train(config)
    assert snapshot(folder) == before
    with write_protected(folder), pytest.raises(ConfigError, match="can't be written: Read-only"):
        train(make_short_config(base, folder, total_steps=4))


def test_a_read_only_run_is_evaluated_and_reported(piped, base, alone, tmp_path, capsys):
    folder = piped[0] / "run"
    config, before = make_short_config(base, folder), snapshot(folder)
    with write_protected(folder):
        scores = evaluate(config)
        report(ReportConfig(run=str(folder), out=str(tmp_path / "report.html")))
    output = " ".join(capsys.readouterr().out.split())
    assert "is read-only: the responses and the report are not written; --out=" in output
    assert "held-out" not in output and "report.json" not in output and snapshot(folder) == before
    assert evaluate(config) == scores
    with write_protected(folder):
        assert evaluate(config) == scores
    assert "8 of 8 responses are there already" in capsys.readouterr().out


def test_a_run_that_was_killed_before_its_summary_ends(piped, base, alone, capsys):
    folder = piped[0] / "run"
    (folder / "summary.json").unlink()  # after the last checkpoint
    assert train(make_short_config(base, folder))["steps"] == 2
    assert (folder / "summary.json").exists()
    assert "already finished" not in capsys.readouterr().out
