"""Sources of problems that `data.source` and `data.heldout_source` name: generated tasks and files.

No training problem is a held-out problem, by `Problem.fingerprint`. Files are filtered here; a
generated problem is checked when it is sampled.
"""

import dataclasses
import functools
import hashlib
import itertools
import json
import math
import pathlib
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from etils import epath

from dapo_jax.config.experiment import Data
from dapo_jax.data import files
from dapo_jax.data.row_formats import (
    FIELDS,
    KNOWN,
    MISSING,
    NO_COLUMNS,
    look_up,
    parse_fields,
    read_row,
)
from dapo_jax.runtime import registry
from dapo_jax.types.errors import ConfigError, memory_error_as_config_error, naming, require
from dapo_jax.types.structs import Problem, WantedColumns

FIRST_ROWS = 100  # are checked for the fields that `data.fields` names
DIGEST_PROBLEMS = 8  # of a generated source
HELDOUT_SHARE = 5  # by default at most one in 5 problems of a file is held out


@dataclasses.dataclass(frozen=True)
class Generated:
    """Random-access problems that are made on demand."""

    length: int
    make: Callable[[int], Problem]

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Problem:
        if not 0 <= index < self.length:
            raise IndexError(index)
        return self.make(int(index))


@dataclasses.dataclass(frozen=True)
class Source:
    """Problems of one name, in the order of the files; those to train on occur once."""

    name: str
    problems: tuple[Problem, ...] | Generated
    weight: float = 1.0
    # Rows of the files: `rows`, and of these `malformed`, `without answer`, `repeats`, ...
    counts: Counter[str] = dataclasses.field(default_factory=Counter)
    messages: tuple[str, ...] = ()  # about malformed rows, and those whose text is held out
    named: bool = False  # True if a file was read by the fields that `data.fields` names
    fields: tuple[str, ...] = ()  # of the first row
    note: str = ""  # end of the description

    @property
    def generated(self) -> bool:
        return not isinstance(self.problems, tuple)

    def sample(self, limit: int) -> list[Problem]:
        """Return at most `limit` problems, evenly spaced."""
        step = max(1, math.ceil(len(self.problems) / limit))
        return [self.problems[i] for i in range(0, len(self.problems), step)]

    def describe(self) -> str:
        """Return a line about the number of problems and the other rows."""
        text = f"{files.shown_name(self.name)}: {len(self.problems):,} problems"
        if self.counts:
            others = [f"{n:,} {what}" for what, n in self.counts.items() if n and what != "rows"]
            text += f" of {self.counts['rows']:,} rows" + f" ({', '.join(others)})" * bool(others)
        return text + self.note

    def digests(self) -> dict[str, int | str]:
        """Return the number of problems, and digests of (the first generated) texts and answers.

        The digest of the answers includes solutions and the columns of reward functions.
        """
        texts, answers = hashlib.sha256(), hashlib.sha256()
        count = len(self.problems)
        for i in range(count if self.counts else min(DIGEST_PROBLEMS, count)):
            problem = self.problems[i]
            texts.update(repr((problem.id, problem.text, problem.system, problem.turns)).encode())
            texts.update((problem.messages + problem.tools).encode())
            answers.update(repr((problem.answer, problem.solution)).encode())
            answers.update(problem.columns.encode())
        digests = {"texts": texts.hexdigest()[:16], "answers": answers.hexdigest()[:16]}
        return {"problems": count} | digests


def hold_out(texts: Sequence[str], count: int) -> list[bool]:
    """Return whether each text is held out: at most `count`, by hash; equal texts together."""
    hashes = [hashlib.blake2b(text.encode(), digest_size=8).digest() for text in texts]
    held = set()
    for own, size in sorted(Counter(hashes).items()):
        if size <= count:
            held.add(own)
            count -= size
    return [own in held for own in hashes]


