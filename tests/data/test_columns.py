"""Columns of rows that reward functions take, objects as answers, and rows of the program."""

import datetime
import decimal
import json

import numpy as np
import pytest

from dapo_jax.config.experiment import Data
from dapo_jax.data import row_formats
from dapo_jax.data.files import MalformedRow, register_rows
from dapo_jax.data.prompt_stream import PromptStream
from dapo_jax.data.prompts.tokenizer import arithmetic_tokenizer
from dapo_jax.data.row_formats import read_row
from dapo_jax.types.errors import ConfigError
from dapo_jax.types.structs import WantedColumns

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


def test_other_answers_are_as_before():
    for answer, text in (["1", 2], "1, 2"), ("$5$", "5"), (True, "true"), (None, ""), ([], ""):
        problem = read_row({"question": "q", "answer": answer}, "set", 1, needs_answer=False)
        assert (problem.answer, problem.columns) == (text, "")


def stream(source: str, wanted=TESTS, **settings) -> PromptStream:
    data = Data(source=source, max_prompt_tokens=8, **settings)
    return PromptStream(data, 0, arithmetic_tokenizer(), columns=wanted)


def test_prompts_have_the_columns_of_their_rows(tmp_path):
    rows = [{"question": f"1+{i}=", "answer": 1 + i, "tests": [i]} for i in range(10)]
    source = register_rows("data", rows)
    prompts = stream(source, heldout_problems=3)
    some = [next(prompts) for _ in range(7)] + prompts.heldout_prompts()
    assert {p.text: json.loads(p.columns) for p in some} == {
        row["question"]: {"tests": row["tests"]} for row in rows
    }


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
