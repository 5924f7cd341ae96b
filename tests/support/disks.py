"""Storage of a test that is full or can't be written to."""

import contextlib
import errno
import io
import os
import pathlib
import resource
from collections.abc import Iterator
from unittest import mock

FILE_BYTES = 1 << 18  # of a full disk: no file grows beyond this
UNLIMITED = resource.getrlimit(resource.RLIMIT_FSIZE)


class Disk:
    """A folder that can be made to fail, by a limit on the size of files or a file in its place."""

    def __init__(self, folder: pathlib.Path):
        self.folder = folder
        folder.mkdir(parents=True)

    def fill(self) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_BYTES, UNLIMITED[1]))

    def free(self) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, UNLIMITED)

    @contextlib.contextmanager
    def read_only(self, below: pathlib.Path) -> Iterator[None]:
        """Nothing can be written below that folder."""
        below.rename(below.with_name("aside"))
        below.touch()
        yield
        below.unlink()
        below.with_name("aside").rename(below)


@contextlib.contextmanager
def limited(path: pathlib.Path, more: int) -> Iterator[None]:
    """No file grows beyond the size of this one and so many bytes: a write is cut in the middle."""
    size = path.stat().st_size if path.exists() else 0
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + more, UNLIMITED[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, UNLIMITED)


@contextlib.contextmanager
def write_protected(folder: pathlib.Path) -> Iterator[None]:
    """Nothing is created or opened for writing below the folder, by root neither."""
    open_file, open_descriptor, make, access = io.open, os.open, os.mkdir, os.access

    def is_below(path) -> bool:
        return type(path) is not int and folder in pathlib.Path(path, "_").parents

    def check(path, is_written: bool) -> None:
        if is_written and is_below(path):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    def checked_open(path, mode="r", *args, **named):
        check(path, not set(mode).isdisjoint("wax+"))
        return open_file(path, mode, *args, **named)

    def checked_descriptor(path, flags, *args, **named):
        check(path, bool(flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)))
        return open_descriptor(path, flags, *args, **named)

    def checked_make(path, *args, **named):
        check(path, True)
        return make(path, *args, **named)

    def checked_access(path, mode):
        return not (mode & os.W_OK and is_below(path)) and access(path, mode)

    with (
        mock.patch.object(io, "open", checked_open),
        mock.patch.multiple(os, open=checked_descriptor, mkdir=checked_make, access=checked_access),
    ):
        yield
