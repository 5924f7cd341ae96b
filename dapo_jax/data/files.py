"""Files of problems: JSON lines, JSON, Parquet and Arrow, here or on gs://.

A bad row costs itself, up to a limit; a file may hold every problem a hundred times.
"""

import collections
import contextlib
import functools
import json
import tempfile
from collections.abc import Iterator
from typing import Any, BinaryIO, NamedTuple

import pyarrow
from etils import epath
from pyarrow import parquet

from dapo_jax.data.formats import MalformedRow, NoAnswer, read_row
from dapo_jax.experiment.settings import ConfigError, require
from dapo_jax.structs import Problem
from dapo_jax.verifier.normalisation import normalise
from dapo_jax.verifier.numerals import read_number

BATCH_ROWS = 4096
SHOWN_COMPLAINTS = 3
WILDCARDS = "*?["


class Loaded(NamedTuple):
    """The problems of some files, each once, in the order of the files.

    Attributes:
        counts: `rows`, and of these `malformed`, `without answer` (of a proof), `repeats`, and
            `conflicts` (of a problem that occurs with different answers: it is left out).
        complaints: the first malformed and conflicting rows, by file and line.
    """

    problems: tuple[Problem, ...]
    counts: collections.Counter[str]
    complaints: tuple[str, ...]


def _parse(text: bytes) -> Any:
    """What the JSON says, or the `MalformedRow` that it is."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        return MalformedRow(f"is not JSON: {error}")


def _json_lines(file: BinaryIO) -> Iterator[tuple[str, Any]]:
    for number, line in enumerate(file, 1):
        if line.strip():
            yield f"line {number}", _parse(line)


def _json(file: BinaryIO) -> Iterator[tuple[str, Any]]:
    """An array of rows, one row, or lines under the wrong name."""
    whole = _parse(file.read())
    if isinstance(whole, MalformedRow):
        file.seek(0)
        yield from _json_lines(file)
    else:
        rows = whole if isinstance(whole, list) else [whole]
        yield from ((f"row {number}", row) for number, row in enumerate(rows, 1))


def _number_rows(batches: Iterator[pyarrow.RecordBatch]) -> Iterator[tuple[str, Any]]:
    number = 0
    for batch in batches:
        for row in batch.to_pylist():
            number += 1
            yield f"row {number}", row


def _parquet(file: BinaryIO) -> Iterator[tuple[str, Any]]:
    return _number_rows(parquet.ParquetFile(file).iter_batches(BATCH_ROWS))


def _arrow(file: BinaryIO) -> Iterator[tuple[str, Any]]:
    """The file format (Feather too), or the stream format, which is not seekable."""
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
}


@contextlib.contextmanager
def _opened(path: epath.Path) -> Iterator[BinaryIO]:
    """The file; a bucket's is copied first, since tables are read from many places of a file."""
    with contextlib.ExitStack() as stack:
        if "://" in str(path):
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            path = path.copy(epath.Path(folder) / path.name)
        yield stack.enter_context(path.open("rb"))


def read_rows(path: epath.Path) -> Iterator[tuple[str, Any]]:
    """(line or row number, row) of a file. Raises `ConfigError` where it can't be read at all."""
    try:
        with _opened(path) as file:
            yield from READERS[path.suffix](file)
    except Exception as error:  # of the file, of its format, or of a bucket's client
        raise ConfigError(f"{path} can't be read: {error}") from None


def _same_gold(left: str, right: str) -> bool:
    """Whether two golds are one, however written; in doubt they are not."""
    if left == right:
        return True
    left, right = normalise(left), normalise(right)
    number = read_number(left)
    return left == right or number is not None and number == read_number(right)


