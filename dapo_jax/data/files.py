"""Rows of data: files on this machine or gs://, by name, and rows that the program passes."""

import collections
import contextlib
import csv
import difflib
import gzip
import io
import itertools
import json
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, BinaryIO, TypeVar, cast

import numpy as np
import pyarrow
from etils import epath
from pyarrow import parquet

from dapo_jax.runtime.text_files import LATIN, check_regular, check_utf8
from dapo_jax.types.errors import ConfigError, check_place, check_unique, require

T = TypeVar("T")
Rows = Iterator[tuple[str, Any]]  # (line or row number, row or `MalformedRow`)

BATCH_ROWS = 4096
MAX_LINE_BYTES = 64 << 20  # also of a CSV cell; the csv module's default limit is too small
MAX_JSON_BYTES = 1 << 30  # a JSON file is read as a whole
MAX_MESSAGES = 3  # about bad rows, in an error or a warning
GIVEN_PREFIX = "given:"  # of the names of rows that the program passes
WILDCARD = re.compile(r"[*?[]")
HUB_NAME = re.compile(r"\w[\w-]*/\w[\w.-]*")
HUB_CONFIGS = ("", "main", "default", "data")  # folders with SPLIT-*.parquet, the first that exists


class MalformedRow(ValueError):
    """Row that cannot be read; the message says why."""

    hint = ""  # advice that is shown once per source


class NoAnswer(Exception):
    """Well-formed row without an answer to compare with."""


class RowLog:
    """Counts of a source's rows by outcome, and messages; `limit` malformed rows are skipped."""

    def __init__(self, limit: int):
        self._limit = limit
        self.counts: collections.Counter[str] = collections.Counter()
        self.messages: list[str] = []

    @property
    def exceeds_limit(self) -> bool:
        return self.counts["malformed"] > self._limit

    def parse(self, place: str, row: Any, parse: Callable[[Any], T]) -> T | None:
        """Return the parsed row, or None for a row without answer or a malformed row."""
        self.counts["rows"] += 1
        try:
            if isinstance(row, MalformedRow):
                raise row
            return parse(row)
        except NoAnswer:
            self.counts["without answer"] += 1
        except MalformedRow as error:
            self.counts["malformed"] += 1
            is_new = error.hint and not any(error.hint in message for message in self.messages)
            self.messages.append(f"{place}: {error}" + (f" ({error.hint})" if is_new else ""))
        return None

    def check_limit(self) -> None:
        """Raise `ConfigError`, with the first messages, for too many malformed rows."""
        if self.exceeds_limit:
            shown = "; ".join(self.messages[:MAX_MESSAGES])
            raise ConfigError(
                f"config.data.bad_rows_limit = {self._limit}: more rows are malformed: {shown}"
            )


def _make_object(pairs: list[tuple[str, Any]]) -> Any:
    """Return a JSON object, or a `MalformedRow` if it, or one in it, has a key twice."""
    made = dict(pairs)
    if len(made) < len(pairs):
        ((key, _),) = collections.Counter(key for key, _ in pairs).most_common(1)
        return MalformedRow(f"has the key {key!r} twice")
    parts = itertools.chain(*(v if isinstance(v, list) else (v,) for v in made.values()))
    return next((part for part in parts if isinstance(part, MalformedRow)), made)


def _parse_json(text: bytes) -> Any:
    try:
        return json.loads(text, object_pairs_hook=_make_object)
    except UnicodeDecodeError as error:
        return MalformedRow(f"is not UTF-8: {error} ({LATIN})")
    except (ValueError, RecursionError) as error:
        return MalformedRow(f"is not JSON: {error}")


def _json_lines(file: BinaryIO) -> Rows:
    for number, line in enumerate(iter(lambda: file.readline(MAX_LINE_BYTES + 1), b""), 1):
        if len(line) > MAX_LINE_BYTES:
            raise ValueError(f"line {number} is longer than {MAX_LINE_BYTES:,} bytes")
        if line.strip():
            yield f"line {number}", _parse_json(line)