def read_problems(
    paths: Sequence[str],
    source: str,
    bad_rows_limit: int,
    fields: str = "",
    needs_answer: bool = True,
    columns: WantedColumns = NO_COLUMNS,
    keeps_repeats: bool = False,
) -> Source:
    """Return the problems of files; may raise `ConfigError`.

    Args:
        source: source of a problem if its row names none.
        bad_rows_limit: malformed rows that are skipped; after more without any problem, stop.
        fields: the setting `data.fields`. A file is read by it if one of its first rows has all
            these fields, and then every row must; else by its own format.
        columns: columns of the rows that reward functions take.
        keeps_repeats: whether equal rows stay several problems, to be sampled more often.
    """
    log = files.RowLog(bad_rows_limit)
    counts = log.counts
    problems: list[Problem] = []
    unique: dict[str, Problem] = {}
    any_named, first_row = False, {}
    with memory_error_as_config_error(", ".join(paths)):
        for place, row, names in _named_rows(paths, parse_fields("data.fields", fields, FIELDS)):
            any_named = any_named or bool(names)
            first_row = first_row or (row if isinstance(row, dict) else {})
            where = {"source": source, "number": counts["rows"] + 1}
            wanted = {"needs_answer": needs_answer, "columns": columns}
            read = functools.partial(read_row, fields=names, **wanted, **where)
            problem = log.parse(place, row, read)
            if log.exceeds_limit and not problems:
                break
            log.check_limit()
            if problem is None:
                continue
            first = unique.setdefault(problem.digest, problem)
            if first is problem or keeps_repeats:
                problems.append(first)
            else:
                counts["repeats"] += 1
    asked = {(p.system, p.tools, p.messages or p.turns, p.text, p.answer) for p in unique.values()}
    if further := len(asked) - len({key[:-1] for key in asked}):
        counts["with another answer to the same text"] = further
    messages = tuple(log.messages[: files.MAX_MESSAGES])
    shared = {"messages": messages, "named": any_named, "fields": tuple(first_row)}
    return Source(source, tuple(problems), counts=counts, **shared)


def _named_rows(
    paths: Sequence[str], fields: dict[str, str]
) -> Iterator[tuple[str, Any, dict[str, str]]]:
    """Yield (file and line, row, fields to read it by: `fields` or none)."""
    for path in paths:
        rows = files.read_rows(epath.Path(path))
        first = list(itertools.islice(rows, FIRST_ROWS))
        named = any(
            all(look_up(row, field) is not MISSING for field in fields.values()) for _, row in first
        )
        for place, row in itertools.chain(first, rows):
            yield f"{path} {place}", row, fields if named else {}


def plugin_of(name: str) -> Any:
    """Return the plug-in that generates a source, as `gym:TASK` (see `registry.OURS`), or None."""
    return registry.find("sources", re.split("[:?]", name)[0])


def is_generated(name: str) -> bool:
    """Return True for the name of a source that reads no files."""
    return plugin_of(name) is not None


def parse_sources(field: str, text: str) -> dict[str, float]:
    """Return the weights of a list of sources by name, 1 by default; may raise `ConfigError`."""
    if re.match(r"\w+:[^,]*\?\{", text):  # its JSON may have commas; no other source fits
        return {text: 1.0}
    weights: dict[str, float] = {}
    entries = text.split(",")
    for entry in entries:
        name, separator, number = entry.rpartition("=")
        is_argument = "?" in name and "=" not in re.split("[?&]", name)[-1]  # of a task
        if not separator or is_argument:
            name, number = entry, "1"
        try:
            weight = float(number)
        except ValueError:  # the = belongs to a path
            name, weight = entry, 1.0
        weights[name.strip()] = weight
    require(
        len(weights) == len(entries)
        and "" not in weights
        and all(weight > 0 and math.isfinite(weight) for weight in weights.values()),
        field,
        text,
        "names or paths, comma-separated, each once; a weight after = must be above 0",
    )
    return weights


# --- difficulty: pass rates that an evaluation wrote, and the range of them to train on ----------


