"""Orbax checkpoints: parameters, optimizer, and where the run is. Complete or absent."""

import os
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from flax import traverse_util

from dapo_jax import processes
from dapo_jax.experiment.combinations import READ_WHERE, is_read
from dapo_jax.experiment.config import Checkpoint, Config
from dapo_jax.experiment.settings import ConfigError, leaves, require
from dapo_jax.finite import check_state
from dapo_jax.marks import Folder, folder_at, is_remote
from dapo_jax.model.huggingface import fingerprint
from dapo_jax.prompts.templates import open_template
from dapo_jax.sharding import flatten
from dapo_jax.structs import TrainState

# Settings that may differ between the parts of a run: they change where, how fast or how loudly it
# goes on, or when it ends; never what a step computes (beyond rounding).
FREE = (
    "run_dir total_steps log. watch. checkpoint. evaluation. mesh. packing. reward.workers "
    "reward.timeout_seconds compute.remat compute.scan_unroll compute.attention "
    "compute.logprob_chunk_tokens sampler.slots sampler.burst_tokens sampler.first_window_tokens "
    "sampler.cache sampler.page_tokens sampler.pages sampler.prefill_prompts "
    "sampler.prefill_chunk_tokens "
    "sampler.load_layers optimizer.max_skipped_steps critic.optimizer.max_skipped_steps"
).split()


def _is_free(name: str) -> bool:
    """A name in `FREE` is that setting; one that ends in a point is all of a section."""
    return any(name == free or free.endswith(".") and name.startswith(free) for free in FREE)


def check_same_run(settings: dict[str, Any], saved: dict[str, Any]) -> None:
    """Raises `ConfigError` naming every setting that would make this another run.

    Args:
        settings, saved: leaves by dotted name, now and when the run began.
    """
    settings, saved = _resolved(settings), _resolved(saved)
    strict = set() if can_be_longer(settings) else {"total_steps"}
    changed = [
        f"config.{name} = {value!r}, but the run was made with {saved.get(name)!r}"
        for name, value in settings.items()
        if value != saved.get(name)
        and (name in strict or not _is_free(name))
        # What nothing reads was once accepted, whatever it said.
        and (name not in READ_WHERE or is_read(name, settings))
    ]
    if changed:
        raise ConfigError(
            "the run in config.run_dir can't go on with other settings; choose another run_dir:\n  "
            + "\n  ".join(changed)
        )


def can_be_longer(settings: dict[str, Any]) -> bool:
    """Whether `total_steps` decides only when a run ends, not what its steps compute."""
    schedules = {settings["optimizer.schedule"]}
    if settings["algorithm.critic"]:
        schedules.add(settings["critic.optimizer.schedule"])
    return schedules == {"constant"}


def _resolved(settings: dict[str, Any]) -> dict[str, Any]:
    """With the number of steps that -1 leaves to the algorithm, as runs before there was a -1."""
    rest = dict(settings)
    preset, own = rest.pop("algorithm.critic_pretrain_steps"), rest["critic.pretrain_steps"]
    return rest | {"critic.pretrain_steps": preset if own < 0 else own}


def with_defaults(settings: dict[str, Any]) -> dict[str, Any]:
    """Those of a run, with the default of every setting that is younger than it."""
    return {name: value for name, _, value in leaves(Config())} | settings


def frozen_content(folder: str) -> str:
    """The name under which settings remember what a frozen model's folder held."""
    return f"{folder} (content)"


def run_settings(config: Config, heldout_problems: int | None = None) -> dict[str, Any]:
    """What a checkpoint remembers; frozen models and a template of one's own by content.

    Args:
        heldout_problems: how many there are, where the setting leaves it open.
    """
    model, folders = config.model, {"reward.model_folder": config.reward.model_folder}
    if config.lora.rank or model.freeze_layers:
        folders["model.folder"] = model.folder
    if config.algorithm.reference:
        folders["model.reference_folder"] = model.reference_folder or model.folder
    content = {name: fingerprint(folder, name) for name, folder in folders.items() if folder}
    if digest := open_template(config.data.template).digest:
        content["data.template"] = digest
    settings = {name: value for name, _, value in leaves(config)}
    if heldout_problems is not None:
        settings["data.heldout_problems"] = heldout_problems
    return settings | {frozen_content(name): found for name, found in content.items()}


def check_frozen(settings: dict[str, Any], folder: str, field: str) -> None:
    """Raises `ConfigError` where frozen parameters of a run are not those of `folder`."""
    content = settings.get(frozen_content("model.folder"))
    allowed = f"what it was: the run trains only a part of {settings['model.folder']}"
    require(content in (None, fingerprint(folder)), field, folder, allowed)


def checkpoint_folder(run_dir: str | os.PathLike) -> Folder:
    """Absolute, as Orbax wants it; what is remote has no other name."""
    folder = folder_at(run_dir, "checkpoints")
    return folder if is_remote(run_dir) else folder.absolute()


