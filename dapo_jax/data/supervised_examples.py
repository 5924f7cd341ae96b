"""Supervised examples, or pairs, of a user's files: some held out, in an endless order."""

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
from dapo_jax.data.row_formats import SHOWN_COMPLAINTS, MalformedRow, check_malformed
from dapo_jax.data.supervised_rows import PAIRS, Example, Forms, Turns, Writer
from dapo_jax.runtime.limits import memory_error_as_config_error
from dapo_jax.runtime.settings import ConfigError, naming, require
from dapo_jax.structs import Problem

HELDOUT_SHARE, MAX_HELDOUT = 20, 256


class Examples(NamedTuple):
    """Examples of the files.

    Attributes:
        notes: line about the examples.
        warnings: lines about rows that were left out or cut, and why.
    """

    training: list[Example]
    heldout: list[Example]
    notes: str
    warnings: list[str]

    def digest(self) -> str:
        """Digest of all examples, with their counts."""
        digest = hashlib.sha256()
        for example in (*self.training, *self.heldout):
            digest.update(b"|" + b"".join(a.tobytes() for turns in example.turns for a in turns))
        return f"{len(self.training)} + {len(self.heldout)}, {digest.hexdigest()[:16]}"


def _shorten(example: Example, row_tokens: int, pair: bool) -> Example | None:
    """Example cut to the length of a row; None where too little is left."""
    cut = (
        Turns(turns.prompt, *(part[: max(0, row_tokens - len(turns.prompt))] for part in turns[1:]))
        for turns in example.turns
    )
    kept = tuple(turns for turns in cut if turns.trained.any())
    if not kept or pair and (len(kept) < 2 or np.array_equal(kept[0].response, kept[1].response)):
        return None
    return Example(example.text, kept)


def _split(examples: list[Example], asked: int, name: str) -> tuple[list[Example], list[Example]]:
    """Examples to train on and examples to hold out; those of one prompt stay together.

    The smallest hashes are held out, whatever the seed and the order.
    """
    count = min(len(examples) // HELDOUT_SHARE, MAX_HELDOUT) if asked < 0 else asked
    allowed = f"below the {len(examples)} examples of {name!r}, from which they are taken"
    require(count < len(examples), "data.heldout_examples", count, allowed)

    def hash_prompt(example: Example) -> bytes:
        fingerprint = Problem("", example.text, "", "").fingerprint
        return hashlib.blake2b(fingerprint.encode(), digest_size=8).digest()

    keys = [hash_prompt(example) for example in examples]
    sizes, held = collections.Counter(keys), set()
    for key in sorted(sizes):
        if sizes[key] <= count:
            held.add(key)
            count -= sizes[key]
    parts: tuple[list[Example], list[Example]] = [], []
    for example, key in zip(examples, keys, strict=True):
        parts[key in held].append(example)
    return parts


class _Collector:
    """Collector of examples and of complaints about rows."""

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
            check_malformed(self.counts["malformed"], self._data.bad_rows_limit, self.complaints)
            return
        self.longest = max(self.longest, example.length)
        if example.length > self._row_tokens:
            cut = self._data.overlong == "cut"
            example = _shorten(example, self._row_tokens, self._pair) if cut else None
            self.counts["cut" if example else "dropped"] += 1
        if example:
            self.examples.append(example)


def find_source(data: OwnData) -> tuple[str, ...]:
    """Files that data.source names. Raises `ConfigError`."""
    return find_files("data.source", data.source, data.folder, "train")


def read_examples(data: OwnData, tokenizer: Tokenizer, row_tokens: int, forms: Forms) -> Examples:
    """Examples, or pairs, of the files that data.source names.

    Args:
        row_tokens: length beyond which an example is cut or dropped.
        forms: `EXAMPLES` or `PAIRS`.

    Raises:
        ConfigError: no file, too many malformed rows (named by file and line), nothing to train on.
    """
    collector = _Collector(Writer(data, tokenizer, forms), data, row_tokens, forms is PAIRS)
    for path in map(epath.Path, find_source(data)):
        with naming("data.source", data.source), memory_error_as_config_error(str(path)):
            for place, row in read_rows(path):
                collector.add(f"{path} {place}", row)
    counts, what = collector.counts, "pairs" if forms is PAIRS else "examples"
    overlong = counts["dropped"] + counts["cut"]
    warnings = collector.complaints[:SHOWN_COMPLAINTS]
    if overlong:
        warnings.append(
            f"{overlong:,} of {counts['rows']:,} {what} exceed packing.row_tokens = {row_tokens} "
            f"({counts['cut']:,} cut, {counts['dropped']:,} dropped); the longest has "
            f"{collector.longest:,} tokens"
        )
    if not collector.examples:
        why = "; ".join(warnings) or "there are no rows"
        raise ConfigError(f"config.data.source = {data.source!r}: holds no {what}: {why}")
    training, heldout = _split(collector.examples, data.heldout_examples, data.source)
    trained = sum(int(turns.trained.sum()) for example in training for turns in example.turns)
    malformed = f" ({counts['malformed']:,} malformed)" if counts["malformed"] else ""
    notes = (
        f"{data.source}: {len(training):,} {what} of {counts['rows']:,} rows{malformed}, "
        f"{trained:,} tokens to learn. Held out: {len(heldout):,}"
    )
    return Examples(training, heldout, notes, warnings)


def endless_order(count: int, seed: int) -> Callable[[int], int]:
    """Order of `count` examples: the index at a place of the run; each pass is shuffled anew."""

    @functools.lru_cache(maxsize=2)
    def permute(number: int) -> np.ndarray:
        key = [seed, zlib.crc32(b"examples"), number]
        return np.random.default_rng(key).permutation(count)

    return lambda place: int(permute(place // count)[place % count])
