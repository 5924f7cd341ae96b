"""Rows and files of a user's own: named fields, conversations, prompts without answers."""

import csv
import gzip
import json

import pytest
from command_lines import RL, load
from row_files import read_table, write_lines

from dapo_jax.config.experiment import Config, Reward
from dapo_jax.data.files import MalformedRow, NoAnswer, find_files, read_rows
from dapo_jax.data.row_formats import FIELDS, parse_fields, read_row
from dapo_jax.data.sources import read_problems
from dapo_jax.runtime.settings import ConfigError


def test_fields_are_named_by_key():
    text = " problem=question, answer = meta.gold"
    assert parse_fields("data.fields", text, FIELDS) == {
        "problem": "question",
        "answer": "meta.gold",
    }
    assert parse_fields("data.fields", "", FIELDS) == parse_fields("x", " ", ()) == {}
    assert parse_fields("x", "a=b=c", ["a"]) == {"a": "b=c"}


@pytest.mark.parametrize(
    "text", ["question", "problem=", "gold=x", "answer=a,answer=b", "answer=a,"]
)
def test_fields_that_name_nothing_are_rejected_before_the_run(text, capsys):
    with pytest.raises(SystemExit) as stopped:
        load(Config, RL, f"--config.data.fields={text}", "--config.data.source=mine.csv")
    message = capsys.readouterr().err
    assert stopped.value.code == 2 and len(message.splitlines()) == 1
    assert f"config.data.fields = {text!r}: must be KEY=FIELD" in message
    assert "problem, answer, solution" in message


@pytest.mark.parametrize(("overrides", "words"), read_table(__file__, "unread"))
def test_settings_of_data_that_nothing_would_read_are_refused(overrides, words, capsys):
    with pytest.raises(SystemExit):
        load(Config, RL, *(f"--config.data.{text}" for text in overrides.split()))
    message = capsys.readouterr().err
    assert len(message.splitlines()) == 1 and all(word in message for word in words), message
    allowed = "fields=system=s source=mine.csv template={{system}}{{problem}} system_prompt=Hi"
    load(Config, RL, *(f"--config.data.{text}" for text in allowed.split()))


USER, WORKED = {"role": "user", "content": "P"}, {"role": "assistant", "content": "So \\boxed{7}"}
SYSTEM, EARLIER = {"role": "system", "content": "S"}, {"role": "user", "content": "Q"}
# fields, row, and what the problem has
READ = read_table(__file__, "read")


@pytest.mark.parametrize(("fields", "row", "expected"), READ)
def test_own_rows_are_read_as_named(fields, row, expected):
    problem = read_row(row, "set", 1, parse_fields("data.fields", fields, FIELDS))
    assert {field: getattr(problem, field) for field in expected} == expected


@pytest.mark.parametrize(("fields", "row", "reason"), read_table(__file__, "else"))
def test_an_own_row_that_is_something_else_says_why(fields, row, reason):
    with pytest.raises(MalformedRow, match=reason):
        read_row(row, "set", 1, parse_fields("data.fields", fields, FIELDS))


def test_prompts_without_an_answer_are_for_rewards_that_need_none():
    rows = [{"prompt": "P"}, {"messages": [SYSTEM, USER]}, {"problem": "P", "answer": None}]
    rows += [{"question": "P", "final_answer": []}, {"messages": [USER, EARLIER]}]
    for row in rows:
        assert read_row(row, "set", 1, needs_answer=False).answer == ""
        with pytest.raises((MalformedRow, NoAnswer)):
            read_row(row, "set", 1)
    with pytest.raises(MalformedRow, match="no field 'gold'"):  # which is asked for all the same
        read_row(rows[0], "set", 1, {"answer": "gold"}, needs_answer=False)


@pytest.mark.parametrize(("parts", "correct", "needs"), read_table(__file__, "needs_answer"))
def test_what_compares_with_the_answer_needs_one(parts, correct, needs):
    assert Reward(parts=parts, correct=correct).needs_answer() == needs


def read(path, fields: str = "", **settings):
    return read_problems((str(path),), "set", 0, fields, **settings)


