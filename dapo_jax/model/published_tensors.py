"""Tensors of a model folder's safetensors files by name, with MXFP4 dequantised."""

import pathlib
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from dapo_jax.data.policies import model_path
from dapo_jax.model import mxfp4
from dapo_jax.model.param_paths import TensorPart
from dapo_jax.runtime.settings import ConfigError, check_regular, read_json

DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}  # by their names in the files
OTHER_WEIGHTS = ("*.bin", "*.gguf", "*.pt", "*.pth", "*.msgpack", "*.h5")
INDEX = "model.safetensors.index.json"


def _weight_map(folder: pathlib.Path, field: str) -> Any:
    """Return the index's files by tensor, unchecked; empty without an index."""
    path = folder / INDEX
    return read_json(path, field).get("weight_map", {}) if path.exists() else {}


def weight_files(folder: pathlib.Path, field: str) -> list[pathlib.Path]:
    """Return the *.safetensors files of a folder, sorted by name.

    Raises:
        ConfigError: the folder has none, lacks one of the index, or one is no regular file.
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
    """Tensors of a folder's safetensors files by name, and problems of the files.

    Each read opens its file again: the pages of an open file stay mapped and count as memory of
    this process.
    """

    def __init__(self, folder: str | pathlib.Path, field: str = "model.folder"):
        self.named = folder
        self.problems: list[str] = []
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
        """Add a problem for each tensor that is not in the file named by the index."""
        weight_map = _weight_map(self.folder, field)
        if not isinstance(weight_map, dict):
            self.problems.append(f"{INDEX}: weight_map must be an object")
            return
        for name, file in weight_map.items():
            if name not in self._files or self._files[name].name != file:
                self.problems.append(f"{name}: not in {file}, where {INDEX} has it")

    def _join(self, name: str) -> None:
        """Replace blocks and scales of a tensor in MXFP4 by the tensor, if they fit."""
        blocks, scales = name + mxfp4.BLOCKS, name + mxfp4.SCALES
        shape = mxfp4.plain_shape(self.shapes[blocks], self.shapes.get(scales, ()))
        if shape is None or self.dtypes[blocks] != "U8" or self.dtypes[scales] != "U8":
            self.problems.append(f"{blocks}: must be U8 [X, O, G, 16], with scales [X, O, G]")
            return
        for part in (blocks, scales):
            del self.shapes[part], self.dtypes[part]
        if name in self.shapes:
            self.problems.append(f"{name}: plain and in MXFP4")
        self._packed.add(name)
        self.shapes[name], self.dtypes[name] = shape, mxfp4.HOLDS

    def read(self, name: str, *index: slice) -> np.ndarray:
        """Return a part of a tensor in the file's dtype; all of it without an index."""
        return safe_open(self._files[name], framework="numpy").get_slice(name)[index or (...,)]

    def read_expert(self, part: TensorPart, *index: slice) -> np.ndarray:
        """Return a part of an expert's matrix or vector in a fused tensor; MXFP4 as float32."""
        *rows, last = index
        expert = slice(part.expert, part.expert + 1)
        alternate = slice(part.first, None, part.step)
        columns = slice(part.step * last.start, part.step * last.stop)  # of all alternating ones
        if part.name not in self._packed:
            return self.read(part.name, expert, *rows, columns)[0][..., alternate]
        blocks, scales = (
            self.read(part.name + suffix, expert, columns)[:, alternate]
            for suffix in (mxfp4.BLOCKS, mxfp4.SCALES)
        )
        return mxfp4.dequantise(blocks, scales)[0][tuple(rows)]
