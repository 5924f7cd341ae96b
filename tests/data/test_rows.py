"""Rows, published or a user's own: fields, conversations, columns for rewards, of the program."""

import dataclasses
import datetime
import decimal
import json

import numpy as np
import pytest
from command_lines import RL, refusal
from row_files import read_table, write_lines
from served import byte_tokenizer

from dapo_jax.config.experiment import Config, Data, Reward
from dapo_jax.data import row_formats
from dapo_jax.data.files import MalformedRow, NoAnswer, register_rows
from dapo_jax.data.prompt_stream import PromptStream
from dapo_jax.data.prompts.templates import DAPO, TEMPLATES, Beside, ChatTemplate, open_template
from dapo_jax.data.row_formats import (
    DAPO_AFTER,
    DAPO_BEFORE,
    FIELDS,
    parse_fields,
    read_messages,
    read_row,
)
from dapo_jax.data.sources import read_problems
from dapo_jax.extras.arithmetic import arithmetic_tokenizer
from dapo_jax.types.errors import ConfigError
from dapo_jax.types.structs import WantedColumns


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


def dapo_row(text: str, answer: str, index: int, wording: str = DAPO) -> dict:
    return {
        "data_source": "math_dapo",
        "prompt": [{"role": "user", "content": wording.replace("{problem}", text)}],
        "ability": "MATH",
        "reward_model": {"ground_truth": answer, "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": f"uuid-{index}"},
    }


# fields, row, and what the problem has
READ = read_table(__file__, "read") + [
    ("", *case)
    for case in [
        *dict(read_table(__file__, "published")).values(),
        (
            dapo_row("Is {x} 1?", "34", 5),
            {"text": "Is {x} 1?", "answer": "34", "source": "math_dapo", "id": "set-uuid-5"},
        ),
        (
            dapo_row("P", "34", 5, "{problem} Let's think step by step."),
            {"text": "P Let's think step by step."},
        ),
    ]
]


@pytest.mark.parametrize(("fields", "row", "expected"), READ)
def test_rows_are_read_as_published_or_by_the_named_fields(fields, row, expected):
    problem = read_row(row, "set", 9, parse_fields("data.fields", fields, FIELDS))
    assert {field: getattr(problem, field) for field in expected} == expected


MALFORMED = [
    *read_table(__file__, "malformed"),
    ("", {"problem": "P", "answer": {"a": 1}}, "answer is an object, which no verifier compares"),
    ("", {"problem": "P", "answer": float("nan")}, "not a finite number"),
    ("", dapo_row("P", "1", 1) | {"prompt": []}, "no message of the role"),
    ("", dapo_row("P", "1", 1) | {"reward_model": "1"}, "reward_model is not"),
]


@pytest.mark.parametrize(("fields", "row", "reason"), MALFORMED)
def test_a_malformed_row_says_why(fields, row, reason):
    with pytest.raises(MalformedRow, match=reason):
        read_row(row, "set", 1, parse_fields("data.fields", fields, FIELDS))


@pytest.mark.parametrize("row", read_table(__file__, "no_answer"))
def test_a_row_without_an_answer_is_not_malformed(row):
    with pytest.raises(NoAnswer):
        read_row(row, "set", 1)


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


@pytest.mark.parametrize(("field", "value"), [("weight", 0), ("function_call", {"name": "f"})])
def test_fields_of_messages_that_are_not_read_are_malformed(field, value):
    with pytest.raises(MalformedRow, match=f"{field}.*(every answer is trained|rename it)"):
        read_messages([{"role": "assistant", "content": "A", field: value}], "messages")


# --- columns for reward functions, and objects as answers -----------------------------------------

TESTS = WantedColumns(frozenset({"tests"}), frozenset({"rubric"}))
EVERY = WantedColumns(every=True)
ROW = {"question": "1+1=", "answer": 2, "Tests": 0, "tests": [{"in": [1], "out": None}], "id": 7}


def columns_of(row, wanted, **settings):
    text = read_row(row, "set", 1, columns=wanted, **settings).columns
    return json.loads(text) if text else None


def test_columns_are_taken_by_their_exact_names():
    assert columns_of(ROW, row_formats.NO_COLUMNS) is None
    assert columns_of(ROW, TESTS) == {"tests": ROW["tests"]}
    assert columns_of(ROW | {"rubric": None}, TESTS) == {"tests": ROW["tests"], "rubric": None}
    every = {name: value for name, value in ROW.items() if name != "answer"}
    assert columns_of(ROW, EVERY) == every
    fields = {"problem": "question", "answer": "id"}
    assert columns_of(ROW, TESTS, fields=fields) == {"tests": ROW["tests"]}


def test_tables_have_dates_and_exact_numbers():
    row = ROW | {"tests": [datetime.date(2026, 1, 2), decimal.Decimal("0.5")]}
    assert columns_of(row, TESTS) == {"tests": ["2026-01-02", 0.5]}


