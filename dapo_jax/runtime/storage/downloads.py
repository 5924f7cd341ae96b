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
from dapo_jax.runtime.storage.files import is_refusal, reason
from dapo_jax.types.errors import ConfigError

SMALL = ("*.json", "*.jinja", "*.txt", "*.model")  # config, tokenizer, templates
WEIGHTS = ("*.safetensors",)
MORE_TEMPLATES = "additional_chat_templates"  # a folder in the folder
MAX_PARALLEL = 8  # files; a single one does not use a host's bandwidth
Stats = dict[str, tuple[int, Any]]  # size in bytes and time of files, by name


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _download(source: epath.Path, target: pathlib.Path, size: int) -> None:
    """Copy a file, and give it its name once it is complete."""
    target.parent.mkdir(exist_ok=True)
    unfinished = target.with_name(f"{target.name}.unfinished")
    source.copy(epath.Path(unfinished), overwrite=True)
    if unfinished.stat().st_size != size:
        raise OSError(f"{source}: received {unfinished.stat().st_size:,} bytes of {size:,}")
    unfinished.replace(target)


def _complete(folder: epath.Path, copy: pathlib.Path, stats: Stats, field: str) -> None:
    """Download the files that a copy lacks; other processes wait."""
    copy.mkdir(parents=True, exist_ok=True)
    with FileLock(copy.parent / "lock"):
        local = {name: (copy / name).stat().st_size for name in stats if (copy / name).exists()}
        missing = {name: size for name, (size, _) in stats.items() if local.get(name) != size}
        total, free = sum(missing.values()), shutil.disk_usage(copy).free
        if total > free:
            raise ConfigError(
                f"config.{field} = '{folder}': its {total / 1e9:.1f} GB don't fit into {copy}, "
                f"which has {free / 1e9:.1f} GB left: set XDG_CACHE_HOME to another disk",
                field,
            )
        if processes.is_first() and total > 1e8:
            processes.print_error(f"downloading {total / 1e9:.1f} GB of {folder} to {copy}, once")
        with concurrent.futures.ThreadPoolExecutor(MAX_PARALLEL) as pool:
            targets = [copy / name for name in missing]
            list(pool.map(_download, map(folder.joinpath, missing), targets, missing.values()))


def cached_model(source: Any, name: str) -> pathlib.Path:
    """Return the folder of a model in the cache; `source` decides what it holds."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    digest = hashlib.sha256(repr(source).encode()).hexdigest()[:16]
    return pathlib.Path(cache, "dapo_jax_models", digest, name)


@functools.cache
def _locate(name: str, field: str) -> tuple[pathlib.Path, Stats]:
    """Return the path of a bucket folder's copy, and its files; the same in a whole process."""
    folder = epath.Path(name)
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    if MORE_TEMPLATES in names:
        names += [f"{MORE_TEMPLATES}/{path.name}" for path in (folder / MORE_TEMPLATES).iterdir()]
    names = sorted(name for name in names if _matches(name, SMALL + WEIGHTS))
    with concurrent.futures.ThreadPoolExecutor(MAX_PARALLEL) as pool:
        sizes = zip(names, pool.map(lambda name: (folder / name).stat(), names), strict=True)
        stats = {name: (stat.length, stat.mtime) for name, stat in sizes}
    if "config.json" not in stats:
        content = f"holds {', '.join(stats)}" if stats else "is not a folder, or is empty"
        text = f"config.{field} = {name!r}: must hold a config.json; it {content}"
        raise ConfigError(text, field)
    model = pathlib.PurePosixPath(name).name  # evaluations and servers show this name
    return cached_model((name.rstrip("/"), stats), model), stats


def local_folder(
    name: str | os.PathLike, field: str = "model.folder", *, weights: bool
) -> pathlib.Path:
    """Return the copy of a bucket's model folder on this machine.

    Copies are in XDG_CACHE_HOME (~/.cache) under dapo_jax_models. Names, sizes and times of the
    bucket's files decide their path, so a changed model is downloaded again. An interrupted
    download resumes with the file at which it stopped.
    """
    try:
        copy, stats = _locate(str(name), field)
        patterns = SMALL + WEIGHTS if weights else SMALL
        chosen = {file: stat for file, stat in stats.items() if _matches(file, patterns)}
        _complete(epath.Path(name), copy, chosen, field)
    except Exception as error:
        if not is_refusal(error):
            raise
        raise ConfigError(f"config.{field} = '{name}': {reason(error)}", field) from None
    return copy
