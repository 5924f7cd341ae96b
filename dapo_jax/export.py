"""Writes the policy of a run as a model folder in the Hugging Face layout.

    python -m dapo_jax.export --run=runs/arithmetic_dapo --out=FOLDER

takes the newest checkpoint, whatever mesh it was written on, and needs no accelerator. The folder
has config.json, tokenizer and generation settings of the model that the run began with, so that
`transformers` and servers load it like that one. Flags:
"""

import pathlib
import shutil
import sys

from dapo_jax import cli
from dapo_jax.checkpoints import SavedPolicy
from dapo_jax.config import ExportConfig
from dapo_jax.model import huggingface, names
from dapo_jax.model.decoder import DecoderConfig
from dapo_jax.settings import ConfigError, require

DTYPES = ("auto", *huggingface.DTYPES.values())


def check(config: ExportConfig) -> None:
    """Raises `ConfigError` for what the settings alone can tell."""
    require(bool(config.run), "run", config.run, "the run_dir of a run")
    require(bool(config.out), "out", config.out, "the folder to write")
    require(config.dtype in DTYPES, "dtype", config.dtype, "one of " + ", ".join(DTYPES))
    require(config.step >= 0, "step", config.step, "at least 0")
    require(config.max_shard_gb > 0, "max_shard_gb", config.max_shard_gb, "above 0")
    out = pathlib.Path(config.out)
    free = not out.exists() or (out.is_dir() and not any(out.iterdir()))
    require(free, "out", config.out, "a new or empty folder")


def check_same_shapes(
    found: dict[str, tuple[int, ...]], decoder: DecoderConfig, folder: str
) -> None:
    """Raises one `ConfigError` that names every parameter that the folder's model has otherwise."""
    expected = names.param_shapes(decoder)
    wrong = [
        f"{path}: {found.get(path, 'missing')} in the run, {expected.get(path, 'unknown')} there"
        for path in sorted(found | expected)
        if found.get(path) != expected.get(path)
    ]
    if wrong:
        listed = "\n  ".join(wrong)
        raise ConfigError(f"config.model = {folder!r}: is not the model of the run:\n  {listed}")


def export(config: ExportConfig) -> pathlib.Path:
    """Writes the model folder and returns its path. Raises `ConfigError` at the door.

    The host holds one parameter's stack of layers and the tensors of one file.
    """
    check(config)
    policy = SavedPolicy(config.run, config.step)
    source, shapes = config.model or policy.settings()["model.folder"], policy.shapes()
    norms = shapes.get("frozen_layers/mlp_norm/scale", (0,))
    decoder = huggingface.read_config(source, field="model", frozen_layers=norms[0])
    check_same_shapes(shapes, decoder, source)
    dtype = huggingface.stored_dtype(source) if config.dtype == "auto" else config.dtype
    out = pathlib.Path(config.out).absolute()
    unfinished = out.with_name(out.name + ".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    leaves = ((path, policy.read(path)) for path in shapes)
    huggingface.save_weights(unfinished, leaves, decoder, dtype, config.max_shard_gb)
    huggingface.save_settings_of(source, unfinished, dtype)
    if out.exists():
        out.rmdir()
    unfinished.rename(out)
    size = sum(path.stat().st_size for path in out.glob("*.safetensors"))
    print(
        f"{config.run} step {policy.step}: {size / 1e9:.3g} GB in {dtype} written to {config.out}"
    )
    return out


def main() -> int:
    """The exit code: 0 done, 2 wrong settings."""
    config = cli.load_flags(ExportConfig, __doc__)
    return cli.guarded(lambda: export(config))


if __name__ == "__main__":
    sys.exit(main())
