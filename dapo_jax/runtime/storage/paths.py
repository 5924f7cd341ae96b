"""Paths of local folders and of buckets (gs://...)."""

import os
import pathlib

from etils import epath

Folder = pathlib.Path | epath.Path  # local, or in a bucket


def is_remote(name: str | os.PathLike) -> bool:
    """Return True for a folder in an object store. It has no locks and no renames."""
    return "://" in str(name)


def folder_at(name: str | os.PathLike, below: str = "") -> Folder:
    """Return the folder `name`, or the folder `below` in it."""
    return epath.Path(name) / below if is_remote(name) else pathlib.Path(name, below)