class _Collector:
    """Rows to unique problems, with what was wrong on the way."""

    def __init__(self, source: str, bad_rows_limit: int):
        self._source, self._limit = source, bad_rows_limit
        self._problems: dict[str, Problem] = {}
        self._conflicting: set[str] = set()
        self._counts: collections.Counter[str] = collections.Counter()
        self._complaints: list[str] = []

    def add(self, place: str, row: Any) -> None:
        self._counts["rows"] += 1
        try:
            if isinstance(row, MalformedRow):
                raise row
            problem = read_row(row, self._source, self._counts["rows"])
        except NoAnswer:
            self._counts["without answer"] += 1
        except MalformedRow as error:
            self._counts["malformed"] += 1
            self._complaints.append(f"{place}: {error}")
            if self._counts["malformed"] > self._limit:
                shown = "; ".join(self._complaints[:SHOWN_COMPLAINTS])
                raise ConfigError(
                    f"config.data.bad_rows_limit = {self._limit}: more rows are malformed: {shown}"
                ) from None
        else:
            self._add_problem(place, problem)

    def _add_problem(self, place: str, problem: Problem) -> None:
        key = " ".join(problem.text.split())
        first = self._problems.setdefault(key, problem)
        if first is problem:
            return
        if _same_gold(first.answer, problem.answer):
            self._counts["repeats"] += 1
            return
        self._counts["conflicts"] += 1
        if key not in self._conflicting:
            self._conflicting.add(key)
            self._complaints.append(
                f"{place}: the answer {problem.answer!r} to a problem that {first.id} answers with "
                f"{first.answer!r}; left out"
            )

    def result(self) -> Loaded:
        # Which of several answers is right can't be told, and a wrong one would be rewarded.
        self._counts["conflicts"] += len(self._conflicting)
        kept = (p for key, p in self._problems.items() if key not in self._conflicting)
        return Loaded(tuple(kept), self._counts, tuple(self._complaints[:SHOWN_COMPLAINTS]))


@functools.lru_cache(maxsize=8)  # training, held-out problems and examples ask for the same files
def read_problems(paths: tuple[str, ...], source: str, bad_rows_limit: int) -> Loaded:
    """The problems of these files, as far as they can be read.

    Memory holds the unique problems and one batch of rows.

    Args:
        source: what problems are said to come from where a row does not say.
        bad_rows_limit: malformed rows that are skipped before it is an error.

    Raises:
        ConfigError: more malformed rows, named by file and line; or an unreadable file.
    """
    collector = _Collector(source, bad_rows_limit)
    for path in map(epath.Path, paths):
        for place, row in read_rows(path):
            collector.add(f"{path} {place}", row)
    return collector.result()


def _shards(folder: epath.Path) -> list[epath.Path]:
    """The files in it, or in its folders, of the first kind that there is."""
    for pattern in ("*", "*/*"):
        files = sorted(folder.glob(pattern))
        for suffix in READERS:
            found = [path for path in files if path.suffix == suffix]
            if found:
                return found
    return []


def _by_name(name: str, folder: epath.Path, split: str) -> list[epath.Path]:
    """The file or folder called `name`, or `name` and more after a separator; all if several."""
    near = [path for path in sorted(folder.iterdir()) if path.suffix in READERS or path.is_dir()]
    stems = {path: (path.stem if path.suffix in READERS else path.name).lower() for path in near}
    found = [path for path in near if stems[path] == name.lower()]
    if not found:
        starts = tuple(f"{name.lower()}{separator}" for separator in "_-.")
        found = [path for path in near if stems[path].startswith(starts)]
    return [path for path in found if split in stems[path]] if len(found) > 1 else found


def _glob(field: str, pattern: str) -> list[epath.Path]:
    require("**" not in pattern, field, pattern, "without **, which no bucket could answer")
    parts = epath.Path(pattern).parts
    first = next(i for i, part in enumerate(parts) if set(part) & set(WILDCARDS))
    found = epath.Path(*parts[:first]).glob("/".join(parts[first:]))
    return [path for path in sorted(found) if path.suffix in READERS]


def _matches(field: str, name: str, home: epath.Path, split: str) -> list[epath.Path]:
    path, found = epath.Path(name), []
    if set(name) & set(WILDCARDS):
        found = _glob(field, name)
    elif path.exists():
        found = [path]
    elif "/" not in name and home.is_dir():
        found = _by_name(name, home, split)
        found = found if len(found) == 1 else []
    return [file for one in found for file in (_shards(one) if one.is_dir() else [one])]


def find_files(field: str, name: str, folder: str, split: str) -> tuple[str, ...]:
    """The files that a source names: a path, a glob, a folder of shards, or a name in `folder`.

    Args:
        field: the setting, for the error.
        split: 'train' or 'test', which decides between several files of that name.

    Raises:
        ConfigError: no file, or none in particular, is meant; the message says what there is.
    """
    home = epath.Path(folder)
    try:
        found = _matches(field, name, home, split)
    except ConfigError:
        raise
    except Exception as error:  # of a bucket's client
        raise ConfigError(f"config.{field} = {name!r}: {error}") from None
    if not found or any(file.suffix not in READERS for file in found):
        there = sorted(file.name for file in home.iterdir()) if home.is_dir() else []
        raise ConfigError(
            f"config.{field} = {name!r}: must be arithmetic, gym:TASK, a path or glob of "
            f"{', '.join(READERS)}, or the first part of one name in config.data.folder = "
            f"{folder!r}, which holds {', '.join(there) or 'nothing'}"
        )
    return tuple(map(str, found))
