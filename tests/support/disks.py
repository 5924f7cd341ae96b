"""Storage of a test that is full or can't be written to."""

import contextlib
import pathlib
import resource
from collections.abc import Iterator

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