def parse_range(text: str) -> tuple[float, float]:
    """Return the ends of 'LOW..HIGH'. Raises ConfigError."""
    ends = text.split("..")
    try:
        low, high = map(float, ends)
    except ValueError:
        low, high = math.nan, math.nan
    allowed = "LOW..HIGH, pass rates from 0 to 1, as 0.1..0.9"
    require(0 <= low <= high <= 1, "data.difficulty", text, allowed)
    return low, high


def read_rates(path: str) -> dict[str, float]:
    """Return the pass rates in a file by `Problem.digest`. Raises ConfigError.

    A line is a JSON object with the problem's identity and its pass rate, among others.
    """
    try:
        lines = epath.Path(path).read_text().splitlines()
        rows = [json.loads(line) for line in lines if line.strip()]
        return {row["identity"]: float(row["pass_rate"]) for row in rows}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"config.data.difficulty_file = {path!r}: must be a file that dapo-jax evaluate "
            f"--write_difficulty=FILE of this version wrote: {type(error).__name__}: {error}"
        ) from None


# --- the sources of a run -------------------------------------------------------------------------


def check_sources(data: Data) -> None:
    """Raise `ConfigError` if a source names no file; reads none."""
    for field, text, split in (
        ("data.source", data.source, "train"),
        ("data.heldout_source", data.heldout_source, "test"),
    ):
        for name in parse_sources(field, text) if text else ():
            if not is_generated(name):
                files.find_files(field, name, data.folder, split)


def every_problem(sources: Sequence[Source]) -> list[Problem]:
    """Return the problems of all sources in a fixed order."""
    return [s.problems[i] for s in sources for i in range(len(s.problems))]


