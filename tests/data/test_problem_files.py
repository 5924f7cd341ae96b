"""Files of problems of every kind, by name or path; their numbers and repeats; hostile files."""

import csv
import datetime
import decimal
import gzip
import json
import os
import struct
import subprocess
import sys
import threading
import zlib

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import csv as arrow_csv
from pyarrow import feather, parquet
from row_files import read_table, write_lines

from dapo_jax.config.experiment import Data
from dapo_jax.data import files
from dapo_jax.data.files import find_files
from dapo_jax.data.row_formats import read_row
from dapo_jax.data.sources import Source, Sources, read_problems
from dapo_jax.types.errors import ConfigError

ROWS = [{"problem": f"What is {i}+1?", "answer": str(i + 1)} for i in range(5)]


def load(*paths: str, limit: int = 0) -> Source:
    return read_problems(paths, "set", limit)


def test_every_kind_of_file_gives_the_same_problems(tmp_path):
    table = pa.Table.from_pylist(ROWS)
    write_lines(tmp_path / "lines.jsonl", ROWS)
    write_lines(tmp_path / "lines.json", ROWS)
    (tmp_path / "array.json").write_text(json.dumps(ROWS, indent=2))
    arrow_csv.write_csv(table, tmp_path / "table.csv")
    for name in ("lines.jsonl", "array.json", "table.csv"):
        (tmp_path / f"{name}.gz").write_bytes(gzip.compress((tmp_path / name).read_bytes()))
    parquet.write_table(table, tmp_path / "table.parquet", row_group_size=2)
    feather.write_feather(table, tmp_path / "table.feather")
    for name, kind in (("file", pa.ipc.new_file), ("stream", pa.ipc.new_stream)):
        with kind(str(tmp_path / f"{name}.arrow"), table.schema) as writer:
            writer.write_table(table, max_chunksize=2)
    files = sorted(tmp_path.iterdir())
    assert len(files) == 11
    expected = load(str(tmp_path / "lines.jsonl")).problems
    assert [problem.text for problem in expected] == [row["problem"] for row in ROWS]
    for path in files:
        assert load(str(path)).problems == expected, path


def test_malformed_rows_are_named_by_file_and_line_up_to_a_limit(tmp_path):
    rows = [ROWS[0], '{"problem": "cut', "", '{"problem": 1, "answer": 2}', ROWS[1]]
    path = write_lines(tmp_path / "bad.jsonl", rows)
    loaded = load(path, limit=2)
    assert [problem.answer for problem in loaded.problems] == ["1", "2"]
    assert loaded.counts["malformed"] == 2 and loaded.counts["rows"] == 4
    assert "bad.jsonl line 2: is not JSON" in loaded.messages[0]
    assert "bad.jsonl line 4: problem is int" in loaded.messages[1]
    with pytest.raises(ConfigError, match="bad_rows_limit = 1.*bad.jsonl line 2.*line 4"):
        load(path, limit=1)


def test_rows_that_are_equal_in_everything_are_repeats(tmp_path):
    rows = [{"problem": f"P{i}", "answer": str(i), "id": f"uuid-{i}"} for i in range(4)] * 3
    rows += [rows[2] | {"answer": "9"}, {"question": "Prove.", "final_answer": None}]
    loaded = load(write_lines(tmp_path / "d.jsonl", rows))
    ids = [f"set-uuid-{i}" for i in (0, 1, 2, 3, 2)]
    assert [problem.id for problem in loaded.problems] == ids
    further = {"with another answer to the same text": 1}
    assert loaded.counts == {"rows": 14, "repeats": 8, "without answer": 1} | further


BASE = {"problem": "Write B", "answer": "4", "target": 3, "id": 0, "meta": {"a": [1, 0.5]}}