def _json(file: BinaryIO) -> Rows:
    """Yield the rows of a JSON array, of one object, or of JSON lines with the wrong suffix."""
    text = file.read(MAX_JSON_BYTES + 1)
    if len(text) > MAX_JSON_BYTES:
        raise ValueError(f"it has more than {MAX_JSON_BYTES:,} bytes; use JSON lines")
    content = _parse_json(text)
    if isinstance(content, MalformedRow):
        file.seek(0)
        yield from _json_lines(file)
        return
    for number, row in enumerate(content if isinstance(content, list) else [content], 1):
        yield f"row {number}", row


def _csv(file: BinaryIO) -> Rows:
    """Yield rows of cells by the names in the first line, separated by comma, semicolon or tab."""
    csv.field_size_limit(MAX_LINE_BYTES)
    header = file.readline()
    file.seek(0)
    text = io.TextIOWrapper(file, encoding="utf-8-sig", newline="")
    delimiter = chr(max(b",;\t", key=header.count))
    reader = csv.DictReader(text, delimiter=delimiter, strict=True)
    check_unique(reader.fieldnames or (), "column")
    problem = MalformedRow(
        f"does not have {len(reader.fieldnames or ())} cells like the first line"
    )
    line = reader.line_num + 1
    for row in reader:
        yield f"line {line}", problem if None in row or None in row.values() else row
        line = reader.line_num + 1


def _shortest(values: np.ndarray) -> np.ndarray:
    """Return floats of 16 and 32 bits as those of their shortest texts: 0.1, not 0.10000000149.

    Times in nanoseconds, which Python lacks, lose them.
    """
    if values.dtype == "M8[ns]":
        return values.astype("M8[us]")
    is_short = values.dtype.kind == "f" and values.dtype.itemsize < 8
    return values.astype(str).astype(float) if is_short else values


def _widen(value: Any, kind: pyarrow.DataType) -> Any:
    """Return a value of an Arrow type with floats as `_shortest` has them."""
    types = pyarrow.types
    if value is None or types.is_float16(kind) or types.is_float32(kind):
        return value and _shortest(np.array(value, kind.to_pandas_dtype())).item()
    if types.is_struct(kind):
        return {field.name: _widen(value[field.name], field.type) for field in kind}
    if types.is_map(kind):
        return [(_widen(k, kind.key_type), _widen(v, kind.item_type)) for k, v in value]
    if part := getattr(kind, "value_type", None):  # of a list, or of a categorical column
        is_list = isinstance(value, list)
        return [_widen(item, part) for item in value] if is_list else _widen(value, part)
    return value


def _number_rows(batches: Iterable[pyarrow.RecordBatch]) -> Rows:
    number = 0
    for batch in batches:
        batch.validate(full=True)  # wrong offsets would read arbitrary memory
        check_unique(batch.schema.names, "column")
        widened = [field for field in batch.schema if "float" in str(field.type)]
        for row in batch.to_pylist():
            number += 1
            row |= {field.name: _widen(row[field.name], field.type) for field in widened}
            yield f"row {number}", row


def _parquet(file: BinaryIO) -> Rows:
    return _number_rows(parquet.ParquetFile(file).iter_batches(BATCH_ROWS))


def _arrow(file: BinaryIO) -> Rows:
    """Yield the rows of an Arrow file (also Feather) or stream."""
    try:
        reader = pyarrow.ipc.open_file(file)
    except pyarrow.ArrowInvalid:
        file.seek(0)
        return _number_rows(pyarrow.ipc.open_stream(file))
    return _number_rows(map(reader.get_batch, range(reader.num_record_batches)))


# Readers by suffix. If a folder has several kinds of files, only the first kind is read.
READERS = {".parquet": _parquet, ".arrow": _arrow, ".feather": _arrow}
TEXT_READERS = {".jsonl": _json_lines, ".json": _json, ".csv": _csv}
READERS |= TEXT_READERS | {f"{suffix}.gz": read for suffix, read in TEXT_READERS.items()}
SUFFIXES = ", ".join(READERS)


def split_suffix(name: str) -> tuple[str, str]:
    """Return a file's name without suffix, and the suffix of its reader ("" if there is none)."""
    suffix = next((suffix for suffix in READERS if name.endswith(suffix)), "")
    return name.removesuffix(suffix), suffix


