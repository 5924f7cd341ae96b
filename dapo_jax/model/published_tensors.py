"""Tensors of a model folder's safetensors files by name, those in MXFP4 as if they were plain."""

import pathlib
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from dapo_jax.data.policies import model_path
from dapo_jax.model import mxfp4
from dapo_jax.model.weight_names import Part
from dapo_jax.runtime.settings import ConfigError, check_regular, read_json

DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}  # by their names in the files
OTHER_WEIGHTS = ("*.bin", "*.gguf", "*.pt", "*.pth", "*.msgpack", "*.h5")
INDEX = "model.safetensors.index.json"


def _weight_map(folder: pathlib.Path, field: str) -> Any:
    """Files by tensor that the index names, as it is written; empty without an index."""
    path = folder / INDEX
    return read_json(path, field).get("weight_map", {}) if path.exists() else {}


def weight_files(folder: pathlib.Path, field: str) -> list[pathlib.Path]:
    """The *.safetensors files of a folder, by name.

    Raises:
        ConfigError: there are none, one that the index names is missing, or one is no file.
    """
    paths = sorted(folder.glob("*.safetensors"))
    named = f"config.{field} = {str(folder)!r}"
    if not paths:
        others = [path.name for ending in OTHER_WEIGHTS for path in sorted(folder.glob(ending))]
        beside = f" and can't read {others[0]}: save it as safetensors" if others else ""
        raise ConfigError(f"{named}: has no *.safetensors file{beside}", field)
    weight_map = _weight_map(folder, field)
    files = set(map(str, weight_map.values())) if isinstance(weight_map, dict) else set()
    if missing := sorted(files - {path.name for path in paths}):
        many = f" and {len(missing) - 1:,} more" * (len(missing) > 1)
        raise ConfigError(f"{named}: lacks {missing[0]}{many}, which {INDEX} names", field)
    for path in paths:
        try:
            check_regular(path)
        except OSError as error:
            raise ConfigError(f"config.{field}: {path} can't be read: {error}", field) from None
    return paths


class Tensors:
    """Tensors of a folder's safetensors files by name, and the problems found in the files.

    Each read opens its file anew: the pages of an open one stay mapped, and count as memory of
    this process.
    """

    def __init__(self, folder: str | pathlib.Path, field: str = "model.folder"):
        self.named, self.problems = folder, []
        self.folder = model_path(folder, field, weights=True)
        self._files: dict[str, pathlib.Path] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, str] = {}
        paths = weight_files(self.folder, field)
        for path in paths:
            self._open(path)
        self._check_index(field)
        self._packed: set[str] = set()
        for name in [name for name in self.shapes if name.endswith(mxfp4.BLOCKS)]:
            self._join(name.removesuffix(mxfp4.BLOCKS))

    def _open(self, path: pathlib.Path) -> None:
        try:
            file = safe_open(path, framework="numpy")
        except (SafetensorError, OSError) as error:
            self.problems.append(f"{path.name}: {error}")
            return
        for name in file.keys():
            if name in self._files:
                self.problems.append(f"{name}: in {self._files[name].name} and in {path.name}")
            part = file.get_slice(name)
            self._files[name], self.shapes[name] = path, tuple(part.get_shape())
            self.dtypes[name] = part.get_dtype()

    def _check_index(self, field: str) -> None:
        """Adds a problem for every tensor that is not in the file that the index names."""
        weight_map = _weight_map(self.folder, field)
        if not isinstance(weight_map, dict):
            self.problems.append(f"{INDEX}: weight_map must be an object")
            return
        for name, file in weight_map.items():
            if name not in self._files or self._files[name].name != file:
                self.problems.append(f"{name}: not in {file}, where {INDEX} has it")

    def _join(self, name: str) -> None:
        """Blocks and scales of a tensor in MXFP4 become the tensor, where they fit each other."""
        both = [name + mxfp4.BLOCKS, name + mxfp4.SCALES]
        shape = mxfp4.plain_shape(*(self.shapes.get(one, ()) for one in both))
        if shape is None or any(self.dtypes[one] != "U8" for one in both):
            self.problems.append(f"{both[0]}: must be U8 [X, O, G, 16], with scales [X, O, G]")
            return
        for one in both:
            del self.shapes[one], self.dtypes[one]
        if name in self.shapes:
            self.problems.append(f"{name}: plain and in MXFP4")
        self._packed.add(name)
        self.shapes[name], self.dtypes[name] = shape, mxfp4.HOLDS

    def read(self, name: str, *index: slice) -> np.ndarray:
        """Part of a tensor, in the file's dtype; all of it without an index."""
        return safe_open(self._files[name], framework="numpy").get_slice(name)[index or (...,)]

    def read_expert(self, place: Part, *index: slice) -> np.ndarray:
        """Part of an expert's matrix or vector in a fused tensor; of one in MXFP4 float32.

        Args:
            index: slices with a start and an end, without a step.
        """
        *rows, last = index
        one, own = (slice(place.expert, place.expert + 1), slice(place.first, None, place.step))
        all_in_turn = slice(place.step * last.start, place.step * last.stop)
        if place.name not in self._packed:
            return self.read(place.name, one, *rows, all_in_turn)[0][..., own]
        both = (place.name + ending for ending in (mxfp4.BLOCKS, mxfp4.SCALES))
        blocks, scales = (self.read(name, one, all_in_turn)[:, own] for name in both)
        return mxfp4.plain(blocks, scales)[0][tuple(rows)]