class Sources:
    """Sources of a run; each file is read once. Methods raise `ConfigError`."""

    def __init__(
        self,
        data: Data,
        seed: int,
        needs_answer: bool = True,
        columns: WantedColumns = NO_COLUMNS,
    ):
        self._data = data
        self._seed = seed
        self._needs_answer = needs_answer
        self._columns = columns
        self._load = functools.cache(self._read)
        self._range = parse_range(data.difficulty) if data.difficulty else None
        self._rates = read_rates(data.difficulty_file) if self._range else {}
        self._split: set[str] = set()  # digests of problems that are held out of their own file

    def _read(self, field: str, name: str, split: str) -> Source:
        data = self._data
        if is_generated(name):
            problems = self._generate(field, name, data, split) or ()
            rows = {"rows": len(problems)} if isinstance(problems, tuple) else {}
            return Source(name, problems, counts=Counter(rows))
        paths = files.find_files(field, name, data.folder, split)
        short, _ = files.split_suffix(pathlib.PurePath(name).name.removeprefix(files.GIVEN_PREFIX))
        with naming(field, name):
            loaded = read_problems(
                paths,
                short,
                data.bad_rows_limit,
                data.fields,
                needs_answer=self._needs_answer,
                columns=self._columns,
                keeps_repeats=field == "data.heldout_source",
            )
        other_names = data.fields and not loaded.named
        if loaded.problems:
            note = ", by its own field names, not data.fields" if other_names else ""
            return dataclasses.replace(loaded, name=name, note=note)
        rows = loaded.counts["rows"]
        reason = next(iter(loaded.messages), f"the answer is empty ({KNOWN})")
        if other_names:
            reason += f"; no row has all fields of config.data.fields = {data.fields!r}"
        problem = f"none of its first {rows:,} rows is a problem: {reason}"
        raise ConfigError(f"config.{field} = {name!r}: {problem if rows else 'holds no rows'}")

    def _generate(
        self, field: str, name: str, data: Data, split: str
    ) -> tuple[Problem, ...] | Generated | None:
        """Return the problems of a source without files; None: none are held out by themselves."""
        taken = ", ".join(sorted(self._columns.required))
        allowed = (
            f"rows with the columns that rewards and teachers take ({taken}); it generates problems"
        )
        require(not taken, field, name, allowed)
        return plugin_of(name).open_problems(field, name, data, self._seed, split)

    def heldout(self) -> list[Source]:
        """Return the sources that are evaluated and never trained on.

        Without `data.heldout_source`, each name of `data.source` gives problems by its weight.
        """
        data = self._data
        if data.heldout_problems == 0:
            return []
        is_shared = not data.heldout_source
        field = "data.source" if is_shared else "data.heldout_source"
        weights = parse_sources(field, data.source if is_shared else data.heldout_source)
        total = sum(weights.values())
        ends = [
            round(data.heldout_count() * w / total) for w in itertools.accumulate(weights.values())
        ]
        sources = []
        for name, start, end in zip(weights, [0, *ends], ends, strict=False):
            part = dataclasses.replace(data, heldout_problems=end - start)
            own = self._generate(field, name, part, "heldout") if is_generated(name) else None
            if own is not None:
                sources.append(Source(name, own))
            elif is_shared or is_generated(name):
                sources.append(self._split_off(self._load(field, name, "train"), end - start))
            else:
                sources.append(self._load(field, name, "test"))
        return sources

    def _split_off(self, source: Source, count: int) -> Source:
        """Return a fixed held-out subset of a file; equal texts are held out together."""
        problems = every_problem([source])
        limit = len(problems) // HELDOUT_SHARE
        is_limited = self._data.heldout_problems < 0 and count > limit
        count = limit if is_limited else count
        allowed = (
            f"below the {len(problems)} problems of {source.name!r}, from which they are taken"
        )
        require(count < len(problems), "data.heldout_problems", count, allowed)
        held = hold_out([problem.fingerprint for problem in problems], count)
        note = ", a fifth (data.heldout_problems)" if is_limited else ""
        taken = tuple(itertools.compress(problems, held))
        allowed = f"0, or as many as rows of {source.name!r} have the same text: they stay together"
        require(is_limited or bool(taken) or not count, "data.heldout_problems", count, allowed)
        self._split.update(problem.digest for problem in taken)
        return Source(source.name, taken, named=source.named, note=note)

    def training(self, heldout: set[str]) -> list[Source]:
        """Return the sources to train on, without repeats in files, and without held-out texts.

        Args:
            heldout: `Problem.fingerprint` of the held-out problems.
        """
        field = "data.source"
        sources = []
        taken: set[str] = set()
        for name, weight in parse_sources(field, self._data.source).items():
            source = self._load(field, name, "train")
            if source.generated:
                allowed = f"empty with {name}, whose problems no file lists"
                require(not self._range, "data.difficulty", self._data.difficulty, allowed)
                sources.append(dataclasses.replace(source, weight=weight))
                continue
            unheld = [p for p in every_problem([source]) if p.fingerprint not in heldout]
            problems = tuple({p.digest: p for p in unheld if p.digest not in taken}.values())
            if not problems:
                raise ConfigError(
                    f"config.{field} = {name!r}: every problem is held out or in another source"
                )
            taken.update(problem.digest for problem in problems)
            held = [p for p in every_problem([source]) if p.fingerprint in heldout]
            counts = source.counts.copy()
            counts.update({"held out": len(held), "repeats": len(unheld) - len(problems)})
            messages = source.messages
            if others := [p for p in held if p.digest not in self._split]:
                shown = ", ".join(f"{p.id} {p.text[-60:]!r}" for p in others[: files.MAX_MESSAGES])
                same = f"{len(others):,} problems are left out: held-out ones have the same text"
                messages += (f"{name}: {same}: {shown}",)
            if self._range:
                low, high = self._range
                rates = [self._rates.get(problem.digest, math.nan) for problem in problems]
                known = zip(problems, rates, strict=True)
                rated = tuple(problem for problem, rate in known if low <= rate <= high)
                counts["outside data.difficulty"] = len(problems) - len(rated)
                allowed = f"a range with problems of {name}: none of {len(problems)} is in it"
                require(bool(rated), "data.difficulty", self._data.difficulty, allowed)
                problems = rated
            changes = {"problems": problems, "counts": counts, "messages": messages}
            sources.append(dataclasses.replace(source, weight=weight, **changes))
        return sources