_given_rows: dict[str, list] = {}  # by name


def shown_name(name: str) -> str:
    """Return a source's name for a reader."""
    return "rows in memory" if name.startswith(GIVEN_PREFIX) else name


def register_rows(name: str, rows: Any) -> str:
    """Keep rows of the program, and return the name of their source.

    Args:
        rows: a pandas DataFrame, or an iterable of dicts with a length, as a list or a `Dataset`.

    Raises `ConfigError` for other objects.
    """
    if hasattr(rows, "notna") and hasattr(rows, "to_dict"):  # a DataFrame
        check_unique(rows.columns, "column")
        objects = rows.astype(object)
        for column in rows.select_dtypes("floating"):
            objects[column] = _shortest(rows[column].array.to_numpy())
        rows = objects.where(rows.notna(), None).to_dict("records")  # missing cells are None
    elif hasattr(rows, "with_format"):  # a Dataset; its rows in Python have wider floats
        rows = [row for _, row in _number_rows(rows.with_format("arrow")[:].to_batches())]
    is_table = hasattr(rows, "__len__") and hasattr(rows, "__iter__")
    if not is_table or isinstance(rows, str | bytes | Mapping):
        raise ConfigError(
            f"data = {type(rows).__name__}: must be the name of a file, or rows: a list of "
            "dicts, a DataFrame, one split of a Dataset, or another iterable of dicts with a length"
        )
    count = len(rows)
    listed = list(rows)
    if len(listed) != count:
        raise ConfigError(
            f"data = {type(rows).__name__}: must yield len(data) = {count} rows, not "
            f"{len(listed)}; an iterator can be read only once"
        )
    _given_rows[GIVEN_PREFIX + name] = listed
    return GIVEN_PREFIX + name


def _as_json(value: Any) -> Any:
    """Return a value with lists for arrays, dicts for mappings and None for NaN."""
    if hasattr(value, "tolist"):
        with contextlib.suppress(TypeError):  # of tensors that numpy has no type for
            value = _shortest(np.asarray(value))
        value = value.tolist()
    if isinstance(value, Mapping):
        return {str(key): _as_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_as_json(item) for item in value]
    return None if isinstance(value, float) and value != value else value


def read_rows(path: epath.Path) -> Rows:
    """Yield (line or row number, row or `MalformedRow`); may raise `ConfigError`."""
    if (rows := _given_rows.get(str(path))) is not None:
        yield from ((f"row {number}", _as_json(row)) for number, row in enumerate(rows, 1))
        return
    read = READERS[split_suffix(path.name)[1]]
    local = path
    try:
        with contextlib.ExitStack() as stack:
            if "://" in str(path):  # tables need random access
                folder = stack.enter_context(tempfile.TemporaryDirectory())
                local = path.copy(epath.Path(folder) / path.name)
            check_regular(local)
            file = stack.enter_context(local.open("rb"))
            if path.suffix == ".gz":
                file = stack.enter_context(gzip.open(file))
            if read in TEXT_READERS.values():
                check_utf8(file.read(2))
                file.seek(0)
            yield from read(cast(BinaryIO, file))
    except MemoryError:
        raise ConfigError(f"{path} can't be read: it needs more memory than there is") from None
    except Exception as error:  # from the file system, the parser or a bucket's client
        hint = f" ({LATIN})" if isinstance(error, UnicodeDecodeError) else ""
        raise ConfigError(f"{path} can't be read: {error}{hint}") from None


def _shards(path: epath.Path) -> list[epath.Path]:
    """Return a file, or the files of the first kind found in a folder or its subfolders."""
    if not path.is_dir():
        return [path]
    for pattern in ("*", "*/*"):
        files = sorted(path.glob(pattern))
        for suffix in READERS:
            shards = [file for file in files if split_suffix(file.name)[1] == suffix]
            if shards:
                return shards
    return []


