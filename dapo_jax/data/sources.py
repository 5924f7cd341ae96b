"""Sources of problems that `data.source` and `data.heldout_source` name: generated tasks and files.

No training problem is a held-out problem, by `Problem.fingerprint`. Files are cleared of them
here; a generated problem is checked when its turn comes.
"""

import collections
import dataclasses
import functools
import hashlib
import math
import pathlib
from collections.abc import Callable, Sequence
from typing import Protocol

from dapo_jax.config.experiment import Data
from dapo_jax.data import arithmetic, multi_digit_sums
from dapo_jax.data.file_readers import split_suffix
from dapo_jax.data.problem_files import Loaded, find_files, read_problems
from dapo_jax.data.row_formats import KNOWN
from dapo_jax.rewards import gym
from dapo_jax.runtime.settings import ConfigError, naming, require
from dapo_jax.structs import Problem

LOOKED_AT = 8  # generated problems, for a digest
HELDOUT_SHARE = 5  # of a file's problems one in so many is held out, where no number is asked for


class GymProblems:
    """Problems of a reasoning-gym task, by index; the held-out ones follow the others."""

    def __init__(self, field: str, task: str, data: Data, split: str, seed: int):
        self._task, self._first = task, data.train_problems if split == "heldout" else 0
        self._length = data.heldout_count() if split == "heldout" else data.train_problems
        size = data.train_problems + data.heldout_count()
        self._items = gym.open_task(field, task, seed, size)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Problem:
        if not 0 <= index < self._length:
            raise IndexError(index)
        place = self._first + int(index)
        item, source = self._items[place], gym.PREFIX + self._task
        return Problem(
            id=f"{source}-{place}",
            text=item["question"].strip(),
            answer=str(item["answer"]),
            source=source,
            subject=self._items.category,
            metadata=gym.pack_item(item),
        )


