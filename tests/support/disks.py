"""Disks of a test's own, that can be full, out of names or read-only."""

import contextlib
import os
import pathlib
import resource
import subprocess
from collections.abc import Iterator

FILE_BYTES = 1 << 18  # where nothing can be mounted, no file grows beyond this


class Disk:
    """A folder whose storage can be made to fail, and mended.

    A file system in memory where this process may mount one. Elsewhere a limit on the size of any
    file stands for the full disk, and a file in the folder's place for the read-only one.
    """

    def __init__(self, folder: pathlib.Path, options: str):
        self.folder, self.options = folder, options
        folder.mkdir(parents=True, exist_ok=True)
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
        done = subprocess.run(command, capture_output=True, check=False)
        self.mounted = done.returncode == 0
        self._limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill(self) -> None:
        """Takes what is left."""
        if not self.mounted:
            resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_BYTES, self._limits[1]))
            return
        with contextlib.suppress(OSError), (self.folder / "filler").open("wb", 0) as file:
            while True:
                file.write(bytes(4096))

    def free(self) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, self._limits)
        (self.folder / "filler").unlink(missing_ok=True)

    @contextlib.contextmanager
    def read_only(self, below: pathlib.Path) -> Iterator[None]:
        """Nothing can be written; without a mount, not below that folder."""
        if self.mounted:
            subprocess.run(["mount", "-o", "remount,ro", str(self.folder)], check=True)
        else:
            below.rename(below.with_name("aside"))
            below.touch()
        try:
            yield
        finally:
            if self.mounted:
                remount = f"remount,rw,{self.options}"
                subprocess.run(["mount", "-o", remount, str(self.folder)], check=True)
            else:
                below.unlink()
                below.with_name("aside").rename(below)

    def close(self) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, self._limits)
        if self.mounted:
            subprocess.run(["umount", "-l", str(self.folder)], check=True)


@contextlib.contextmanager
def limited(path: pathlib.Path, more: int) -> Iterator[None]:
    """No file grows beyond the size of this one and so many bytes: a write is cut in the middle."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    size = os.path.getsize(path) if path.exists() else 0
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + more, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