def _by_name(name: str, folder: epath.Path, split: str) -> list[epath.Path]:
    """Return the only entry called `name` or `name` and a separator; of several, the split's."""
    stems = {}
    for path in sorted(folder.iterdir()):
        stem, suffix = split_suffix(path.name)
        if suffix or path.is_dir():
            stems[path] = stem.lower()
    matches = [path for path, stem in stems.items() if stem == name.lower()]
    if not matches:
        starts = tuple(f"{name.lower()}{separator}" for separator in "_-.")
        matches = [path for path, stem in stems.items() if stem.startswith(starts)]
    if len(matches) > 1:
        matches = [path for path in matches if split in stems[path]]
    return matches if len(matches) == 1 else []


def _of_split(path: epath.Path, split: str) -> list[epath.Path]:
    """Return the files of a split in a data set's folder as the hub lays it out, or the path."""
    for part in HUB_CONFIGS if path.is_dir() else ():
        files = [f for f in sorted((path / part).glob(f"{split}*")) if split_suffix(f.name)[1]]
        if files:
            return files
    return [path]


def _matches(name: str, folder: epath.Path, split: str) -> list[epath.Path]:
    path = epath.Path(name)
    if WILDCARD.search(name):
        first = next(i for i, part in enumerate(path.parts) if WILDCARD.search(part))
        matches = epath.Path(*path.parts[:first]).glob("/".join(path.parts[first:]))
        return [match for match in sorted(matches) if split_suffix(match.name)[1]]
    if path.exists():
        return [path]
    is_file = bool(split_suffix(name)[1])
    bare = name.rpartition("/")[2] if HUB_NAME.fullmatch(name) and not is_file else name
    if "/" in bare or not folder.is_dir():
        return []
    if is_file and (folder / name).exists():
        return [folder / name]
    return [file for path in _by_name(bare, folder, split) for file in _of_split(path, split)]


def find_files(field: str, name: str, folder: str, split: str) -> tuple[str, ...]:
    """Return the files of a source: a path, a glob, a folder of shards, or a name in `folder`.

    A hub's OWNER/NAME is the entry NAME of `folder`. `split`, 'train' or 'test', decides between
    several files with that name, and between the files of a downloaded data set.

    Raises:
        ConfigError: no file matches, or several do; the message lists what there is.
    """
    if name.startswith(GIVEN_PREFIX):
        allowed = "rows that the program passes: dapo_jax.train(config, data=rows)"
        require(name in _given_rows, field, name, allowed)
        return (name,)
    home = epath.Path(folder)
    check_place(field, name)
    require("**" not in name, field, name, "without **, which buckets do not support")
    try:
        files = [file for path in _matches(name, home, split) for file in _shards(path)]
    except Exception as error:  # from a bucket's client
        raise ConfigError(f"config.{field} = {name!r}: {error}") from None
    if not files or not all(split_suffix(file.name)[1] for file in files):
        raise ConfigError(f"config.{field} = {name!r}: {_explain_no_match(name, home)}")
    return tuple(map(str, files))


def _explain_no_match(name: str, home: epath.Path) -> str:
    path = epath.Path(name)
    if path.exists():
        return f"holds no file of {SUFFIXES}" if path.is_dir() else f"must end in {SUFFIXES}"
    if WILDCARD.search(name):
        return f"no file of {SUFFIXES} matches"
    if "/" in name or split_suffix(name)[1]:
        if HUB_NAME.fullmatch(name) and not path.parent.is_dir():
            return (
                f"no such file; download a data set of the hub first: hf download {name} "
                f"--repo-type dataset --local-dir {home / path.name}"
            )
        folder = path.parent if path.parent.is_dir() else home
        names = [file.name for file in folder.iterdir()] if folder.is_dir() else []
        similar = difflib.get_close_matches(path.name, names, n=1)
        return "no such file" + "".join(f"; did you mean {folder / n}?" for n in similar)
    names = sorted(file.name for file in home.iterdir()) if home.is_dir() else []
    return (
        f"must be arithmetic, multi_digit_sums, word_problems, gym:TASK, a path or glob of "
        f"{SUFFIXES}, or the start of a single name in config.data.folder = {str(home)!r}, which "
        f"holds {', '.join(names) or 'nothing'}"
    )
