"""Export of a run's policy as a model folder in the Hugging Face layout."""

import contextlib
import dataclasses
import functools
import os
import pathlib
from collections.abc import Callable, Collection, Iterator
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
from filelock import FileLock
from flax import traverse_util

from dapo_jax.config.experiment import ExportConfig, Lora
from dapo_jax.config.settings import check_settings
from dapo_jax.model import load_huggingface, param_paths, peft_adapters, save_huggingface
from dapo_jax.model.decoder import DecoderConfig
from dapo_jax.model.layers import ADAPTER_NAMES
from dapo_jax.model.save_huggingface import Layers
from dapo_jax.model.trainable import choose_trained, is_trained, merge, without_adapters
from dapo_jax.run import model_card
from dapo_jax.run.identity import frozen_content
from dapo_jax.run.store import checkpoint_folder, find_steps, newest_step, read_record, record_path
from dapo_jax.runtime import processes
from dapo_jax.runtime.sharding import flatten
from dapo_jax.runtime.storage.files import (
    reason,
)
from dapo_jax.runtime.storage.models import model_path
from dapo_jax.runtime.storage.output_folder import EXPORTED, MARK, check_free, replace
from dapo_jax.runtime.text_files import read_json
from dapo_jax.types.errors import ConfigError, require
from dapo_jax.types.structs import present

EXPORTS = "exported"  # in run_dir: exports of checkpoints that were used as models


