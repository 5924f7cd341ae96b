"""What a run finds when it goes on: its rows, its rollouts, its data, its own code."""

import dataclasses
import errno
import json
import os
import pathlib
from unittest import mock

import pytest
from small_runs import make_quick_config, open_run

from dapo_jax.config.experiment import Config, Data, Log, Reward
from dapo_jax.config.settings import leaves
from dapo_jax.run.evaluate import ResponseFile
from dapo_jax.run.identity import check_same_run, run_identity
from dapo_jax.run.loop import finished
from dapo_jax.run.sinks import MetricRows, read_rows
from dapo_jax.runtime.storage.files import AppendFile, Storage, rewind, write_text
from dapo_jax.types.errors import ConfigError

# --- metrics.jsonl -----------------------------------------------------------------------------


def row(step):
    return json.dumps({"step": step, "reward": step / 2}).encode() + b"\n"


NO_ROWS = [b"{}\n", b"\xff\xfe\n", b'{"step": 3, "rew\n', b"[3]\n", b'{"step": "3"}\n', b"3\n"]


@pytest.mark.parametrize("bad", NO_ROWS, ids=repr)
def test_a_broken_line_costs_only_itself(bad, tmp_path):
    path, said = tmp_path / "metrics.jsonl", []
    path.write_bytes(row(0) + row(1) + bad + row(2) + b"\n" + row(4) + b'{"step": 5, "re')
    writer = MetricRows(tmp_path, 3, Storage(said.append))
    assert path.read_bytes() == row(0) + row(1) + row(2)  # 4 comes again, 5 was cut off by a kill
    assert len(said) == 1 and said[0].startswith(f"1 lines of {path} are no rows")
    writer.on_row(3, {"reward": 1.5})
    assert [line["step"] for line in writer.read()] == [0, 1, 2, 3]
    assert rewind(path, 9) == 0


@pytest.mark.parametrize("end", [MetricRows.read, lambda writer: writer.close(False)])
def test_rows_of_an_outage_are_written_when_it_has_ended(end, tmp_path, monkeypatch):
    """Also if no later row comes."""
    storage = Storage()
    writer = MetricRows(tmp_path, 0, storage)
    with monkeypatch.context() as away:
        away.setattr(storage, "attempt", lambda what, work: False)
        writer.on_row(1, {})
        writer.on_row(2, {})
    end(writer)
    assert [line["step"] for line in read_rows(tmp_path / "metrics.jsonl")] == [1, 2]


def test_what_a_failed_append_wrote_is_not_there_twice(tmp_path, monkeypatch):
    file = AppendFile(tmp_path / "a", Storage(lambda text: None))
    file.append(b"1\n")
    with monkeypatch.context() as full:
        full.setattr(os, "fsync", mock.Mock(side_effect=OSError(errno.ENOSPC, "full")))
        file.append(b"2\n")
    file.append(b"3\n")
    assert file.path.read_text() == "1\n2\n3\n"


def test_content_is_on_the_disk_before_its_name_is(tmp_path, monkeypatch):
    """A loss of power may come between any two calls; the order of the calls decides."""
    calls, fsync = [], os.fsync
    monkeypatch.setattr(
        os, "fsync", lambda f: (calls.append(os.readlink(f"/proc/self/fd/{f}")), fsync(f))
    )
    rename = pathlib.Path.replace
    monkeypatch.setattr(
        pathlib.Path, "replace", lambda a, b: (calls.append(f"{a} -> {b}"), rename(a, b))
    )
    path = tmp_path / "a.json"
    write_text(path, "{}")
    assert calls == [f"{path}.tmp", f"{path}.tmp -> {path}", str(tmp_path)]
    calls.clear()
    MetricRows(tmp_path, 0).on_row(1, {"reward": 0.0})
    assert calls == [str(tmp_path / "metrics.jsonl")]


def test_responses_that_cannot_be_read_are_drawn_again(tmp_path):
    said = []
    ResponseFile(tmp_path, {"seed": 0}, {})
    (tmp_path / "responses.jsonl").write_bytes(b"{}\n\xff\n[1]\n")
    file = ResponseFile(tmp_path, {"seed": 0}, {}, Storage(said.append))
    assert file.responses == {} and len(said) == 1 and "3 lines of" in said[0]
    (tmp_path / "settings.json").write_bytes(b"\xff")
    with pytest.raises(ConfigError, match="can't resume: .* choose another folder by --out"):
        ResponseFile(tmp_path, {"seed": 0}, {})


