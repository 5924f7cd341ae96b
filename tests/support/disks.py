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
    written = os.O_WRONLY | os.O_RDWR | os.O_CREAT

    def guarded(function, is_written):
        def call(path, *args, **named):
            is_below = type(path) is not int and folder in pathlib.Path(path, "_").parents
            if not (is_below and is_written(*args)):
                return function(path, *args, **named)
            if function.__name__ == "access":
                return False
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

        return call

    with contextlib.ExitStack() as stack:
        for module, name, is_written in (
            (io, "open", lambda mode="r", *_: not set(mode).isdisjoint("wax+")),
            (os, "open", lambda flags, *_: flags & written),
            (os, "mkdir", lambda *_: True),
            (os, "access", lambda mode: mode & os.W_OK),
        ):
            function = guarded(getattr(module, name), is_written)
            stack.enter_context(mock.patch.object(module, name, function))
        yield
