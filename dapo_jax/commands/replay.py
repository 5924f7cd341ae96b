"""Recompute a skipped update, and name its rows and tokens with non-finite values.

    dapo-jax replay runs/arithmetic_dapo/skipped/step_000012_policy
    dapo-jax replay DIR --step=10      (parameters of that checkpoint)
    dapo-jax replay DIR --model=FOLDER (parameters of a model folder)

A run writes such a folder when it skips an update. The default is the latest checkpoint before the
update, or the initial model folder if there is none.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from dapo_jax.commands import command_line
from dapo_jax.config.experiment import Config, ReplayConfig
from dapo_jax.config.files import read_config
from dapo_jax.runtime.settings import ConfigError
from dapo_jax.structs import present

if TYPE_CHECKING:
    from dapo_jax.runtime.storage.paths import Folder

MAX_TOKENS = 5  # of a row to name
WEIGHTS = ("advantages", "loss_weights", "nll_weights", "returns", "value_weights")


def keep_only(batch: Any, microbatch: int, row: int, positions: Any) -> Any:
    """Return one microbatch with the weights of all but these positions of a row set to 0."""
    import numpy as np

    from dapo_jax.learner.packing import tree_index

    part = tree_index(batch, slice(microbatch, microbatch + 1))
    mask = np.zeros(part.loss_weights.shape, bool)
    mask[0, row, positions] = True
    weights = {name: getattr(part, name) for name in WEIGHTS}
    kept = {name: array for name, array in weights.items() if array is not None}
    masked = {name: np.where(mask, array, np.zeros_like(array)) for name, array in kept.items()}
    return dataclasses.replace(part, **masked)


def bisect(is_bad: Callable[[list[int]], bool], positions: list[int]) -> list[int]:
    """Return up to five positions that are bad alone; all of them if only their sum is bad."""
    if not is_bad(positions):
        return []
    middle = len(positions) // 2
    bad = []
    for half in positions[:middle], positions[middle:]:
        if middle and len(bad) < MAX_TOKENS:
            bad += bisect(is_bad, half)
    return bad[:MAX_TOKENS] or positions


def open_learner(config: Config, record: dict[str, Any], run_dir: str, step: int, model: str):
    """Return the batch's learner, its parameters, and their origin. Raises `ConfigError`."""
    import jax
    from flax.traverse_util import unflatten_dict

    from dapo_jax.model import load_huggingface
    from dapo_jax.model.trainable import choose_trained
    from dapo_jax.run.checkpointing.checkpoints import SavedPolicy, saved_steps
    from dapo_jax.run.components import load_frozen, load_trained
    from dapo_jax.run.compute import numerics, open_mesh
    from dapo_jax.run.teacher import load_teacher, open_programs
    from dapo_jax.runtime.sharding import make_mesh

    packing = config.rows()
    folder = model or config.model.folder
    try:
        mesh = open_mesh(config.mesh, packing.rows_per_microbatch)
    except ConfigError:  # the devices differ from those of the run
        mesh = make_mesh(1, 1, 1, jax.devices()[:1])
    numbers = numerics(config.compute, mesh, packing.row_tokens)
    decoder = load_huggingface.read_config(folder, **numbers)
    decoder = choose_trained(decoder, config.model.freeze_layers, config.lora)
    frozen = load_frozen(folder, decoder, mesh)
    teacher = load_teacher(config, decoder, mesh)
    programs = open_programs(config, decoder, mesh, frozen, teacher)
    is_critic = record["learner"] == "critic"
    learner = present(programs.critic, "critic") if is_critic else programs.policy
    before = [saved for saved in saved_steps(run_dir) if saved < record["step"]]
    if model or not (step or before):
        params = load_trained(folder, decoder, mesh, config.seed, config.lora.folder)
        return learner, params, folder
    saved = SavedPolicy(run_dir, step or before[-1], "critic" if is_critic else "state")
    flat = {path: saved.read(path) for path in saved.shapes()}
    params = jax.device_put(unflatten_dict(flat, sep="/"), learner.shardings.params)
    return learner, params, f"{run_dir} step {saved.step}"


def replay(folder: "Folder", step: int = 0, model: str = "") -> bool:
    """Recompute a skipped update, print non-finite values, and return True if there are none.

    Raises `ConfigError` if `folder` holds no skipped update.
    """
    import jax
    import numpy as np
    import optax

    from dapo_jax.learner.skipped_batches import read_skipped
    from dapo_jax.runtime import nonfinite
    from dapo_jax.runtime.sharding import to_host

    try:
        record, batch = read_skipped(folder)
    except OSError as error:
        raise ConfigError(f"{folder}: is no folder of a skipped update: {error}") from None
    run_dir = str(folder.parent.parent)
    config = read_config(Config, run_dir)
    learner, params, source = open_learner(config, record, run_dir, step, model)
    loss, gradient = learner.loss_and_gradient(params, batch, len(batch.loss_weights))
    norm = float(optax.tree.norm(gradient))
    print(f"{record['learner']}'s update of step {record['step']}, parameters of {source}")
    print(f"loss {float(loss):g}, gradient norm {norm:g}, rate {record['learning_rate']:g}")
    for name, tree in ("parameters", params), ("gradient", gradient), ("batch", batch):
        if problems := nonfinite.describe(tree):
            print(f"not finite in the {name}: {problems}")
    if math.isfinite(norm) and math.isfinite(loss):
        print("all finite: with these parameters the update would be taken")
        return True
    scores = to_host(learner.score(params, batch.scored.rollouts, len(batch.loss_weights)).values)
    rollouts = batch.scored.rollouts
    weights = batch.value_weights if record["learner"] == "critic" else batch.loss_weights
    weights = present(weights, "weights")
    for m, r in np.argwhere((weights > 0).any(-1)):

        def is_bad(positions: list[int], m: int = m, r: int = r) -> bool:
            loss, gradient = learner.loss_and_gradient(params, keep_only(batch, m, r, positions), 1)
            return not np.isfinite(jax.device_get([loss, optax.tree.norm(gradient)])).all()

        for t in bisect(is_bad, np.flatnonzero(weights[m, r] > 0).tolist()):
            prompt, sample = record["responses"][rollouts.response_index[m, r, t]]
            print(
                f"microbatch {m} row {r} token {t} (id {rollouts.tokens[m, r, t]}, response "
                f"{sample} to prompt {prompt}): weight {weights[m, r, t]:g}, advantage "
                f"{batch.advantages[m, r, t]:g}, score {scores[m, r, t]:g}"
            )
    return False


def main() -> int:
    """Run the command. Exit code 0: all is finite; 2: wrong arguments; 4: not finite."""

    def work(flags: ReplayConfig) -> int:
        from dapo_jax.runtime.storage.paths import folder_at

        return 0 if replay(folder_at(flags.folder), flags.step, flags.model) else 4

    name = "dapo-jax replay"
    return command_line.run(ReplayConfig, __doc__, work, single_process=name)
