"""`dapo-jax doctor`: its short form, a kernel that computes wrong numbers, and wrong arguments."""

import getpass
import json
import socket

import pytest
from command_lines import run_shown

from dapo_jax.extras.doctor import Machine
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
    bucket = tmp_path / "bucket"
    bucket.mkdir()
    code, output, rows = doctor(f"--bucket={bucket}")
    assert code == 0, output
    assert "FAILED" not in output.replace("0 FAILED", "")
    assert all(row["ok"] for row in rows.values())
    assert {*BLOCKED, "versions", "decoding, paged, against forward", "bucket"} <= set(rows)
    measured, plan = rows["measured: step of a small model"], rows["plan: step of a small model"]
    assert measured["update_seconds"] * measured["update_mfu"] == pytest.approx(
        plan["update_seconds"] * plan["update_mfu"]
    )
    assert not [*bucket.iterdir()]
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
    code, output, rows = doctor()
    assert code == 1 and "3 FAILED" in output
    assert {name for name, row in rows.items() if not row["ok"]} == set(BLOCKED)
    assert rows[BLOCKED[0]]["error"] == "RuntimeError: no kernel in PATH on HIDDEN"


def test_nothing_is_written_unasked(tmp_path, alone, monkeypatch, capsys):
    monkeypatch.setattr(Machine, "checks", lambda machine: [("one", lambda: {"n": 1234567.891})])
    monkeypatch.chdir(tmp_path)
    code, output, _ = run_shown("doctor", ["--short"], monkeypatch, capsys)
    assert code == 0 and not [*tmp_path.iterdir()]
    assert "n 1,234,568" in output and "written" not in output and "1 ok, 0 FAILED" in output


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--out=missing", "config.out = 'missing': must be a local folder that exists"),
        ("--bucket=missing", "config.bucket = 'missing': must be gs://NAME/FOLDER, or a folder"),
        ("--shrt", "--shrt: there is no such flag; did you mean short?"),
    ],
)
def test_wrong_arguments_give_a_line(flag, message, tmp_path, alone, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    code, _, error = run_shown("doctor", [flag], monkeypatch, capsys)
    assert code == 2
    assert error.startswith(f"error: {message}")
    assert error.count("\n") == 1
    assert not [*tmp_path.iterdir()]
