"""Model folders: on this machine, in a bucket, or shipped with the package (`dapo_jax:NAME`)."""

import pathlib

from dapo_jax.runtime.settings import ConfigError, nearest
from dapo_jax.runtime.storage.downloads import local_folder
from dapo_jax.runtime.storage.paths import is_remote

SHIPPED = "dapo_jax:"


def model_path(
    folder: str | pathlib.Path, field: str = "model.folder", *, weights: bool = False
) -> pathlib.Path:
    """Return the local path of a model folder; a folder in a bucket is copied first.

    Args:
        field: the setting with the folder, for the error.
        weights: if False, the copy may lack the weights.

    Raises:
        ConfigError: no policy of that name ships, or the bucket cannot be read.
    """
    if is_remote(folder):
        return local_folder(folder, field, weights=weights)
    name = str(folder)
    if not name.startswith(SHIPPED):
        return pathlib.Path(folder)
    home = pathlib.Path(__file__).parent
    paths = {f"{SHIPPED}{path.parent.name}": path.parent for path in home.glob("*/config.json")}
    if name not in paths:
        # All names share a prefix, so only close matches are suggested.
        hint = nearest(name, paths, cutoff=0.7) or f"; there is {' and '.join(sorted(paths))}"
        raise ConfigError(f"config.{field} = {name!r}: no such policy ships with dapo_jax{hint}")
    return paths[name]
