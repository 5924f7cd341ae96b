"""Readers of rows by a file's suffix: JSON lines, JSON, CSV, Parquet, Arrow, here or on gs://."""

import contextlib
import csv
import gzip
import io
import json
import os
import tempfile
from collections.abc import Iterator
from typing import Any, BinaryIO, cast

import pyarrow
from etils import epath
from pyarrow import parquet

from dapo_jax.data.row_formats import MalformedRow
from dapo_jax.runtime.settings import ConfigError, check_regular, check_utf8

BATCH_ROWS, BUFFER_BYTES = 4096, 1 << 20
LONGEST_LINE = 64 << 20  # bytes; of a cell of CSV too, whose own limit is below a long solution
LARGEST_WHOLE = 1 << 30  # bytes of a JSON file, which is read whole
# Texts shrink by a factor of 3 to 20; what grows by more, from few bytes, was made to fill memory.
MAX_GROWTH, ALWAYS_ALLOWED = 100, 256 << 20


class _Unpacked(io.RawIOBase):
    """Content of a gzip file. Raises ValueError where it grows by too much."""

    def __init__(self, file: gzip.GzipFile, size: int):
        self._file, self._size = file, size

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        return self._file.seek(offset, whence)

    def readinto(self, buffer: Any) -> int:
        count = self._file.readinto(memoryview(buffer)[:BUFFER_BYTES])
        _check_growth(self._file.tell(), self._size)
        return count


def _check_growth(unpacked: int, size: int) -> None:
    """Raises ValueError where a file of `size` bytes holds too much."""
    if unpacked > max(MAX_GROWTH * size, ALWAYS_ALLOWED):
        raise ValueError(f"its {size:,} bytes unpack to {unpacked:,} and more")


def _parse(text: bytes) -> Any:
    """Value of a JSON text, or a `MalformedRow`."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        return MalformedRow(f"is not JSON: {error}")


def _json_lines(file: BinaryIO) -> Iterator[tuple[str, Any]]:
    for number, line in enumerate(iter(lambda: file.readline(LONGEST_LINE + 1), b""), 1):
        if len(line) > LONGEST_LINE:
            raise ValueError(f"line {number} is longer than {LONGEST_LINE:,} bytes")
        if line.strip():
            yield f"line {number}", _parse(line)


def _json(file: BinaryIO) -> Iterator[tuple[str, Any]]:
    """Rows of a JSON array, of one object, or of JSON lines under the wrong name."""
    text = file.read(LARGEST_WHOLE + 1)
    if len(text) > LARGEST_WHOLE:
        raise ValueError(f"it has more than {LARGEST_WHOLE:,} bytes: JSON lines may have more")
    whole = _parse(text)
    if isinstance(whole, MalformedRow):
        file.seek(0)
        yield from _json_lines(file)
    else:
        rows = whole if isinstance(whole, list) else [whole]
        yield from ((f"row {number}", row) for number, row in enumerate(rows, 1))


def _csv(file: BinaryIO) -> Iterator[tuple[str, Any]]:
    """Rows of cells by the names of the first line; commas, semicolons or tabs separate."""
    csv.field_size_limit(LONGEST_LINE)
    header = file.readline()
    delimiter = max(b",;\t", key=header.count)
    file.seek(0)
    text = io.TextIOWrapper(file, encoding="utf-8-sig", newline="")
    reader = csv.DictReader(text, delimiter=chr(delimiter), strict=True)
    cells, before = len(reader.fieldnames or ()), reader.line_num
    for row in reader:
        place, before = f"line {before + 1}", reader.line_num
        complete = None not in row and None not in row.values()
        yield place, row if complete else MalformedRow(f"has not {cells} cells, as the first line")


def _number_rows(batches: Iterator[pyarrow.RecordBatch]) -> Iterator[tuple[str, Any]]:
    number = 0
    for batch in batches:
        batch.validate(full=True)  # offsets of a file that is wrong lead to any place in memory
        for row in batch.to_pylist():
            number += 1
            yield f"row {number}", row


def _parquet(file: BinaryIO) -> Iterator[tuple[str, Any]]:
    table = parquet.ParquetFile(file)
    rows, size = table.metadata.num_rows, file.seek(0, io.SEEK_END)
    if rows > MAX_GROWTH * size:
        raise ValueError(f"its {size:,} bytes hold {rows:,} rows: one row, again and again")
    return _number_rows(table.iter_batches(BATCH_ROWS))


def _arrow(file: BinaryIO) -> Iterator[tuple[str, Any]]:
    """Rows of the file format (Feather too), or of the stream format, which is not seekable."""
    try:
        reader = pyarrow.ipc.open_file(file)
    except pyarrow.ArrowInvalid:
        file.seek(0)
        return _number_rows(iter(pyarrow.ipc.open_stream(file)))
    return _number_rows(reader.get_batch(i) for i in range(reader.num_record_batches))


# By suffix; of a folder that holds several kinds, the first kind is read.
READERS = {
    ".parquet": _parquet,
    ".arrow": _arrow,
    ".feather": _arrow,
    ".jsonl": _json_lines,
    ".json": _json,
    ".csv": _csv,
    ".jsonl.gz": _json_lines,
    ".json.gz": _json,
    ".csv.gz": _csv,
}

TABLES = (".parquet", ".arrow", ".feather")  # the others are text


def split_suffix(name: str) -> tuple[str, str]:
    """Name of a file and the suffix of its reader, empty where it has none."""
    suffix = next((suffix for suffix in READERS if name.endswith(suffix)), "")
    return name.removesuffix(suffix), suffix


@contextlib.contextmanager
def _opened(path: epath.Path) -> Iterator[BinaryIO]:
    """Opened file; one of a bucket is copied first, since tables are read out of order."""
    with contextlib.ExitStack() as stack:
        if "://" in str(path):
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            path = path.copy(epath.Path(folder) / path.name)
        check_regular(path)
        file = stack.enter_context(path.open("rb"))
        if path.suffix == ".gz":
            unpacked = _Unpacked(stack.enter_context(gzip.open(file)), os.path.getsize(path))
            file = stack.enter_context(io.BufferedReader(unpacked, BUFFER_BYTES))
        if split_suffix(path.name)[1] not in TABLES:
            check_utf8(file.read(2))
            file.seek(0)
        yield cast(BinaryIO, file)  # a BufferedReader has its methods without being one by name


def read_rows(path: epath.Path) -> Iterator[tuple[str, Any]]:
    """Rows of a file, as (line or row number, row). Raises `ConfigError` for an unreadable file."""
    try:
        with _opened(path) as file:
            yield from READERS[split_suffix(path.name)[1]](file)
    except MemoryError:
        raise ConfigError(f"{path} can't be read: it takes more memory than there is") from None
    except Exception as error:  # of the file, of its format, or of a bucket's client
        raise ConfigError(f"{path} can't be read: {error}") from None
