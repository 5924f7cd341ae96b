"""Rows and files of a user's own: named fields, conversations, prompts without answers."""

import csv
import dataclasses
import gzip
import json

import pytest
from command_lines import RL, refusal
from row_files import read_table, write_lines
from served import byte_tokenizer

from dapo_jax.config.experiment import Config, Data, Reward
from dapo_jax.data.files import MalformedRow, NoAnswer, read_rows
from dapo_jax.data.prompt_stream import PromptStream
from dapo_jax.data.prompts.templates import TEMPLATES, Beside, ChatTemplate, open_template
from dapo_jax.data.row_formats import (
    DAPO_AFTER,
    DAPO_BEFORE,
    FIELDS,
    parse_fields,
    read_messages,
    read_row,
)
from dapo_jax.data.sources import read_problems
from dapo_jax.types.errors import ConfigError


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
    flags = [f"--config.data.fields={text}", "--config.data.source=mine.csv"]
    message = refusal(Config, [RL, *flags], capsys)
    assert f"config.data.fields = {text!r}: must be KEY=FIELD" in message
    assert "problem, answer, solution" in message


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


def test_whitespace_is_the_users():
    text = "  ```python\n    "
    chat = [{"role": role, "content": text} for role in ("system", "user", "assistant", "user")]
    for row in ({"prompt": text}, {"question": text, "final_answer": "1"}, {"messages": chat}):
        assert read_row(row, "set", 1, needs_answer=False).text == text
    problem = read_row({"messages": chat, "solution": text}, "set", 1, needs_answer=False)
    assert problem.system == problem.solution == text
    assert problem.turns == (("user", text), ("assistant", text))
    wrapped = f"{DAPO_BEFORE}{text}{DAPO_AFTER}"
    row = {"prompt": [{"role": "user", "content": wrapped}], "reward_model": {"ground_truth": "1"}}
    assert read_row(row, "set", 1).text == text
    assert [TEMPLATES["none"](problem, Beside()), problem.fingerprint] == [
        text,
        "```python ```python ```python",
    ]


def make_tool(name: str, parameter: str) -> dict:
    properties = {parameter: {"type": "integer"}}
    return {"type": "function", "function": {"name": name, "parameters": properties}}


TOOL = make_tool("add", "a")
CALLS = [{"id": "a", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}]
CALL = {"role": "assistant", "content": "", "tool_calls": CALLS}
RESULT = {"role": "tool", "content": "", "tool_call_id": "a", "name": "add"}
SHOWS = (
    "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{% for m in messages %}"
    "<{{ m.role }}>{{ m.get('content', '') }}"
    "{% for c in m.get('tool_calls', []) %}{{ c.id }}{% endfor %}"
    "{{ m.get('tool_call_id', '') }}{% endfor %}"
)


@pytest.mark.parametrize("tools", [[TOOL], json.dumps([TOOL])])
@pytest.mark.parametrize("content", ["", None])
def test_rows_with_tools_show_them_to_the_policy(tmp_path, tools, content):
    call = CALL | {"content": content}
    talks = {
        "<user>Q": [EARLIER],
        "<system>S<user>Q<assistant>a<tool>a<user>P": [SYSTEM, EARLIER, call, RESULT, USER],
        "<user>Q<assistant>a<tool>a": [EARLIER, call, RESULT],
        "<user>P": [USER, call, RESULT, WORKED],  # the policy makes the calls itself
        "<user>P<assistant>So \\boxed{7}<user>Q": [USER, WORKED, EARLIER, call],
    }
    tokenizer = byte_tokenizer()
    for template in ("chat", SHOWS):
        tokenizer.chat = ChatTemplate(SHOWS)
        for shown, messages in talks.items():
            problem = read_row({"prompt": messages, "tools": tools}, "set", 1, needs_answer=False)
            text = open_template(template).write(problem, Beside(tokenizer.chat))
            assert text == json.dumps(TOOL) + shown
            opened = dataclasses.replace(problem, text="R")  # by an environment
            beside = Beside(tokenizer.chat, tools=[{"x": 1}])
            text = open_template(template).write(opened, beside)
            assert text.startswith('{"x": 1}' + json.dumps(TOOL)) and "<user>R" in text
    rows = [{"prompt": talk, "tools": tools, "answer": "1"} for talk in talks.values()]
    path = write_lines(tmp_path / "t.jsonl", [{"prompt": "1", "answer": "1"}, rows[0]])
    for template in ("none", "{{ messages }}"):
        with pytest.raises(ConfigError, match="messages and tools: 1 rows of .* such as t-2"):
            PromptStream(Data(source=path, template=template), 0, tokenizer)
    assert len(read(write_lines(tmp_path / "u.jsonl", [*rows, *rows])).problems) == len(rows)


@pytest.mark.parametrize("tools", [7, "add", ["add"], "[", {"name": "add"}])
def test_tools_that_are_none_are_malformed(tools):
    with pytest.raises(MalformedRow, match="tools is .*: must be a list of functions"):
        read_row({"prompt": "P", "tools": tools, "answer": "1"}, "set", 1)


@pytest.mark.parametrize(("field", "value"), [("weight", 0), ("function_call", {"name": "f"})])
def test_fields_of_messages_that_are_not_read_are_malformed(field, value):
    with pytest.raises(MalformedRow, match=f"{field}.*(every answer is trained|rename it)"):
        read_messages([{"role": "assistant", "content": "A", field: value}], "messages")