# --- data and code -----------------------------------------------------------------------------

PROBLEMS = [(f"{i}+{i}=", str(2 * i)) for i in range(40)]


def write_problems(path, problems):
    rows = [json.dumps({"problem": text, "answer": answer}) for text, answer in problems]
    path.write_text("\n".join(rows))


@pytest.fixture
def begun(tiny_folder, tmp_path, alone):
    """A run of a file of problems that has saved before its first step, and what made it."""
    source = tmp_path / "sums.jsonl"
    write_problems(source, PROBLEMS)

    def config(changed="refuse"):
        data = Data(source=str(source), max_prompt_tokens=8, changed=changed)
        return make_quick_config(tiny_folder, tmp_path / "run", data=data)

    with open_run(config()) as run:
        run.keep()
    return source, config


CHANGES = {
    "replaced": ([("9+8=", "17"), *PROBLEMS[1:]], "; their texts, answers"),
    "dropped": (PROBLEMS[5:], "problems, it had"),
    "appended": ([*PROBLEMS, ("9+8=", "17")], "problems, it had"),
    "answers": ([*PROBLEMS[:-1], (PROBLEMS[-1][0], "1")], "answers or solutions differ"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_run_does_not_go_on_with_other_data(name, begun):
    source, config = begun
    problems, said = CHANGES[name]
    write_problems(source, problems)
    with pytest.raises(ConfigError, match=f"changed = 'refuse': .*({said})") as refused:
        with open_run(config()):
            pass
    assert "--config.data.changed=allow" in str(refused.value)
    assert len(str(refused.value).splitlines()) == 1


def test_other_data_may_be_allowed(begun, capsys):
    source, config = begun
    with open_run(config()):
        assert "held out now" not in capsys.readouterr().out
    write_problems(source, PROBLEMS[5:])
    with open_run(config("allow")) as run:
        assert run.state.step == 0
    assert "held out now may have been trained on" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "before", "now", "other"),
    [
        ("reward.parts", "rule=1,format=0.10", "format=.1, rule=1.0", "rule=1,format=0.2"),
        ("data.source", "a.jsonl=2,b.jsonl", "a.jsonl=2.0, b.jsonl=1", "a.jsonl,b.jsonl"),
        ("data.fields", "problem=q,answer=a", "answer=a, problem=q", "problem=q"),
        ("data.difficulty", "0.1..0.9", ".1..0.90", "0.1..0.8"),
        ("data.folder", "data", "./data/", "other"),
        ("environment.tools", "m:f,m:g", "m:f, m:g", "m:f"),
        ("optimizer.learning_rate", 1, 1.0, 2),
    ],
)
def test_settings_that_mean_the_same_are_the_same(name, before, now, other):
    settings = {name: value for name, _, value in leaves(Config())}
    check_same_run(settings | {name: now}, settings | {name: before})
    same = [run_identity(settings | {name: value}, {}) for value in (before, now, other)]
    assert same[0] == same[1] != same[2]
    with pytest.raises(ConfigError, match=name):
        check_same_run(settings | {name: other}, settings | {name: before})


def test_changed_code_of_a_hook_is_a_warning(tiny_folder, tmp_path, alone, write_module, capsys):
    code = "def digits(prompt, response, answer):\n    return {}\n"
    write_module("own_reward", code.format(1))
    config = make_quick_config(tiny_folder, tmp_path, reward=Reward(parts="own_reward:digits=1"))
    for value, warned in (1, False), (1, False), (2, True):
        write_module("own_reward", code.format(value))
        with open_run(config) as run:
            run.keep()
        shown = " ".join(capsys.readouterr().out.split())
        assert ("own_reward:digits has changed since" in shown) is warned


def test_a_run_that_was_stopped_in_its_last_evaluation_ends_once(tiny_folder, tmp_path, alone):
    """Its checkpoint has metrics still to be written; the summary says that they were."""
    config = make_quick_config(tiny_folder, tmp_path, log=Log(0, tensorboard=False, report=False))
    with open_run(config) as run:
        run.state = dataclasses.replace(run.state, step=config.total_steps)
        run.progress.unwritten = {"reward": 0.0}
        run.keep()
    scores = {"heldout_accuracy_before": None, "heldout_accuracy_after": None}
    summary = {"steps": config.total_steps} | scores
    assert finished(config) is None
    for text in "{", "[]", '{"steps": 1}', '{"steps": "2"}':
        (tmp_path / "summary.json").write_text(text)
        assert finished(config) is None
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    assert finished(config) == summary
