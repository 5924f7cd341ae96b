"""`dapo-jax doctor`: its short form, a kernel that computes wrong numbers, and wrong arguments."""

import getpass
import json
import math
import socket

import pytest
from command_lines import run_shown

from dapo_jax.extras import doctor as extra
from dapo_jax.model.training_attention import TRAINING_ATTENTION

BLOCKED = ("attention blocked, heads of 64", "attention blocked, heads of 128")
BLOCKED += ("attention blocked, window",)


@pytest.fixture
def doctor(tmp_path, alone, monkeypatch, capsys):
    """Return a function of arguments: exit code, output, and the rows of doctor.json."""

    def run(*arguments):
        flags = ["--short", f"--out={tmp_path}", *arguments]
        code, output, _ = run_shown("doctor", flags, monkeypatch, capsys)
        return code, output, json.loads((tmp_path / "doctor.json").read_text())

    return run


@pytest.mark.slow
def test_short_form_passes_and_keeps_names_and_paths_out(doctor, tmp_path):
    code, output, rows = doctor()
    assert code == 0, output
    assert "FAILED" not in output.replace("0 FAILED", "")
    assert all(row["ok"] for row in rows.values())
    steps = "training step, slots", "training step, paged"
    assert {*BLOCKED, *steps, "versions", "devices"} <= set(rows)
    assert all(0 < rows[name]["difference"] < rows[name]["limit"] for name in steps)
    assert [path.name for path in tmp_path.iterdir()] == ["doctor.json"]
    text = json.dumps(rows)
    for private in (str(tmp_path), socket.gethostname(), f"/{getpass.getuser()}"):
        assert private not in text


def test_failures_are_reported_and_do_not_hide_other_checks(doctor, tmp_path, monkeypatch):
    def wrong(queries, *others):
        if queries.shape[-1] == 64:
            raise RuntimeError(f"no kernel in {tmp_path}/kernels on {socket.gethostname()}")
        mixed, cache = TRAINING_ATTENTION["plain"](queries, *others)
        return 1.01 * mixed, cache

    monkeypatch.setitem(TRAINING_ATTENTION, "blocked", wrong)
    monkeypatch.setattr(extra, "check_training", lambda *_: {"difference": math.nan, "limit": 1.0})
    code, output, rows = doctor()
    assert code == 1 and "5 FAILED" in output and f"no kernel in {tmp_path}" in output
    failed = {name for name, row in rows.items() if not row["ok"]}
    assert {*BLOCKED} <= failed and rows[BLOCKED[0]]["error"] == "RuntimeError"
