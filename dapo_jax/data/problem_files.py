"""Files of problems, found by name and read whole.

A bad row costs itself, up to a limit; a file may hold every problem a hundred times.
"""

import collections
import difflib
import functools
import itertools
import os
import re
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from etils import epath

from dapo_jax.data.file_readers import READERS, read_rows, split_suffix
from dapo_jax.data.row_formats import (
    FIELDS,
    KNOWN,
    MISSING,
    SHOWN_COMPLAINTS,
    MalformedRow,
    NoAnswer,
    UnknownFields,
    check_malformed,
    look_up,
    parse_fields,
    read_row,
)
from dapo_jax.runtime.limits import memory_error_as_config_error
from dapo_jax.runtime.settings import ConfigError, require
from dapo_jax.structs import Problem
from dapo_jax.verifier.normalisation import normalise
from dapo_jax.verifier.numerals import read_number

WILDCARDS = "*?["
HUB_NAME = re.compile(r"\w[\w-]*/\w[\w.-]*")
LOOKED_AT = 100  # first rows of a file, for whether it has the fields that `data.fields` names


class Loaded(NamedTuple):
    """Problems of some files, each once, in the order of the files.

    Attributes:
        counts: `rows`, and of these `malformed`, `without answer` (of a proof), `repeats`, and
            `conflicts` (of a problem that occurs with different answers: it is left out).
        complaints: the first malformed and conflicting rows, by file and line.
        named: true where a file was read by the fields that `data.fields` names.
    """

    problems: tuple[Problem, ...]
    counts: collections.Counter[str]
    complaints: tuple[str, ...]
    named: bool = False


def _same_gold(left: str, right: str) -> bool:
    """Equality of two gold answers, however written; in doubt they differ."""
    if left == right:
        return True
    left, right = normalise(left), normalise(right)
    number = read_number(left)
    return left == right or number is not None and number == read_number(right)


class _Collector:
    """Collector of unique problems and of complaints about rows."""

    def __init__(self, source: str, bad_rows_limit: int, needs_answer: bool):
        self._source, self._limit, self._needs_answer = source, bad_rows_limit, needs_answer
        self._problems: dict[Hashable, Problem] = {}
        self._conflicting: set[Hashable] = set()
        self._counts: collections.Counter[str] = collections.Counter()
        self._complaints: list[str] = []

    @property
    def hopeless(self) -> bool:
        """True of a file of other things: too many malformed rows, and no problem."""
        return self._counts["malformed"] > self._limit and not self._problems

    def add(self, place: str, row: Any, fields: Mapping[str, str]) -> None:
        self._counts["rows"] += 1
        try:
            if isinstance(row, MalformedRow):
                raise row
            number = self._counts["rows"]
            problem = read_row(row, self._source, number, fields, self._needs_answer)
        except NoAnswer:
            self._counts["without answer"] += 1
        except MalformedRow as error:
            self._counts["malformed"] += 1
            known = isinstance(error, UnknownFields) and KNOWN not in "".join(self._complaints)
            self._complaints.append(f"{place}: {error}" + f" ({KNOWN})" * known)
            if self._problems:
                check_malformed(self._counts["malformed"], self._limit, self._complaints)
        else:
            self._add_problem(place, problem)

    def _add_problem(self, place: str, problem: Problem) -> None:
        key = (problem.system, problem.turns, " ".join(problem.text.split()))
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


def _stamp(path: str) -> tuple[str, int, int]:
    """Path, size and time of a file: a file of this machine that changed has another stamp."""
    if "://" in path:
        return path, 0, 0
    status = os.stat(path)
    return os.path.abspath(path), status.st_size, status.st_mtime_ns


def read_problems(
    paths: tuple[str, ...],
    source: str,
    bad_rows_limit: int,
    fields: str = "",
    needs_answer: bool = True,
) -> Loaded:
    """Problems of files, as far as they can be read.

    Memory holds the unique problems and one batch of rows.

    Args:
        source: source of a problem whose row names none.
        bad_rows_limit: malformed rows that are skipped; more are an error. Where all rows are
            malformed, reading stops behind them.
        fields: the setting `data.fields`. A file is read by it where one of its first rows has all
            that it names, and then every row must; else by its own format.
        needs_answer: leaves out rows without an answer.

    Raises:
        ConfigError: more malformed rows, named by file and line; or an unreadable file.
    """
    try:
        stamps = tuple(map(_stamp, paths))
    except OSError as error:
        raise ConfigError(f"{', '.join(paths)} can't be read: {error}") from None
    return _read_problems(paths, stamps, source, bad_rows_limit, fields, needs_answer)


@functools.lru_cache(maxsize=8)  # training, held-out problems and examples ask for the same files
def _read_problems(
    paths: tuple[str, ...],
    stamps: tuple[tuple[str, int, int], ...],
    source: str,
    bad_rows_limit: int,
    fields: str,
    needs_answer: bool,
) -> Loaded:
    collector, named = _Collector(source, bad_rows_limit, needs_answer), False
    with memory_error_as_config_error(", ".join(paths)):
        for place, row, names in _named_rows(paths, parse_fields("data.fields", fields, FIELDS)):
            named = named or bool(names)
            collector.add(place, row, names)
            if collector.hopeless:
                break
    return collector.result()._replace(named=named)


