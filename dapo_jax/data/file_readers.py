"""Readers of rows by a file's suffix: JSON lines, JSON, CSV, Parquet, Arrow, here or on gs://."""

import contextlib
import csv
import gzip
import io
import json
import tempfile
from collections.abc import Iterator
from typing import Any, BinaryIO, cast

import pyarrow
from etils import epath
from pyarrow import parquet

from dapo_jax.data.row_formats import MalformedRow
from dapo_jax.runtime.settings import ConfigError

BATCH_ROWS = 4096
LONGEST_CELL = 2**31 - 1  # characters; the csv module's own limit is shorter than a long solution


def _parse(text: bytes) -> Any:
    """Value of a JSON text, or a `MalformedRow`."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        return MalformedRow(f"is not JSON: {error}")


def _json_lines(file: BinaryIO) -> Iterator[tuple[str, Any]]:
    for number, line in enumerate(file, 1):
        if line.strip():
            yield f"line {number}", _parse(line)


def _json(file: BinaryIO) -> Iterator[tuple[str, Any]]:
    """Rows of a JSON array, of one object, or of JSON lines under the wrong name."""
    whole = _parse(file.read())
    if isinstance(whole, MalformedRow):
        file.seek(0)
        yield from _json_lines(file)
    else:
        rows = whole if isinstance(whole, list) else [whole]
        yield from ((f"row {number}", row) for number, row in enumerate(rows, 1))


def _csv(file: BinaryIO) -> Iterator[tuple[str, Any]]:
    """Rows of cells by the names of the first line; commas, semicolons or tabs separate."""
    csv.field_size_limit(LONGEST_CELL)
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
        for row in batch.to_pylist():
            number += 1
            yield f"row {number}", row


def _parquet(file: BinaryIO) -> Iterator[tuple[str, Any]]:
    return _number_rows(parquet.ParquetFile(file).iter_batches(BATCH_ROWS))


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
        file = stack.enter_context(path.open("rb"))
        if path.suffix == ".gz":
            file = stack.enter_context(gzip.open(file))
        yield cast(BinaryIO, file)  # a GzipFile has its methods without being one by name


def read_rows(path: epath.Path) -> Iterator[tuple[str, Any]]:
    """Rows of a file, as (line or row number, row). Raises `ConfigError` for an unreadable file."""
    try:
        with _opened(path) as file:
            yield from READERS[split_suffix(path.name)[1]](file)
    except Exception as error:  # of the file, of its format, or of a bucket's client
        raise ConfigError(f"{path} can't be read: {error}") from None
