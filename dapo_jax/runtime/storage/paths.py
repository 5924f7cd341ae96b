"""Paths of local folders and of buckets (gs://...)."""

import logging
import os
import pathlib

import fsspec.config
from etils import epath

logging.getLogger("gcsfs").setLevel(logging.CRITICAL)  # it logs what it then raises
# Other processes write into the same bucket: what a listing showed before does not count.
fsspec.config.conf.setdefault("gcs", {}).setdefault("use_listings_cache", False)

Folder = pathlib.Path | epath.Path  # local, or in a bucket


def is_remote(name: str | os.PathLike) -> bool:
    """Return True for a folder in an object store. It has no locks and no renames."""
    return "://" in str(name)


def folder_at(name: str | os.PathLike, below: str = "") -> Folder:
    """Return the folder `name`, or the folder `below` in it."""
    return epath.Path(name) / below if is_remote(name) else pathlib.Path(name, below)