def _named_rows(
    paths: Sequence[str], fields: dict[str, str]
) -> Iterator[tuple[str, Any, dict[str, str]]]:
    """Rows as (file and line, row, fields by which it is read: `fields` or none)."""
    for path in map(epath.Path, paths):
        rows = read_rows(path)
        first = list(itertools.islice(rows, LOOKED_AT))
        named = any(
            all(look_up(row, field) is not MISSING for field in fields.values()) for _, row in first
        )
        for place, row in itertools.chain(first, rows):
            yield f"{path} {place}", row, fields if named else {}


def _shards(folder: epath.Path) -> list[epath.Path]:
    """Files in a folder, or in its folders, of the first kind that occurs."""
    for pattern in ("*", "*/*"):
        files = sorted(folder.glob(pattern))
        for suffix in READERS:
            shards = [path for path in files if split_suffix(path.name)[1] == suffix]
            if shards:
                return shards
    return []


def _by_name(name: str, folder: epath.Path, split: str) -> list[epath.Path]:
    """The file or folder called `name`, or `name` and more after a separator; all if several."""
    names = {path: split_suffix(path.name) for path in sorted(folder.iterdir())}
    near = [path for path, (_, suffix) in names.items() if suffix or path.is_dir()]
    stems = {path: names[path][0].lower() for path in near}
    matches = [path for path in near if stems[path] == name.lower()]
    if not matches:
        starts = tuple(f"{name.lower()}{separator}" for separator in "_-.")
        matches = [path for path in near if stems[path].startswith(starts)]
    return [path for path in matches if split in stems[path]] if len(matches) > 1 else matches


def _glob(field: str, pattern: str) -> list[epath.Path]:
    require("**" not in pattern, field, pattern, "without **, which no bucket could answer")
    parts = epath.Path(pattern).parts
    first = next(i for i, part in enumerate(parts) if set(part) & set(WILDCARDS))
    matches = epath.Path(*parts[:first]).glob("/".join(parts[first:]))
    return [path for path in sorted(matches) if split_suffix(path.name)[1]]


def _matches(field: str, name: str, home: epath.Path, split: str) -> list[epath.Path]:
    path, paths = epath.Path(name), []
    if set(name) & set(WILDCARDS):
        paths = _glob(field, name)
    elif path.exists():
        paths = [path]
    elif "/" not in name and split_suffix(name)[1] and (home / name).exists():
        paths = [home / name]
    elif "/" not in name and home.is_dir():
        paths = _by_name(name, home, split)
        paths = paths if len(paths) == 1 else []
    return [file for path in paths for file in (_shards(path) if path.is_dir() else [path])]


def find_files(field: str, name: str, folder: str, split: str) -> tuple[str, ...]:
    """Files that a source names: a path, a glob, a folder of shards, or a name in `folder`.

    Args:
        field: the setting, for the error.
        split: 'train' or 'test', which decides between several files of that name.

    Raises:
        ConfigError: no file, or none in particular, is meant; the message says what there is.
    """
    home = epath.Path(folder)
    allowed = "a path of this machine or on gs://: nothing else is downloaded"
    require("://" not in name or name.startswith("gs://"), field, name, allowed)
    try:
        files = _matches(field, name, home, split)
    except ConfigError:
        raise
    except Exception as error:  # of a bucket's client
        raise ConfigError(f"config.{field} = {name!r}: {error}") from None
    if not files or not all(split_suffix(file.name)[1] for file in files):
        raise ConfigError(f"config.{field} = {name!r}: {_why_none(name, home)}")
    return tuple(map(str, files))


def _why_none(name: str, home: epath.Path) -> str:
    """Reason why a name means no file, or none that can be read."""
    path, readable = epath.Path(name), ", ".join(READERS)
    if path.exists():
        return f"must end in {readable}" if not path.is_dir() else f"holds no file of {readable}"
    if set(name) & set(WILDCARDS):
        return f"no file of {readable} matches"
    if "/" in name or split_suffix(name)[1]:
        beside = path.parent if path.parent.is_dir() else home
        names = [file.name for file in beside.iterdir()] if beside.is_dir() else []
        near = difflib.get_close_matches(path.name, names, n=1)
        hint = "".join(f"; did you mean {beside / close}?" for close in near)
        if HUB_NAME.fullmatch(name) and not path.parent.is_dir():
            hint = f"; a hub's data set is downloaded first: hf download {name} --repo-type dataset"
            hint += f" --local-dir {home / path.name}"
        return "no such file" + hint
    names = sorted(file.name for file in home.iterdir()) if home.is_dir() else []
    return (
        "must be arithmetic, multi_digit_sums, gym:TASK, "
        f"a path or glob of {readable}, or the first part of one name in "
        f"config.data.folder = {str(home)!r}, which holds "
        f"{', '.join(names) or 'nothing'}"
    )