@pytest.mark.parametrize("other", read_table(__file__, "other rows"))
def test_rows_that_differ_in_anything_are_several_problems(tmp_path, other):
    loaded = load(write_lines(tmp_path / "d.jsonl", [BASE, BASE | other, BASE]))
    assert len({problem.digest for problem in loaded.problems}) == len(loaded.problems) == 2
    assert loaded.counts["repeats"] == 1


def test_equal_rows_of_several_formats_are_one_problem(tmp_path):
    rows = [BASE | {"target": 3.0, "none": None}, {"problem": "Q", "answer": "1", "none": 2}]
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    names = ["a.parquet", *(f"{i}.jsonl" for i in range(3))]
    write_lines(tmp_path / "0.jsonl", [BASE, {"problem": "Q", "answer": 1, "none": 2}])
    write_lines(tmp_path / "1.jsonl", [dict(reversed(row.items())) for row in rows])
    write_lines(tmp_path / "2.jsonl", [{"problem": "Q", "answer": "1", "none": 2, "meta": {}}])
    loaded = load(*(str(tmp_path / name) for name in names))
    assert len(loaded.problems) == 2 and loaded.counts["repeats"] == 5


CELLS = [("q", "a"), ("two\nlines, and a comma", "025"), ('say "x"', "1/2"), ("é" * 200_000, "3")]


@pytest.mark.parametrize(
    ("delimiter", "encoding"), [(",", "utf-8"), (";", "utf-8-sig"), ("\t", "utf-8")]
)
def test_tables_of_text_keep_their_cells_and_lines(tmp_path, delimiter, encoding):
    path = tmp_path / "t.csv"
    with path.open("w", newline="", encoding=encoding) as file:
        csv.writer(file, delimiter=delimiter).writerows(CELLS)
    found = list(files.read_rows(path))
    assert [place for place, _ in found] == ["line 2", "line 4", "line 5"]
    assert [tuple(row.values()) for _, row in found] == CELLS[1:]
    assert found[0][1].keys() == {"q", "a"}
    (tmp_path / "t.csv.gz").write_bytes(gzip.compress(path.read_bytes(), mtime=0))
    assert list(files.read_rows(tmp_path / "t.csv.gz")) == found


@pytest.mark.parametrize("cells", ["1+1?", "1+1?,2,3"])
def test_a_line_with_other_cells_than_the_first_is_malformed(tmp_path, cells):
    (tmp_path / "t.csv").write_text(f"question,answer\n{cells}\n2+2?,4\n")
    loaded = load(str(tmp_path / "t.csv"), limit=1)
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
        load(str(tmp_path / name))


FLOATS = pa.float32()
NUMBERS = {
    "float": pa.array([0.1, None], FLOATS),
    "half": pa.array(np.array([0.1, 27], np.float16)),
    "category": pa.array([0.1, 0.2], FLOATS).dictionary_encode(),
    "decimal": [decimal.Decimal("0.12345678901234567890123456789012"), decimal.Decimal("5.00")],
    "date": [datetime.date(2024, 1, 31)] * 2,
    "bool": [True, False],
    "double": [0.10000000149011612, 27.0],
    "int": [2**60 + 1, 0],
    "nested": pa.array([{"a": 0.1}, None], pa.struct([("a", FLOATS)])),
    "list": pa.array([[0.1, 0.7], []], pa.list_(FLOATS)),
    "map": pa.array([[("k", 0.1)], []], pa.map_(pa.string(), FLOATS)),
}


@pytest.mark.parametrize("suffix", ["parquet", "feather"])
def test_numbers_of_tables_have_the_shortest_text_of_their_type(tmp_path, suffix):
    table = pa.table(NUMBERS | {"problem": ["a", "b"]})
    path = tmp_path / f"t.{suffix}"
    (parquet.write_table if suffix == "parquet" else feather.write_feather)(table, str(path))
    (_, first), (_, second) = files.read_rows(path)
    names = ["float", "half", "category", "decimal", "date", "bool", "double", "int"]
    golds = [read_row(first, "s", 1, {"answer": name}).answer for name in [*names, "nested.a"]]
    assert golds == ["0.1", "0.1", "0.1", "0.12345678901234567890123456789012", "2024-01-31"] + [
        "true",
        "0.10000000149011612",
        "1152921504606846977",
        "0.1",
    ]
    others = [read_row(second, "s", 1, {"answer": name}).answer for name in names[1:]]
    assert others == ["27", "0.2", "5", "2024-01-31", "false", "27", "0"]
    assert (first["list"], first["map"], second["float"]) == ([0.1, 0.7], [("k", 0.1)], None)