class SavedPolicy:
    """Policy of one checkpoint (0: the newest), read parameter by parameter while the run goes on.

    Raises `ConfigError` if `run_dir` has no such checkpoint, or one of its files is broken.
    """

    def __init__(self, run_dir: str | os.PathLike, step: int = 0):
        steps = find_steps(run_dir)
        require(bool(steps), "run", str(run_dir), "the run_dir of a run that has saved")
        self.step = step or newest_step(run_dir, field="run") or 0
        listed = ", ".join(map(str, steps))
        require(self.step in steps, "step", step, f"0 or one of {listed}")
        self._folder = checkpoint_folder(run_dir) / str(self.step)
        self._handler = ocp.PyTreeCheckpointHandler()
        with self._naming_folder():
            self._record = read_record(self._folder)
            self._params = self._handler.metadata(self._folder / "state").tree["params"]

    @contextlib.contextmanager
    def _naming_folder(self) -> Iterator[None]:
        try:
            yield
        except ConfigError:
            raise
        except Exception as error:  # whatever Orbax raises of broken files
            raise ConfigError(
                f"{self._folder} can't be read ({reason(error)}): choose another step"
            ) from error

    def settings(self) -> dict[str, Any]:
        """Return the settings of the run, by dotted name."""
        return self._record.settings

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every parameter by its path (`layers/query/kernel`)."""
        return {path: leaf.shape for path, leaf in flatten(self._params).items()}

    def read(self, path: str) -> np.ndarray:
        """Return a whole parameter on the host, from whatever mesh it was written."""

        def only(value: Any) -> Any:
            return {"params": traverse_util.unflatten_dict({path: value}, sep="/")}

        args = ocp.args.PyTreeRestore(
            item=only(np.zeros(())),
            restore_args=only(ocp.RestoreArgs(restore_type=np.ndarray)),
            partial_restore=True,
        )
        with self._naming_folder():
            params = self._handler.restore(self._folder / "state", args=args)["params"]
        return flatten(params)[path]


def check(config: ExportConfig, kind: str = EXPORTED) -> None:
    """Raise `ConfigError` for wrong settings, or a folder that must not be written."""
    check_settings(config)
    require(bool(config.run), "run", config.run, "the run_dir of a run")
    require(bool(config.out), "out", config.out, "the folder to write")
    check_free("out", config.out, kind)
    check_names(config)


def check_frozen(settings: dict[str, Any], folder: str, field: str) -> None:
    """Raise `ConfigError` if `folder` has other frozen parameters than the run."""
    content = settings.get(frozen_content("model.folder"))
    allowed = f"unchanged: the run trains only a part of {settings['model.folder']}"
    require(content in (None, load_huggingface.fingerprint(folder)), field, folder, allowed)


def check_same_shapes(
    trained: dict[str, tuple[int, ...]], decoder: DecoderConfig, folder: str
) -> None:
    """Raise one `ConfigError` that names every parameter of another shape."""
    shapes = param_paths.param_shapes(decoder).items()
    expected = {path: shape for path, shape in shapes if is_trained(path, decoder)}
    wrong = [
        f"{path}: {trained.get(path, 'missing')} in the run, {expected.get(path, 'unknown')} there"
        for path in sorted(trained | expected)
        if trained.get(path) != expected.get(path)
    ]
    if wrong:
        listed = "\n  ".join(wrong)
        raise ConfigError(f"config.model = {folder!r}: is not the model of the run:\n  {listed}")


def policy_layers(
    trained: Collection[str], read: Callable[[str], Any], decoder: DecoderConfig, source: str
) -> Iterator[tuple[str, Layers]]:
    """Yield the layers of all parameters, adapters merged; read untrained ones from `source`."""
    base = without_adapters(decoder)
    paths = [path for path in param_paths.param_shapes(base) if path not in trained]
    for path, layer in load_huggingface.read_layers(source, paths, base):
        adapter = [path.replace("kernel", name) for name in ADAPTER_NAMES]
        if decoder.adapters and path.endswith("kernel") and adapter[0] in trained:
            down, up = (save_huggingface.layers_of(name, read(name)) for name in adapter)
            layer = functools.partial(merge, decoder.adapters, layer, down, up)
        yield path, layer
    if not decoder.adapters:
        for path in trained:
            yield path, save_huggingface.layers_of(path, read(path))


def adapter_folder(out: str) -> str:
    """Return the name of the folder beside a merged one that holds the adapters."""
    return f"{pathlib.Path(out)}.adapter"


def export(
    config: ExportConfig,
    kind: str = EXPORTED,
    add: Callable[..., Any] = model_card.write_card,
) -> pathlib.Path:
    """Write the model folder, and return its path.

    The host holds only one stacked parameter and the tensors of one file. Raises `ConfigError`.

    Args:
        kind: of the output folder.
        add: writes further files; called with folder, config, settings, step and base model.
    """
    check(config, kind)
    if pathlib.Path(config.run, peft_adapters.CONFIG).is_file():
        return _merge_adapters(config)
    policy = SavedPolicy(config.run, config.step)
    settings = policy.settings()
    source = config.model or settings["model.folder"]
    decoder = load_huggingface.read_config(source, field="model")
    names = [field.name for field in dataclasses.fields(Lora)]
    lora = {name: settings[f"lora.{name}"] for name in names if f"lora.{name}" in settings}
    decoder = choose_trained(decoder, settings["model.freeze_layers"], Lora(**lora))
    check_same_shapes(policy.shapes(), decoder, source)
    check_frozen(settings, source, "model")
    merged = config.weights == "merged"
    allowed = "'merged': the run trained no adapters"
    require(merged or bool(decoder.adapters), "weights", config.weights, allowed)
    dtype = load_huggingface.stored_dtype(source) if config.dtype == "auto" else config.dtype
    out = pathlib.Path(config.out).absolute()
    is_source = out.exists() and os.path.samefile(out, model_path(source)) and kind == EXPORTED
    allowed = "another folder than the model's, which the run needs"
    require(not is_source, "out", config.out, allowed)
    trained = policy.shapes()
    base = config.base_model or model_path(source).absolute().name
    if merged and decoder.adapters:
        with replace("out", adapter_folder(config.out), kind) as folder:
            save_huggingface.save_adapters(folder, trained, policy.read, decoder, base)
    with replace("out", config.out, kind) as folder:
        if merged:
            layers = policy_layers(trained, policy.read, decoder, source)
            save_huggingface.save_weights(folder, layers, decoder, dtype, config.max_shard_gb)
            save_huggingface.save_settings_of(source, folder, dtype)
        else:
            save_huggingface.save_adapters(folder, trained, policy.read, decoder, base)
        add(folder, config, settings, policy.step, base)
    size = sum(path.stat().st_size for path in out.glob("*.safetensors"))
    if kind == EXPORTED:
        line = f"{config.run} step {policy.step}: {size / 1e9:.3g} GB in"
        print(f"{line} {dtype if merged else 'float32'} written to {config.out}")
    return out


def _merge_adapters(config: ExportConfig) -> pathlib.Path:
    """Write the model folder `config.model` with the adapters of a PEFT folder merged into it."""
    source = config.model
    require(bool(source), "model", source, "the folder of the model that RUN adapts")
    weights = config.weights
    require(weights == "merged", "weights", weights, "'merged' with a folder of adapters")
    decoder = load_huggingface.read_config(source, field="model")
    lora = Lora(**peft_adapters.read_settings(config.run, decoder))
    decoder = choose_trained(decoder, 0.0, lora)
    adapters = peft_adapters.read_adapters(config.run, decoder)
    dtype = load_huggingface.stored_dtype(source) if config.dtype == "auto" else config.dtype
    with replace("out", config.out, EXPORTED) as folder:
        layers = policy_layers(adapters, adapters.__getitem__, decoder, source)
        save_huggingface.save_weights(folder, layers, decoder, dtype, config.max_shard_gb)
        save_huggingface.save_settings_of(source, folder, dtype)
    print(f"{config.run}: merged into {source}, written to {config.out}")
    return pathlib.Path(config.out).absolute()


def newest_export(folder: str, field: str) -> str:
    """Return the model folder of a run's newest checkpoint; other folders as they are.

    The export is made once, in run_dir/exported. Every process calls it. Raises `ConfigError` that
    says what to run.
    """
    settings = pathlib.Path(folder, "config.json")
    if not (settings.is_file() and load_huggingface.is_settings(read_json(settings, field))):
        return folder
    step = newest_step(folder, field=field)
    require(step is not None, field, folder, "a model folder, or a run that has saved")
    exports = pathlib.Path(folder, EXPORTS)
    out = exports / f"{pathlib.Path(folder).resolve().name}-step{step}"
    saved = pathlib.Path(record_path(folder, present(step, "step")))

    def is_exported() -> bool:
        mark = out / MARK
        return mark.exists() and mark.stat().st_mtime_ns >= saved.stat().st_mtime_ns

    if processes.broadcast_from_host0(is_exported, "export of a run"):
        return str(out)
    try:
        if processes.count() > 1:
            raise ConfigError("only one process can export it")
        exports.mkdir(exist_ok=True)
        with FileLock(exports / "lock"):
            if not is_exported():  # another process may have made it meanwhile
                export(ExportConfig(run=folder, out=str(out), step=present(step, "step")))
    except (ConfigError, OSError) as error:
        command = load_huggingface.export_command(folder)
        problem = f"can't export the run into its folder ({error}); export it first: {command}"
        raise ConfigError(f"config.{field} = {folder!r}: {problem}", field) from None
    return str(out)


def check_names(config: ExportConfig) -> None:
    """Raise `ConfigError` for names that a hub rejects, without a request."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    for field in ("base_model", "datasets"):
        value = getattr(config, field)
        for name in value.split(",") if field == "datasets" else [value]:
            try:
                validate_repo_id(name or "empty")
            except HFValidationError as error:
                reason = " ".join(str(error).split())
                require(False, field, value, f"OWNER/NAME; {reason}")
    plain = config.license.replace("-", "").replace(".", "")
    fits = not plain or plain.isalnum() and plain.islower() and plain.isascii()
    require(fits, "license", config.license, "an identifier such as apache-2.0")
