"""Local copies of model folders that are in a bucket (gs://...)."""

import concurrent.futures
import fnmatch
import functools
import hashlib
import os
import pathlib
import shutil
from typing import Any

from etils import epath
from filelock import FileLock

from dapo_jax.runtime import processes
from dapo_jax.runtime.settings import ConfigError
from dapo_jax.runtime.storage.retries import is_refusal, reason

SMALL = ("*.json", "*.jinja", "*.txt", "*.model")  # config, tokenizer, templates
WEIGHTS = ("*.safetensors",)
AT_ONCE = 8  # files; one alone does not fill a host's network


def _sizes(folder: epath.Path) -> dict[str, tuple[int, Any]]:
    """Size in bytes and time of a bucket's files of a model, by name; the first answer stays."""
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    wanted = sorted(n for n in names if any(fnmatch.fnmatchcase(n, p) for p in SMALL + WEIGHTS))
    with concurrent.futures.ThreadPoolExecutor(AT_ONCE) as pool:
        stats = list(pool.map(lambda name: (folder / name).stat(), wanted))
    return {name: (stat.length, stat.mtime) for name, stat in zip(wanted, stats, strict=True)}


def _download(source: epath.Path, target: pathlib.Path, size: int) -> None:
    """Copies a file, whose name is there once all of it is."""
    unfinished = target.with_name(f"{target.name}.unfinished")
    source.copy(epath.Path(unfinished), overwrite=True)
    if unfinished.stat().st_size != size:
        raise OSError(f"{source}: {unfinished.stat().st_size:,} bytes of {size:,} have come")
    unfinished.replace(target)


def _complete(
    folder: epath.Path, copy: pathlib.Path, sizes: dict[str, tuple[int, Any]], field: str
) -> None:
    """Downloads the files that a copy lacks, beside other processes that do."""
    copy.mkdir(parents=True, exist_ok=True)
    with FileLock(copy.parent / "lock"):
        there = {file.name: file.stat().st_size for file in copy.iterdir()}
        missing = {name: size for name, (size, _) in sizes.items() if there.get(name) != size}
        if not missing:
            return
        total, free = sum(missing.values()), shutil.disk_usage(copy).free
        if total > free:
            raise ConfigError(
                f"config.{field} = '{folder}': its {total / 1e9:.1f} GB don't fit into {copy}, "
                f"which has {free / 1e9:.1f} GB left: XDG_CACHE_HOME may name another disk",
                field,
            )
        if processes.is_first() and total > 1e8:
            processes.print_error(f"downloading {total / 1e9:.1f} GB of {folder} to {copy}, once")
        with concurrent.futures.ThreadPoolExecutor(AT_ONCE) as pool:
            for done in [
                pool.submit(_download, folder / name, copy / name, size)
                for name, size in missing.items()
            ]:
                done.result()


@functools.cache
def _listed(name: str, field: str) -> tuple[pathlib.Path, dict[str, tuple[int, Any]]]:
    """Place of a bucket folder's copy, and its files. Every reader of a process sees the same."""
    sizes = _sizes(epath.Path(name))
    if "config.json" not in sizes:
        held = f"holds {', '.join(sizes)}" if sizes else "is no folder, or is empty"
        raise ConfigError(f"config.{field} = {name!r}: must hold a config.json; it {held}", field)
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    digest = hashlib.sha256(repr((name.rstrip("/"), sizes)).encode()).hexdigest()[:16]
    own = pathlib.PurePosixPath(name).name  # what an evaluation and a server call the model
    return pathlib.Path(cache, "dapo_jax_models", digest, own), sizes


def local_folder(
    name: str | os.PathLike, field: str = "model.folder", *, weights: bool
) -> pathlib.Path:
    """Copy of a bucket's model folder on this machine.

    A copy is in XDG_CACHE_HOME (~/.cache) under dapo_jax_models. Names, sizes and times of the
    bucket's files decide its place, so that a changed model is downloaded anew, and an interrupted
    download goes on with the file where it stopped.

    Args:
        field: the setting that names the folder, for the error.
        weights: without it only config, tokenizer and templates are sure to be there.

    Raises:
        ConfigError: the bucket has no such folder or refuses, or the disk is too small.
    """
    try:
        copy, sizes = _listed(str(name), field)
        kinds = SMALL + WEIGHTS if weights else SMALL
        wanted = {n: s for n, s in sizes.items() if any(fnmatch.fnmatchcase(n, k) for k in kinds)}
        _complete(epath.Path(name), copy, wanted, field)
    except Exception as error:
        if not is_refusal(error):
            raise
        raise ConfigError(f"config.{field} = '{name}': {reason(error)}", field) from None
    return copy
