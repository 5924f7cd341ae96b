"""Files of JSON lines, read as they may be found, and added to as far as the storage lets it."""

import contextlib
import json
import math
import os
import pathlib
import time
from collections.abc import Iterable, Iterator
from typing import Any

from dapo_jax.runtime.storage.ownership import Folder
from dapo_jax.runtime.storage.retries import replacing

BROKEN = ".broken"  # what the name of a file ends in that holds lines nobody can read
SHOWN_STEPS = 5
MOST_OF_THE_TIME = 0.05  # that lines added rarely take on an object store


def read_object(line: bytes) -> dict[str, Any] | None:
    """None for what is no JSON object."""
    try:
        found = json.loads(line)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def objects(path: Folder, most: float = float("inf")) -> Iterator[dict[str, Any]]:
    """The objects of a file of lines, up to so many bytes."""
    with path.open("rb") as file:
        for line in file:
            most -= len(line)
            if most < 0:
                return
            found = read_object(line)
            if found is not None:
                yield found


def rewind(path: Folder, step: int) -> list[int]:
    """Drops the rows after `step`, and a line that a kill cut off.

    Returns the numbers of other lines that are no row; they are set aside in a file beside it.
    """
    if not path.exists():
        return []
    content, kept, broken = path.read_bytes(), [], {}
    *lines, rest = content.split(b"\n")
    for number, line in enumerate([*lines, rest], 1):
        row = read_object(line)
        if row is not None and type(row.get("step")) is int:
            kept += [line + b"\n"] if row["step"] <= step else []
        elif line.strip() and number <= len(lines):
            broken[number] = line + b"\n"
    if broken:
        aside = path.with_name(path.name + BROKEN)
        before = aside.read_bytes() if aside.exists() else b""
        with replacing(aside) as file:
            file.write(before + b"".join(broken.values()))
    if b"".join(kept) != content:
        with replacing(path) as file:
            file.write(b"".join(kept))
    return list(broken)


def spell(numbers: Iterable[int]) -> str:
    """As 1 to 3, 7, 9 to 12."""
    spans: list[list[int]] = []
    for number in sorted(numbers):
        if spans and spans[-1][1] == number - 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    said = [f"{first} to {last}" if first < last else f"{first}" for first, last in spans]
    more = [f"{len(said) - SHOWN_STEPS} more"] if len(said) > SHOWN_STEPS else []
    return ", ".join(said[:SHOWN_STEPS] + more)


class AppendFile:
    """A file that is added to; what could not be written is written with what follows.

    To an object nothing can be added: it is written whole each time, from memory.
    """

    def __init__(self, path: Folder):
        self.path, self._waiting, self._sound = path, [], -1
        self._content: bytes | None = None  # of an object
        self._next = -math.inf  # when one that is written rarely may be

    def add(self, content: bytes) -> None:
        """Takes what `write` will write."""
        self._waiting.append(content)

    def write(self, rarely: bool = False) -> None:
        """All that waits, whole or not at all. Raises what the storage raises.

        Args:
            rarely: an object may wait, so that writing it takes little of the time.
        """
        content = b"".join(self._waiting)
        if isinstance(self.path, pathlib.Path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._append(self.path, content)
        elif not rarely or time.monotonic() >= self._next:
            self._replace(content)
        else:
            return
        self._waiting, self._sound = [], -1

    def _replace(self, content: bytes) -> None:
        begun = time.monotonic()
        if self._content is None:
            self._content = self.path.read_bytes() if self.path.exists() else b""
        self.path.write_bytes(self._content + content)
        self._content += content
        ended = time.monotonic()
        self._next = ended + (ended - begun) / MOST_OF_THE_TIME

    def _append(self, path: pathlib.Path, content: bytes) -> None:
        with path.open("ab", buffering=0) as file:
            if self._sound >= 0:  # of a write that failed a part may stand
                file.truncate(min(file.tell(), self._sound))
            self._sound = file.seek(0, os.SEEK_END)
            try:
                while content:  # a full disk may take a part first
                    content = content[file.write(content) :]
            except OSError:
                with contextlib.suppress(OSError):
                    file.truncate(self._sound)
                raise