def test_a_file_is_read_by_the_named_fields_or_by_its_own(tmp_path):
    mine = [{"question": f"{i}?", "target": str(i), "answer": "a model's"} for i in range(3)]
    path = write_lines(tmp_path / "mine.jsonl", mine)
    named = read(path, "answer=target")
    assert named.named and [p.answer for p in named.problems] == ["0", "1", "2"]
    plain = read(path, "answer=gold")
    assert not plain.named and {p.answer for p in plain.problems} == {"a model's"}
    # Where one row has them all, another's `answer` is never taken for what it lacks.
    path = write_lines(tmp_path / "some.jsonl", [{"question": "P", "answer": "no"}, *mine])
    stopped = read(path, "answer=target")  # at once: no row was read before
    assert stopped.problems == () and "line 1: has no field 'target'" in stopped.messages[0]
    other = write_lines(tmp_path / "other.jsonl", [{"problem": "P", "answer": "1"}])
    assert read_problems((path, other), "set", 0, "answer=target").problems == ()
    loaded = read_problems((path,), "set", 1, "answer=target")
    assert len(loaded.problems) == 3 and loaded.counts["malformed"] == 1


def test_the_same_question_in_two_conversations_is_two_problems(tmp_path):
    asked = [[EARLIER, WORKED, USER], [USER, WORKED, USER], [SYSTEM, USER], [USER], [USER]]
    path = write_lines(tmp_path / "c.jsonl", [{"messages": m, "answer": "7"} for m in asked])
    loaded = read(path)
    assert len(loaded.problems) == 4 and loaded.counts["repeats"] == 1
    prints = [problem.fingerprint for problem in loaded.problems]
    assert len(set(prints)) == 3 and prints[2] == prints[3]  # held out together


CELLS = [("q", "a"), ("two\nlines, and a comma", "025"), ('say "x"', "1/2"), ("é" * 200_000, "3")]


@pytest.mark.parametrize(
    ("delimiter", "encoding"), [(",", "utf-8"), (";", "utf-8-sig"), ("\t", "utf-8")]
)
def test_tables_of_text_keep_their_cells_and_lines(tmp_path, delimiter, encoding):
    path = tmp_path / "t.csv"
    with path.open("w", newline="", encoding=encoding) as file:
        csv.writer(file, delimiter=delimiter).writerows(CELLS)
    found = list(read_rows(path))
    assert [place for place, _ in found] == ["line 2", "line 4", "line 5"]
    assert [tuple(row.values()) for _, row in found] == CELLS[1:]
    assert found[0][1].keys() == {"q", "a"}
    (tmp_path / "t.csv.gz").write_bytes(gzip.compress(path.read_bytes(), mtime=0))
    assert list(read_rows(tmp_path / "t.csv.gz")) == found


@pytest.mark.parametrize("cells", ["1+1?", "1+1?,2,3"])
def test_a_line_with_other_cells_than_the_first_is_malformed(tmp_path, cells):
    (tmp_path / "t.csv").write_text(f"question,answer\n{cells}\n2+2?,4\n")
    loaded = read_problems((str(tmp_path / "t.csv"),), "set", 1)
    assert [problem.answer for problem in loaded.problems] == ["4"]
    assert loaded.messages[0].endswith("t.csv line 2: does not have 2 cells like the first line")


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("t.csv", b'question,answer\n"1+1?,2\n', "unexpected end of data"),
        ("t.csv", b"question,answer\n\xff,2\n", ".*utf-8.*iconv -f LATIN1 -t UTF-8"),
        ("t.parquet", b"hello", ".*[Pp]arquet"),
        ("t.jsonl.gz", b"hello", "Not a gzipped file"),
        ("t.json.gz", gzip.compress(b"[1]" * 999, mtime=0)[:-9], ".*ended before"),
    ],
)
def test_broken_files_say_why(tmp_path, name, content, reason):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=f"{name} can't be read: {reason}"):
        read(tmp_path / name)


def test_a_latin_file_of_lines_names_iconv(tmp_path):
    (tmp_path / "t.jsonl").write_bytes(b'{"problem": "\xe4", "answer": "1"}\n')
    assert "iconv -f LATIN1 -t UTF-8" in read(tmp_path / "t.jsonl").messages[0]


def test_packed_files_are_found_and_named_like_others(tmp_path):
    rows = "\n".join(json.dumps({"problem": f"{i}", "answer": "1"}) for i in range(3))
    (tmp_path / "set_train.jsonl.gz").write_bytes(gzip.compress(rows.encode(), mtime=0))
    for name in ("set", "set_train.jsonl.gz", str(tmp_path), f"{tmp_path}/*.gz"):
        (found,) = find_files("data.source", name, str(tmp_path), "train")
        assert len(read(found).problems) == 3