def test_a_column_that_occurs_twice_is_an_error(tmp_path):
    (tmp_path / "t.csv").write_text("question,answer,answer\n1,2,3\n")
    table = pa.Table.from_arrays([pa.array(["1"]), pa.array(["2"])], ["answer", "answer"])
    parquet.write_table(table, tmp_path / "t.parquet")
    for name in ("t.csv", "t.parquet"):
        with pytest.raises(ConfigError, match=f"{name} can't be read: the column 'answer' occurs"):
            load(str(tmp_path / name))
    one = '{"problem": "P", "answer": "1", "answer": "2"}'
    nested = '{"problem": "P", "answer": "1", "tests": [{"a": 1, "a": 2}]}'
    (tmp_path / "t.jsonl").write_text(f"{one}\n{json.dumps(ROWS[0])}\n{nested}\n")
    (tmp_path / "t.json").write_text(f"[{one}, {json.dumps(ROWS[0])}, {nested}]")
    for name in ("t.jsonl", "t.json"):
        loaded = load(str(tmp_path / name), limit=2)
        assert len(loaded.problems) == 1 and loaded.counts["malformed"] == 2
        assert "has the key 'answer' twice" in loaded.messages[0]
        assert "has the key 'a' twice" in loaded.messages[1]


def test_an_evaluation_samples_every_row_of_a_repeated_file(tmp_path):
    rows = [row | {"answer": "9"} for row in ROWS] * 3 + [ROWS[0]]
    path = write_lines(tmp_path / "repeated.jsonl", rows)
    data = Data(source="arithmetic", heldout_source=path)
    (heldout,) = Sources(data, 0).heldout()
    assert len(heldout.problems) == 16 and not heldout.counts["repeats"]
    assert len({problem.digest for problem in heldout.problems}) == 6
    (training,) = Sources(Data(source=path, heldout_problems=0), 0).training(set())
    assert len(training.problems) == 6 and training.counts["repeats"] == 10


@pytest.fixture
def folder(tmp_path):
    names = "gsm8k_train.jsonl gsm8k_test.jsonl aime24_test.jsonl math500.json a-1.json a-2.json"
    for name in names.split():
        write_lines(tmp_path / name, [{"problem": name, "answer": "1"}])
    shards = tmp_path / "DAPO-Math"
    shards.mkdir()
    for i in range(2):
        parquet.write_table(pa.Table.from_pylist(ROWS), shards / f"{i}.parquet")
    (shards / "state.json").write_text("{}")
    for name in read_table(__file__, "hub"):  # as `hf download --local-dir` lays data sets out
        for file in (name, f"{name.split('/')[0]}/.cache/huggingface/download/x.metadata"):
            path = tmp_path / "hub" / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("")
    return tmp_path


NAMES = [("", *row) for row in read_table(__file__, "names")]
NAMES += [("hub", *row) for row in read_table(__file__, "names on the hub")]


@pytest.mark.parametrize(("root", "name", "split", "found"), NAMES)
def test_names_find_their_files(folder, root, name, split, found):
    paths = find_files("data.source", name.format(folder), str(folder / root), split)
    assert paths == tuple(str(folder / root / one) for one in found.split())


@pytest.mark.parametrize("name", ["math", "a", "nothing", "{}/**/1.parquet"])
def test_a_name_of_no_single_file_lists_what_is_there(folder, name):
    expected = (
        "without \\*\\*" if "**" in name else "holds DAPO-Math, a-1.json, .*hub, math500.json"
    )
    with pytest.raises(ConfigError, match=f"config.data.source = .*{expected}"):
        find_files("data.source", name.format(folder), str(folder), "train")


