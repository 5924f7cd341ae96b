"""Small text files, read whole; errors name the setting with the path."""

import codecs
import collections
import json
import os
import pathlib
import stat
from typing import Any

from dapo_jax.types.errors import ConfigError

MAX_TEXT_BYTES = 64 << 20  # of a file that is read as a whole
LFS_POINTER = b"version https://git-lfs.github.com/spec/"  # start of a pointer file
LATIN = "if it is Latin-1: iconv -f LATIN1 -t UTF-8"  # about text that is not UTF-8


def check_utf8(head: bytes) -> None:
    """Raise ValueError if the first bytes of a text are a UTF-16 byte order mark."""
    if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise ValueError("it is UTF-16: must be UTF-8 (iconv -f UTF-16 -t UTF-8)")


def check_regular(path: Any) -> None:
    """Raise OSError if a local path is not a regular file, or is a Git LFS pointer.

    Reading a pipe or a device may never end.
    """
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise OSError("it is a pipe, a device or a folder: must be a file")
    with open(path, "rb") as file:
        if file.read(len(LFS_POINTER)) == LFS_POINTER:
            raise OSError("it is a Git LFS pointer, not the file: run git lfs pull in its checkout")


def read_file(path: pathlib.Path, field: str = "") -> str:
    """Read a small text file; raises `ConfigError` with `field`, the setting with the path."""
    named = f"config.{field}: {path}" if field else str(path)
    try:
        check_regular(path)
        size = path.stat().st_size
        if size > MAX_TEXT_BYTES:
            raise ValueError(f"it has {size:,} bytes, more than {MAX_TEXT_BYTES:,}")
        content = path.read_bytes()
        check_utf8(content)
        return content.decode("utf-8").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{named} can't be read: {error} ({LATIN})", field) from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{named} can't be read: {error}", field) from None


def read_json(path: pathlib.Path, field: str, unique_keys: bool = False) -> dict[str, Any]:
    """Read the object in a JSON file; raises `ConfigError` with `field`, the path's setting.

    Args:
        unique_keys: reject an object that has a key twice.
    """
    named = f"config.{field}: {path}" if field else str(path)
    text = read_file(path, field)

    def make(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(pairs)
        if unique_keys and len(made) < len(pairs):
            ((key, _),) = collections.Counter(key for key, _ in pairs).most_common(1)
            lines = [str(n) for n, line in enumerate(text.splitlines(), 1) if f'"{key}"' in line]
            raise ValueError(f"an object has the key {key!r} twice (see lines {', '.join(lines)})")
        return made

    try:
        content = json.loads(text, object_pairs_hook=make)
    except RecursionError:
        raise ConfigError(f"{named} can't be read: it is nested too deeply", field) from None
    except ValueError as error:
        raise ConfigError(f"{named} can't be read: {error}", field) from None
    if not isinstance(content, dict):
        raise ConfigError(f"{named}: must hold an object", field)
    return content