@pytest.mark.parametrize(
    ("tests", "reason"),
    [
        (None, "has no column 'tests', which rewards or teachers take; it has question, answer"),
        (b"x", "the column 'tests', for a reward function: bytes is no JSON value"),
        ("x" * 2000, "the columns tests have 2,0.. bytes as JSON; .* at most 1,000: let them name"),
    ],
)
def test_a_column_that_can_not_be_sent_is_a_malformed_row(tests, reason, monkeypatch):
    monkeypatch.setattr(row_formats, "MAX_COLUMNS_BYTES", 1000)
    row = {"question": "1+1=", "answer": 2} | ({} if tests is None else {"tests": tests})
    with pytest.raises(MalformedRow, match=reason):
        read_row(row, "set", 1, columns=TESTS)


@pytest.mark.parametrize("answer", [{"tests": [1, None]}, [{"in": 1}, {"in": 2}], ["a", [{}]]])
def test_an_object_as_answer_is_for_reward_functions_alone(answer):
    row = {"question": "1+1=", "answer": answer}
    with pytest.raises(MalformedRow, match="answer is an object, .* reward.correct to threshold"):
        read_row(row, "set", 1)
    for fields in {}, {"answer": "gold"}:
        row = {"question": "1+1=", "gold" if fields else "answer": answer}
        problem = read_row(row, "set", 1, fields, needs_answer=False)
        assert json.loads(problem.answer) == answer
        assert json.loads(problem.columns) == {"answer": answer}


def stream(source: str, wanted=TESTS, **settings) -> PromptStream:
    data = Data(source=source, max_prompt_tokens=8, **settings)
    return PromptStream(data, 0, arithmetic_tokenizer(), columns=wanted)


# --- rows of the program --------------------------------------------------------------------


class Rows:
    """Rows as a `Dataset` has them: a length, and dicts that each loop makes."""

    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __iter__(self):
        return (dict(row) for row in self.rows)


class Once(Rows):
    """An iterator of known length."""

    def __iter__(self):
        return self

    def __next__(self):
        if not self.rows:
            raise StopIteration
        return self.rows.pop(0)


ROWS = [{"question": f"1+{i}=", "answer": 1 + i, "tests": [i]} for i in range(20)]


@pytest.mark.parametrize("kind", [list, tuple, Rows, lambda rows: Once(list(rows))])
def test_rows_of_the_program_are_read_as_those_of_a_file(kind, tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    given, file = stream(register_rows("data", kind(ROWS))), stream(str(path))
    assert [*given.digests.values()] == [*file.digests.values()]
    for _ in range(20):
        mine, other = next(given), next(file)
        assert (mine.id, mine.text, mine.columns) == (other.id, other.text, other.columns)
        assert json.loads(mine.columns) == {"tests": [int(mine.text[2:-1])]}
    held = {prompt.columns for prompt in given.heldout_prompts()}
    assert held == {prompt.columns for prompt in file.heldout_prompts()} and "" not in held
    assert given.describe().startswith("rows in memory: 16 problems of 20 rows (4 held out)")


def test_arrays_and_missing_numbers_become_json():
    rows = [
        ROWS[0] | {"tests": np.arange(2), "rubric": np.float32("nan"), "answer": np.int64(1)},
        {"question": np.array([{"role": "user", "content": "2+2="}], object), "answer": 4},
    ]
    source = register_rows("data", [rows[0], rows[1] | {"tests": float("nan")}])
    (own,) = stream(source, heldout_problems=0).sources
    assert [json.loads(problem.columns) for problem in own.problems] == [
        {"tests": [0, 1], "rubric": None},
        {"tests": None},
    ]
    assert [problem.answer for problem in own.problems] == ["1", "4"]


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        ((row for row in ROWS), "data = generator: must be .* with a length"),
        ({"train": ROWS}, "data = dict: must be .* one split"),
        (7, "data = int: must be the name of a file, or rows: a list of dicts"),
    ],
)
def test_what_is_no_table_is_refused_in_one_line(rows, reason):
    with pytest.raises(ConfigError, match=reason) as refused:
        register_rows("data", rows)
    assert "\n" not in str(refused.value)


@pytest.mark.slow
def test_a_real_dataframe_and_a_real_dataset():
    pandas = pytest.importorskip("pandas")
    datasets = pytest.importorskip("datasets")
    rows = [row | {"rubric": None if i % 2 else 0.5} for i, row in enumerate(ROWS)]
    tables = rows, pandas.DataFrame(rows), datasets.Dataset.from_list(rows)
    digests = [stream(register_rows("data", table)).digests for table in tables]
    assert digests[0] == digests[1] == digests[2]
    with pytest.raises(ConfigError, match="one split"):
        register_rows("data", datasets.DatasetDict(train=tables[2]))
