"""Places of model folders: on this machine, in a bucket, or of a policy that ships with the package
(`model.folder = "dapo_jax:NAME"`)."""

import pathlib

from dapo_jax.runtime.settings import ConfigError, nearest
from dapo_jax.runtime.storage.downloads import local_folder
from dapo_jax.runtime.storage.paths import is_remote

SHIPPED = "dapo_jax:"


def model_path(
    folder: str | pathlib.Path, field: str = "model.folder", *, weights: bool = False
) -> pathlib.Path:
    """Path of a model folder on this machine, to which one of a bucket is copied first.

    Args:
        folder: a path, gs://..., or `dapo_jax:NAME`, a policy that ships with the package.
        field: the setting that names it, for the error.
        weights: without it a copy may lack the weights.

    Raises:
        ConfigError: no such policy ships (names those that do), or the bucket can't be read.
    """
    if is_remote(folder):
        return local_folder(folder, field, weights=weights)
    name = str(folder)
    if not name.startswith(SHIPPED):
        return pathlib.Path(folder)
    home = pathlib.Path(__file__).parent
    paths = {f"{SHIPPED}{path.parent.name}": path.parent for path in home.glob("*/config.json")}
    if name not in paths:
        # All names begin alike, so that little likeness says nothing.
        hint = nearest(name, paths, cutoff=0.7) or f"; there is {' and '.join(sorted(paths))}"
        raise ConfigError(f"config.{field} = {name!r}: no such policy ships with dapo_jax{hint}")
    return paths[name]
