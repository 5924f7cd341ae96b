"""Meshes of devices that need not be there, for layouts."""

import dataclasses

import jax
import numpy as np

from dapo_jax.config.experiment import Mesh
from dapo_jax.run.build import mesh_sizes
from dapo_jax.runtime import sharding


@dataclasses.dataclass(frozen=True)
class Chip:
    """A device that has only a name."""

    id: int
    platform: str
    process_index: int = 0


def named_mesh(settings: Mesh, platform: str, chips: int) -> jax.sharding.Mesh:
    """Return a mesh of devices that only have names. Raises `ConfigError` for a wrong product."""
    shape = sharding.mesh_shape(**mesh_sizes(settings), devices=chips)
    devices = np.empty(chips, object)
    devices[:] = [Chip(i, platform) for i in range(chips)]
    return jax.sharding.Mesh(devices.reshape(shape), sharding.AXES)