# --- hostile files -------------------------------------------------------------------------------

SECONDS = 20.0
ROW = {"problem": "What is 1+1?", "answer": "2"}


def refusal(path) -> str:
    """Message of the `ConfigError`; the test fails for another error, for none, and after long."""
    caught: list[BaseException] = []

    def work() -> None:
        try:
            read_problems((str(path),), "set", 0)
        except BaseException as error:
            caught.append(error)

    thread = threading.Thread(target=work, daemon=True)  # one that waits for ever is left behind
    thread.start()
    thread.join(SECONDS)
    assert caught, "it waits, or reads the file"
    assert isinstance(caught[0], ConfigError), caught[0]
    return str(caught[0])


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json", "rows.csv", "rows.parquet"])
@pytest.mark.parametrize("kind", ["pipe", "device", "link to a pipe"])
def test_what_is_no_file_is_not_waited_for(kind, name, tmp_path):
    path = tmp_path / name
    if kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        os.mkfifo(tmp_path / "pipe")
        path.symlink_to(tmp_path / "pipe")
    assert f"{path} can't be read: it is a pipe, a device or a folder: must" in refusal(path)


def test_a_line_without_end_is_refused_with_its_number(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "MAX_LINE_BYTES", 1000)
    path = write_lines(tmp_path / "rows.jsonl", [ROW, "x" * 2000])
    assert "line 2 is longer than 1,000 bytes" in refusal(path)
    long = ROW | {"problem": "x" * 900}
    assert (
        len(read_problems((write_lines(tmp_path / "a.jsonl", [ROW, long]),), "s", 0).problems) == 2
    )


def test_a_json_file_beyond_memory_is_refused_before_it_is_parsed(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "MAX_JSON_BYTES", 1000)
    (tmp_path / "rows.json").write_text(json.dumps([ROW] * 100))
    assert "more than 1,000 bytes; use JSON lines" in refusal(tmp_path / "rows.json")


def test_a_table_with_offsets_beyond_its_end_is_refused(tmp_path):
    """It would read memory that is not its own, or end the process."""
    path = tmp_path / "rows.feather"
    table = pa.table({"problem": ["a", "b"], "answer": ["1", "2"]})
    feather.write_feather(table, str(path), compression="uncompressed")
    ends, beyond = struct.pack("<iii", 0, 1, 2), struct.pack("<iii", 0, 1, 2_000_000_000)
    content = path.read_bytes()
    assert ends in content
    path.write_bytes(content.replace(ends, beyond))
    assert f"{path} can't be read: " in refusal(path)


LIMITED = """
import resource, sys
from dapo_jax.data.sources import read_problems
from dapo_jax.types.errors import ConfigError
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
before = resource.getrlimit(resource.RLIMIT_AS)
resource.setrlimit(resource.RLIMIT_AS, (used + (int(sys.argv[2]) << 20), before[1]))
try:
    read_problems((sys.argv[1],), "set", 0)
except ConfigError as error:
    print(error)
resource.setrlimit(resource.RLIMIT_AS, before)  # what ends the process needs memory too
"""


def test_missing_memory_is_one_line_that_names_the_file(tmp_path):
    path = tmp_path / "rows.json.gz"
    packer = zlib.compressobj(9, wbits=31)
    blanks = [packer.compress(b" " * (1 << 20) + b"\n") for _ in range(200)]
    path.write_bytes(b"".join([*blanks, packer.flush()]))
    command = [sys.executable, "-c", LIMITED, str(path), "60"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stderr == "", done.stderr[-2000:]
    assert str(path) in done.stdout and len(done.stdout.splitlines()) == 1, done.stdout
    assert "memory" in done.stdout or "alloc" in done.stdout
