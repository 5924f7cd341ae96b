"""Data files that someone made wrong, or on purpose: one line that names the file, at once."""

import json
import os
import struct
import subprocess
import sys
import threading
import zlib

import pyarrow as pa
import pytest
from pyarrow import feather, parquet
from row_files import write_lines

from dapo_jax.data import files
from dapo_jax.data.sources import read_problems
from dapo_jax.runtime.settings import ConfigError

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


def bomb(path, megabytes: int, beginning: bytes = b"") -> int:
    """Writes gigabytes of blanks as a gzip file of megabytes; returns its size."""
    packer = zlib.compressobj(9, wbits=31)
    with path.open("wb") as file:
        file.write(packer.compress(beginning))
        for _ in range(megabytes):
            file.write(packer.compress(b" " * (1 << 20) + b"\n"))
        file.write(packer.flush())
    return path.stat().st_size


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
from dapo_jax.runtime.settings import ConfigError
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (int(sys.argv[2]) << 20),) * 2)
try:
    read_problems((sys.argv[1],), "set", 0)
except ConfigError as error:
    print(error)
"""


@pytest.mark.parametrize("name", ["rows.json.gz", "rows.jsonl", "rows.parquet"])
def test_missing_memory_is_one_line_that_names_the_file(name, tmp_path):
    path = tmp_path / name
    if name == "rows.json.gz":
        bomb(path, 200)
    elif name == "rows.jsonl":
        rows = ({"problem": f"{i} " + "x" * 4000, "answer": "2"} for i in range(30_000))
        write_lines(path, rows)
    else:
        texts = [f"{i} " + "x" * 4000 for i in range(30_000)]
        parquet.write_table(pa.table({"problem": texts, "answer": texts}), path)
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(path), "60"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0 and done.stderr == "", done.stderr[-2000:]
    assert str(path) in done.stdout and len(done.stdout.splitlines()) == 1, done.stdout
    assert "memory" in done.stdout or "alloc" in done.stdout
