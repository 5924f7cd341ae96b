"""Files of JSON lines, read as they may be found, and added to as far as the storage lets it."""

import contextlib
import json
import os
import pathlib
from collections.abc import Iterable, Iterator
from typing import Any

from dapo_jax.marks import Folder
from dapo_jax.storage import replacing

BROKEN = ".broken"  # what the name of a file ends in that holds lines nobody can read
SHOWN_STEPS = 5


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


class Growing:
    """A file that is added to; what could not be written is written with what follows."""

    def __init__(self, path: Folder):
        self.path, self._waiting, self._sound = path, [], -1

    def add(self, content: bytes) -> None:
        """Takes what `write` will write."""
        self._waiting.append(content)

    def write(self) -> None:
        """All that waits, whole or not at all. Raises what the storage raises."""
        content = b"".join(self._waiting)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(self.path, pathlib.Path):
            self._append(self.path, content)
        else:
            with self.path.open("ab") as file:
                file.write(content)
        self._waiting, self._sound = [], -1

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