class Checkpoints:
    """Saves and restores `TrainState` with a small JSON record beside it, on any process count.

    Every process calls every method. A context manager: leaving it closes.

    Args:
        settings: of the run that saves; left out, checkpoints are only read.
    """

    def __init__(self, run_dir: str | os.PathLike, settings: Checkpoint | None = None):
        folder = checkpoint_folder(run_dir)
        saves = settings is not None
        options = ocp.CheckpointManagerOptions(
            max_to_keep=settings.keep if saves else None,
            create=saves,
            cleanup_tmp_directories=saves,  # what a kill during a save left behind
        )
        self._folder = folder
        self._manager = ocp.CheckpointManager(folder, options=options)

    @staticmethod
    def exist(run_dir: str | os.PathLike) -> bool:
        """Whether a run has ever saved there; creates nothing."""
        return processes.from_first(checkpoint_folder(run_dir).is_dir, "whether a run has saved")

    def latest_step(self) -> int | None:
        """The step that the newest complete checkpoint goes on with; None without one."""
        return processes.from_first(self._manager.latest_step, "newest checkpoint")

    def save(self, step: int, states: dict[str, TrainState | None], record: dict[str, Any]) -> None:
        """Starts writing in the background; a step that is already there is left alone.

        Args:
            states: by entry ("state" is the policy's); None has no entry.

        Raises `NotFinite`: such a state would one day be the only one that is kept.
        """
        if step in self._manager.all_steps():
            return
        check_state(states, f"step {step} is not saved")
        entries = {name: ocp.args.StandardSave(state) for name, state in states.items() if state}
        record_args = ocp.args.JsonSave(record)
        self._manager.save(step, args=ocp.args.Composite(**entries, record=record_args))

    def record(self) -> dict[str, Any]:
        """The record of the newest checkpoint."""
        args = ocp.args.Composite(record=ocp.args.JsonRestore())
        record = self._manager.restore(self.latest_step(), args=args)["record"]
        return record | {"settings": with_defaults(record["settings"])}

    def state(self, abstract_state: TrainState, entry: str = "state") -> TrainState:
        """An entry of the newest checkpoint, on the mesh that `abstract_state` names.

        Raises `NotFinite`.
        """
        step, args = self.latest_step(), ocp.args.StandardRestore(abstract_state)
        restored = self._manager.restore(step, args=ocp.args.Composite(**{entry: args}))
        # Once somebody has moved that folder away, an older one is the newest.
        check_state({entry: restored[entry]}, str(self._folder / str(step)))
        return restored[entry]

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        if kind is None or processes.count() == 1:  # others may not be here to be waited for
            self.close()

    def wait(self) -> None:
        """Returns when everything is on disk."""
        self._manager.wait_until_finished()

    def close(self) -> None:
        """Waits until everything is on disk."""
        self.wait()
        self._manager.close()


def saved_steps(run_dir: str | os.PathLike) -> list[int]:
    """Of the complete checkpoints, in order."""
    folder = checkpoint_folder(run_dir)
    return sorted(ocp.utils.checkpoint_steps(folder)) if folder.is_dir() else []


class SavedPolicy:
    """The policy of one checkpoint, read parameter by parameter; the run may go on meanwhile.

    Args:
        step: 0 takes the newest.
        entry: of the checkpoint; a critic's is read as a policy's.

    Raises:
        ConfigError: `run_dir` (the setting `run`) has no such checkpoint.
    """

    def __init__(self, run_dir: str | os.PathLike, step: int = 0, entry: str = "state"):
        folder, steps, self._entry = checkpoint_folder(run_dir), saved_steps(run_dir), entry
        require(bool(steps), "run", str(run_dir), "the run_dir of a run that has saved")
        self.step = step or steps[-1]
        require(self.step in steps, "step", step, f"0 or one of {', '.join(map(str, steps))}")
        self._folder = epath.Path(folder / str(self.step))
        self._handler = ocp.PyTreeCheckpointHandler()

    def settings(self) -> dict[str, Any]:
        """Those of the run, by dotted name."""
        found = ocp.JsonCheckpointHandler().restore(self._folder / "record")["settings"]
        return with_defaults(found)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape by path (`layers/query/kernel`) of every parameter."""
        tree = self._handler.metadata(self._folder / self._entry).tree["params"]
        return {path: leaf.shape for path, leaf in flatten(tree).items()}

    def read(self, path: str) -> np.ndarray:
        """One parameter, whole, on the host, from whatever mesh it was written."""

        def only(value: Any) -> Any:
            return {"params": traverse_util.unflatten_dict({path: value}, sep="/")}

        args = ocp.args.PyTreeRestore(
            item=only(np.zeros(())),
            restore_args=only(ocp.RestoreArgs(restore_type=np.ndarray)),
            partial_restore=True,
        )
        found = self._handler.restore(self._folder / self._entry, args=args)["params"]
        return flatten(found)[path]
