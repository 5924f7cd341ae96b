"""Published shapes of models, from their config.json on huggingface.co; of Gemma, the text part."""

import importlib.resources
import json
import pathlib
import re
from typing import Any

from dapo_jax.model import load_huggingface
from dapo_jax.model.config_json import decoder_from_json
from dapo_jax.model.decoder import DecoderConfig
from dapo_jax.runtime.storage.files import is_remote
from dapo_jax.runtime.storage.models import model_path
from dapo_jax.types.errors import ConfigError, nearest

_SHAPES: dict[str, dict[str, Any]] = json.loads(
    (importlib.resources.files("dapo_jax.extras.plan") / "published_shapes.json").read_text()
)
NAMES = tuple(_SHAPES)
# Parts of a name that do not change the shape: Qwen2.5-Math-7B, Meta-Llama-3.1-8B-Instruct.
_VERSIONS = re.compile(r"^meta-|-(math|coder|instruct|base|think|it)(?=-|$)", re.IGNORECASE)


def config_values(model: str) -> dict[str, Any] | None:
    """Return the config.json values of a published model, or of a path that ends in its name.

    None if the model is unknown.
    """
    name = _VERSIONS.sub("", pathlib.PurePath(model).name)
    known = {model.lower(): model for model in NAMES}.get(name.lower())
    return _SHAPES[known].copy() if known else None


def read_shape(model: str, **numerics: Any) -> DecoderConfig:
    """Return the decoder of a folder with a config.json, or of a published model.

    Raises `ConfigError`, with the nearest names, if it is neither.
    """
    values = config_values(model)
    # A plan does not download the config.json of a published model.
    published = values is not None and is_remote(model)
    if not published and (model_path(model) / "config.json").exists():
        return load_huggingface.read_config(model, **numerics)
    if values is None:
        hint = nearest(pathlib.PurePath(model).name, NAMES, cutoff=0.3)
        allowed = f"a folder with a config.json, or one of {', '.join(NAMES)}{hint}"
        raise ConfigError(f"config.model.folder = {model!r}: must be {allowed}")
    return decoder_from_json(values, model, "model.folder", **numerics)