class Generated(Protocol):
    """Random-access problems that are made on demand."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Problem: ...


# (data settings, split 'train' or 'heldout', seed) -> problems by index
Generator = Callable[[Data, str, int], Generated]
GENERATORS: dict[str, Generator] = {
    "arithmetic": arithmetic.Problems,
    "multi_digit_sums": multi_digit_sums.Problems,
}


@dataclasses.dataclass(frozen=True)
class Source:
    """Problems of one name.

    Attributes:
        counts: rows of the files by outcome; empty where problems are generated.
        complaints: the first malformed rows, by file and line.
        named: true where files were read by the fields that `data.fields` names.
        note: end of the description.
    """

    name: str
    problems: tuple[Problem, ...] | Generated
    weight: float = 1.0
    counts: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    complaints: tuple[str, ...] = ()
    named: bool = False
    note: str = ""

    @property
    def generated(self) -> bool:
        """True where problems are made on demand."""
        return not isinstance(self.problems, tuple)

    def sample(self, most: int) -> list[Problem]:
        """At most so many of the problems, evenly spaced."""
        count = len(self.problems)
        return [self.problems[i] for i in range(0, count, max(1, math.ceil(count / most)))]

    def describe(self) -> str:
        """Line about the number of problems, and the other rows."""
        text = f"{self.name}: {len(self.problems):,} problems"
        if not self.counts:
            return text + self.note
        others = [f"{n:,} {what}" for what, n in self.counts.items() if n and what != "rows"]
        text += f" of {self.counts['rows']:,} rows" + f" ({', '.join(others)})" * bool(others)
        return text + self.note

    def digests(self) -> dict[str, int | str]:
        """Digests of the problems: of all in files, of the first generated ones.

        `problems` is their number; `texts` and `answers` are digests in order.
        """
        texts, answers = hashlib.sha256(), hashlib.sha256()
        for i in range(len(self.problems) if self.counts else min(LOOKED_AT, len(self.problems))):
            problem = self.problems[i]
            texts.update(repr((problem.id, problem.text, problem.system, problem.turns)).encode())
            answers.update(repr((problem.answer, problem.solution)).encode())
        digests = {"texts": texts.hexdigest()[:16], "answers": answers.hexdigest()[:16]}
        return {"problems": len(self.problems)} | digests


def parse_sources(field: str, text: str) -> dict[str, float]:
    """Weights by name of a list of sources, 1 by default. Raises `ConfigError`."""
    weights: dict[str, float] = {}
    entries = text.split(",")
    for entry in entries:
        name, separator, number = entry.rpartition("=")
        try:
            weight = float(number) if separator else 1.0
        except ValueError:  # the sign belongs to a path
            name, weight = entry, 1.0
        weights[(name if separator else entry).strip()] = weight
    require(
        len(weights) == len(entries)
        and "" not in weights
        and all(weight > 0 and math.isfinite(weight) for weight in weights.values()),
        field,
        text,
        "names or paths, comma-separated, each once; =WEIGHT behind one must be above 0",
    )
    return weights


def _generator(field: str, name: str) -> Generator | None:
    if name.startswith(gym.PREFIX):
        return functools.partial(GymProblems, field, name.removeprefix(gym.PREFIX))
    return GENERATORS.get(name)


def check_sources(data: Data) -> None:
    """Raises `ConfigError` where a name of `data` means no file; reads none."""
    for field, split in (("data.source", "train"), ("data.heldout_source", "test")):
        text = getattr(data, field.removeprefix("data."))
        for name in parse_sources(field, text) if text else ():
            if not is_generated(name):
                find_files(field, name, data.folder, split)


def is_generated(name: str) -> bool:
    """True of the name of a generated source."""
    return name.startswith(gym.PREFIX) or name in GENERATORS


def _load(field: str, name: str, data: Data, split: str, needs_answer: bool) -> Loaded:
    paths = find_files(field, name, data.folder, split)
    short, _ = split_suffix(pathlib.PurePath(name).name)
    with naming(field, name):
        loaded = read_problems(paths, short, data.bad_rows_limit, data.fields, needs_answer)
    if loaded.problems:
        return loaded
    rows, why = loaded.counts["rows"], "; ".join(loaded.complaints[:1])
    if rows and not why:
        why = f"the answer is empty ({KNOWN})"
    if data.fields and not loaded.named:
        why += f"; no row has all that config.data.fields = {data.fields!r} names"
    reason = f"of its first {rows:,} rows none is a problem: {why}" if rows else "holds no rows"
    raise ConfigError(f"config.{field} = {name!r}: {reason}")


def _take_off(name: str, problems: Sequence[Problem], count: int) -> tuple[Problem, ...]:
    """Problems with the `count` smallest hashes, which depend on neither seed nor order."""
    require(
        count < len(problems),
        "data.heldout_problems",
        count,
        f"below the {len(problems)} problems of {name!r}, from which they are taken",
    )

    def order(place: int) -> bytes:
        return hashlib.blake2b(problems[place].fingerprint.encode()).digest()

    places = sorted(range(len(problems)), key=order)[:count]
    return tuple(problems[i] for i in sorted(places))


def _shares(total: int, weights: dict[str, float]) -> dict[str, int]:
    """Whole shares of `total` by weight."""
    ends, before, shares = 0.0, 0, {}
    for name, weight in weights.items():
        ends += weight
        after = round(total * ends / sum(weights.values()))
        shares[name], before = after - before, after
    return shares


def _held_out(name: str, loaded: Loaded, count: int, data: Data) -> Source:
    """Source of the problems that are held out of a file."""
    most = len(loaded.problems) // HELDOUT_SHARE
    bounded = data.heldout_problems < 0 and count > most
    note = ", a fifth (data.heldout_problems)" if bounded else ""
    problems = _take_off(name, loaded.problems, most if bounded else count)
    return Source(name, problems, named=loaded.named, note=note)


def heldout_sources(data: Data, seed: int, needs_answer: bool = True) -> list[Source]:
    """Sources that are evaluated and never trained on.

    Without `data.heldout_source` a generated source gives problems of its held-out split, and
    files give some of theirs, in shares by weight. Raises `ConfigError`.
    """
    if data.heldout_problems == 0:
        return []
    own = not data.heldout_source
    field = "data.source" if own else "data.heldout_source"
    weights = parse_sources(field, data.source if own else data.heldout_source)
    sources = []
    for name, count in _shares(data.heldout_count(), weights).items():
        generator = _generator(field, name)
        if generator:
            share = dataclasses.replace(data, heldout_problems=count)
            sources.append(Source(name, generator(share, "heldout", seed)))
            continue
        loaded = _load(field, name, data, "train" if own else "test", needs_answer)
        if own:
            sources.append(_held_out(name, loaded, count, data))
        else:
            sources.append(_of_file(name, loaded, data))
    return sources


def _of_file(name: str, loaded: Loaded, data: Data, weight: float = 1.0) -> Source:
    other = data.fields and not loaded.named
    note = ", by its own names of fields, not data.fields" if other else ""
    return Source(
        name, loaded.problems, weight, loaded.counts, loaded.complaints, loaded.named, note
    )


def every_problem(sources: Sequence[Source]) -> list[Problem]:
    """Problems of all sources in one list, in a fixed order."""
    return [s.problems[i] for s in sources for i in range(len(s.problems))]


def training_sources(
    data: Data, seed: int, heldout: set[str], needs_answer: bool = True
) -> list[Source]:
    """Sources to train on; files lose problems whose fingerprints are in `heldout`.

    A problem in the files of several sources stays with the first. Raises `ConfigError`.
    """
    sources, taken, field = [], set(heldout), "data.source"
    for name, weight in parse_sources(field, data.source).items():
        generator = _generator(field, name)
        if generator:
            sources.append(Source(name, generator(data, "train", seed), weight))
            continue
        loaded = _load(field, name, data, "train", needs_answer)
        prints = [problem.fingerprint for problem in loaded.problems]
        pairs = zip(loaded.problems, prints, strict=True)
        problems = tuple(problem for problem, own in pairs if own not in taken)
        held = sum(own in heldout for own in prints)
        counts = loaded.counts.copy()
        counts.update({"held out": held, "repeats": len(prints) - len(problems) - held})
        taken.update(prints)
        if not problems:
            raise ConfigError(
                f"config.data.source = {name!r}: every problem is held out or in another source"
            )
        left = loaded._replace(problems=problems, counts=counts)
        sources.append(_of_file(name, left, data, weight))
    return sources
