"""JSON lines: reading damaged files, cutting back to a step, appending with retries."""

import contextlib
import io
import json
import math
import os
import pathlib
import time
from collections.abc import Iterator
from typing import Any

from dapo_jax.runtime.storage.paths import Folder
from dapo_jax.runtime.storage.retries import replacing

MAX_TIME_FRACTION = 0.05  # of the run, for rare appends to an object store


def read_object(line: bytes) -> dict[str, Any] | None:
    """Return the JSON object of a line; None for anything else."""
    try:
        value = json.loads(line)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def objects(path: Folder, max_bytes: float = float("inf")) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects of a file of lines, from at most `max_bytes` bytes."""
    with path.open("rb") as file:
        for line in file:
            max_bytes -= len(line)
            if max_bytes < 0:
                return
            value = read_object(line)
            if value is not None:
                yield value


def rewind(path: Folder, step: int) -> int:
    """Remove the rows after `step`, and a line that a kill cut off.

    Returns the number of other lines that are not rows; these are removed too.
    """
    content, rows, broken = path.read_bytes() if path.exists() else b"", [], 0
    for line in io.BytesIO(content):
        row = read_object(line)
        if row is not None and type(row.get("step")) is int:
            rows += [line.rstrip(b"\n") + b"\n"] if row["step"] <= step else []
        elif line.strip() and line.endswith(b"\n"):
            broken += 1
    if b"".join(rows) != content:
        with replacing(path) as file:
            file.write(b"".join(rows))
    return broken


class AppendFile:
    """File that is appended to; after a failed write, the next one repeats its content.

    An object of a store can't be appended to: it is rewritten from memory each time.
    """

    def __init__(self, path: Folder):
        self.path = path
        self._waiting: list[bytes] = []
        self._valid_bytes = -1  # before a write that failed; -1: no write failed
        self._content: bytes | None = None  # of an object
        self._next_write = -math.inf  # of an object that is rewritten rarely

    def add(self, content: bytes) -> None:
        """Queue content for `write`."""
        self._waiting.append(content)

    @property
    def waits(self) -> bool:
        """True if something is queued."""
        return bool(self._waiting)

    def write(self, rarely: bool = False) -> None:
        """Append all that is queued, completely or not at all. Raises storage errors."""
        content = b"".join(self._waiting)
        if isinstance(self.path, pathlib.Path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._append(self.path, content)
        elif not rarely or time.monotonic() >= self._next_write:
            self._rewrite(content)
        else:
            return
        self._waiting = []
        self._valid_bytes = -1

    def _rewrite(self, content: bytes) -> None:
        started = time.monotonic()
        if self._content is None:
            self._content = self.path.read_bytes() if self.path.exists() else b""
        self.path.write_bytes(self._content + content)
        self._content += content
        ended = time.monotonic()
        self._next_write = ended + (ended - started) / MAX_TIME_FRACTION

    def _append(self, path: pathlib.Path, content: bytes) -> None:
        with path.open("ab", buffering=0) as file:
            if self._valid_bytes >= 0:  # a failed write may have left a part
                file.truncate(min(file.tell(), self._valid_bytes))
            self._valid_bytes = file.seek(0, os.SEEK_END)
            try:
                while content:  # a full disk may take a part first
                    content = content[file.write(content) :]
                os.fsync(file.fileno())
            except OSError:
                with contextlib.suppress(OSError):
                    file.truncate(self._valid_bytes)
                raise
