"""A user's own examples, or pairs: read from files, some held out, in an endless order."""

import collections
import functools
import hashlib
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from etils import epath

from dapo_jax.config.experiment import OwnData
from dapo_jax.data.file_readers import read_rows
from dapo_jax.data.problem_files import find_files
from dapo_jax.data.prompts.tokenizer import Tokenizer
from dapo_jax.data.row_formats import MalformedRow
from dapo_jax.data.supervised_rows import PAIRS, Example, Forms, Turns, Writer
from dapo_jax.runtime.settings import ConfigError, require
from dapo_jax.structs import Problem

HELDOUT_SHARE, MOST_HELDOUT = 20, 256
SHOWN_COMPLAINTS = 3


class Examples(NamedTuple):
    """What the files hold.

    Attributes:
        notes: what there is, in a line.
        warnings: what was left out or cut, and why.
    """

    training: list[Example]
    heldout: list[Example]
    notes: str
    warnings: list[str]

    def digest(self) -> str:
        """Tells these examples from others."""
        found = hashlib.sha256()
        for part in (self.training, self.heldout):
            for one in part:
                found.update(b"|" + b"".join(a.tobytes() for turns in one.turns for a in turns))
        return f"{len(self.training)} + {len(self.heldout)}, {found.hexdigest()[:16]}"


def _shorten(example: Example, row_tokens: int, pair: bool) -> Example | None:
    """The example without what exceeds a row; None where too little of it is left."""
    cut = (
        Turns(one.prompt, *(part[: max(0, row_tokens - len(one.prompt))] for part in one[1:]))
        for one in example.turns
    )
    kept = tuple(one for one in cut if one.trained.any())
    if not kept or pair and (len(kept) < 2 or np.array_equal(kept[0].response, kept[1].response)):
        return None
    return Example(example.text, kept)


def _split(examples: list[Example], asked: int, name: str) -> tuple[list[Example], list[Example]]:
    """Those to train on and those to hold out; what shares a prompt stays together.

    Held out are those with the smallest hashes: the same whatever the seed and the order.
    """
    count = min(len(examples) // HELDOUT_SHARE, MOST_HELDOUT) if asked < 0 else asked
    allowed = f"below the {len(examples)} examples of {name!r}, from which they are taken"
    require(count < len(examples), "data.heldout_examples", count, allowed)

    def key(one: Example) -> bytes:
        print_ = Problem("", one.text, "", "").fingerprint
        return hashlib.blake2b(print_.encode(), digest_size=8).digest()

    keys = [key(one) for one in examples]
    sizes, held = collections.Counter(keys), set()
    for one in sorted(sizes):
        if sizes[one] <= count:
            held.add(one)
            count -= sizes[one]
    training = [one for one, its in zip(examples, keys, strict=True) if its not in held]
    heldout = [one for one, its in zip(examples, keys, strict=True) if its in held]
    return training, heldout


class _Collector:
    """Rows to examples, with what was wrong on the way."""

    def __init__(self, writer: Writer, data: OwnData, row_tokens: int, pair: bool):
        self._writer, self._data, self._row_tokens, self._pair = writer, data, row_tokens, pair
        self.examples: list[Example] = []
        self.counts: collections.Counter[str] = collections.Counter()
        self.complaints: list[str] = []
        self.longest = 0

    def add(self, place: str, row: Any) -> None:
        self.counts["rows"] += 1
        try:
            if isinstance(row, MalformedRow):
                raise row
            example: Example | None = self._writer.write(row)
        except MalformedRow as error:
            self.counts["malformed"] += 1
            self.complaints.append(f"{place}: {error}")
            limit = self._data.bad_rows_limit
            if self.counts["malformed"] > limit:
                shown = "; ".join(self.complaints[:SHOWN_COMPLAINTS])
                raise ConfigError(
                    f"config.data.bad_rows_limit = {limit}: more rows are malformed: {shown}"
                ) from None
            return
        self.longest = max(self.longest, example.length)
        if example.length > self._row_tokens:
            cut = self._data.overlong == "cut"
            example = _shorten(example, self._row_tokens, self._pair) if cut else None
            self.counts["cut" if example else "dropped"] += 1
        if example:
            self.examples.append(example)


def find_source(data: OwnData) -> tuple[str, ...]:
    """The files that data.source names. Raises `ConfigError`."""
    return find_files("data.source", data.source, data.folder, "train")


def read_examples(data: OwnData, tokenizer: Tokenizer, row_tokens: int, forms: Forms) -> Examples:
    """The examples, or pairs, of the files that data.source names.

    Args:
        row_tokens: what is longer is cut or dropped.
        forms: `EXAMPLES` or `PAIRS`.

    Raises:
        ConfigError: no file, too many malformed rows (named by file and line), nothing to train on.
    """
    found = _Collector(Writer(data, tokenizer, forms), data, row_tokens, forms is PAIRS)
    for path in map(epath.Path, find_source(data)):
        for place, row in read_rows(path):
            found.add(f"{path} {place}", row)
    counts, what = found.counts, "pairs" if forms is PAIRS else "examples"
    overlong = counts["dropped"] + counts["cut"]
    warnings = found.complaints[:SHOWN_COMPLAINTS]
    if overlong:
        warnings.append(
            f"{overlong:,} of {counts['rows']:,} {what} exceed packing.row_tokens = {row_tokens} "
            f"({counts['cut']:,} cut, {counts['dropped']:,} dropped); the longest has "
            f"{found.longest:,} tokens"
        )
    if not found.examples:
        why = "; ".join(warnings) or "there are no rows"
        raise ConfigError(f"config.data.source = {data.source!r}: holds no {what}: {why}")
    training, heldout = _split(found.examples, data.heldout_examples, data.source)
    trained = sum(int(turns.trained.sum()) for one in training for turns in one.turns)
    malformed = f" ({counts['malformed']:,} malformed)" if counts["malformed"] else ""
    notes = (
        f"{data.source}: {len(training):,} {what} of {counts['rows']:,} rows{malformed}, "
        f"{trained:,} tokens to learn. Held out: {len(heldout):,}"
    )
    return Examples(training, heldout, notes, warnings)


def endless_order(count: int, seed: int) -> Callable[[int], int]:
    """Which of `count` examples is at a place of the run: each once a pass, shuffled anew."""

    @functools.lru_cache(maxsize=2)
    def of_pass(number: int) -> np.ndarray:
        key = [seed, zlib.crc32(b"examples"), number]
        return np.random.default_rng(key).permutation(count)

    return lambda place: int(of_pass(place // count)[place % count])
