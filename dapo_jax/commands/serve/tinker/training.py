"""Operations on a model: gradients, optimizer steps, its state on disk."""

import dataclasses
import os
import pathlib
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from safetensors.numpy import load_file

from dapo_jax.commands.serve.errors import RequestError
from dapo_jax.commands.serve.tinker.losses import CLIP_HIGH, CLIP_LOW, CROSS_ENTROPY, LossBatch
from dapo_jax.commands.serve.tinker.messages import forward_backward_output
from dapo_jax.commands.serve.tinker.policies import ROW_TOKENS, Policies
from dapo_jax.commands.serve.tinker.requests import AdamParams, Datum, LossRequest, ModelShape
from dapo_jax.learner.batches import TrainState
from dapo_jax.learner.packing import Segment, pack
from dapo_jax.learner.update import Learner
from dapo_jax.model import peft_adapters, save_huggingface
from dapo_jax.run.export import policy_layers
from dapo_jax.runtime.sharding import flatten, shards, to_host
from dapo_jax.structs import Completion, Prompt

MICROBATCH_TOKENS = 4096  # per gradient, padding included
NO_TOKENS = np.zeros(0, np.int32)
FIELDS = {  # of a batch, by the names of the client's inputs and options
    "advantages": "advantages",
    "ratio_mask": "sequence_ratio_mask",
    "low": CLIP_LOW,
    "high": CLIP_HIGH,
    "beta": "beta",
}
_add = jax.jit(lambda total, part: jax.tree.map(jax.numpy.add, total, part), donate_argnums=0)


@dataclasses.dataclass
class Model:
    """A model in memory.

    Attributes:
        gradient: sum of the gradients since the last optimizer step; None: there is none.
        done: number of its last request that changed it.
        unsaved: number of such requests since its state was written.
    """

    shape: ModelShape
    state: TrainState
    gradient: Any = None
    done: int = 0
    unsaved: int = 0


@dataclasses.dataclass(frozen=True)
class Packed:
    """A batch of data in rows, and where their tokens are."""

    batch: LossBatch
    microbatches: int  # that are not empty
    order: np.ndarray  # flat positions of the tokens of all data, in order

    def take(self, values: np.ndarray, data: Sequence[Datum]) -> list[np.ndarray]:
        """Return the values [n, K] of each datum from those of the rows."""
        flat = values.reshape(-1, values.shape[-1])[self.order]
        ends = np.cumsum([len(datum.tokens) for datum in data])
        parts = np.split(flat, ends[:-1])
        return [part[:, : d.targets.shape[1]] for part, d in zip(parts, data, strict=True)]


def pack_data(request: LossRequest, row_shards: int) -> Packed:
    """Pack the data of a request. The shapes depend on this request only.

    Rows are as long as the longest datum, rounded up to a power of two.
    """
    data = request.data
    longest = max(len(datum.tokens) for datum in data)
    row_tokens = max(ROW_TOKENS, 1 << (longest - 1).bit_length())
    # Few sizes of small batches, since each one is compiled.
    needed = -(-sum(len(datum.tokens) for datum in data) // row_tokens // row_shards)
    most = max(1, MICROBATCH_TOKENS // row_tokens // row_shards)
    rows = min(most, 1 << (needed - 1).bit_length()) * row_shards
    is_policy = request.loss != CROSS_ENTROPY
    segments = [
        Segment(
            Prompt(i, "", "", NO_TOKENS, "", ""),
            Completion(
                datum.tokens,
                datum.inputs["logprobs"] if is_policy else np.zeros(len(datum.tokens), np.float32),
                truncated=False,
                policy_step=0,
                text="",
            ),
            i,
        )
        for i, datum in enumerate(data)
    ]
    packed, microbatches = pack(segments, row_tokens, rows)
    index = np.asarray(packed.response_index)
    order = np.argsort(index, axis=None, kind="stable")[np.count_nonzero(index < 0) :]
    columns = 1 << (max(datum.targets.shape[1] for datum in data) - 1).bit_length()

    def place(arrays: Sequence[np.ndarray], dtype: Any) -> np.ndarray:
        """Put arrays [n, k] of data, filled up to K columns, at their places in the rows."""
        placed = np.zeros((index.size, columns), dtype)
        padded = [np.pad(array, ((0, 0), (0, columns - array.shape[1]))) for array in arrays]
        placed[order] = np.concatenate(padded)
        return placed.reshape(*index.shape, columns)

    inputs = {}
    for field, name in FIELDS.items() if is_policy else ():
        if name in request.options or name in data[0].inputs:
            default = request.options.get(name, 0.0)
            filled = (d.inputs.get(name, np.full(len(d.tokens), default)) for d in data)
            inputs[field] = place([array[:, None] for array in filled], np.float32)[..., 0]
    batch = LossBatch(
        rows=packed,
        targets=place([datum.targets for datum in data], np.int32),
        weights=place([datum.weights for datum in data], np.float32),
        loss=request.loss,
        **inputs,
    )
    return Packed(batch, microbatches, order)


def run_loss(learner: Learner, model: Model, request: LossRequest) -> bytes:
    """Run `forward` or `forward_backward`, add up the gradient, and return the response."""
    packed = pack_data(request, shards(learner.mesh, "batch"))
    params: Any = model.state.params
    batch: Any = packed.batch
    if request.forward_only:
        outputs: Any = learner.score(params, batch, packed.microbatches)
        logprobs, loss = outputs.logprobs, np.sum(to_host(outputs.losses), dtype=np.float64)
    else:
        gradient, outputs = learner.differentiate(params, batch, packed.microbatches)
        logprobs, loss = outputs.token_logprobs, outputs.means["loss"].total
        model.gradient = gradient if model.gradient is None else _add(model.gradient, gradient)
    values = packed.take(to_host(logprobs), request.data)
    shapes = [datum.shape for datum in request.data]
    return forward_backward_output(values, shapes, {"loss:sum": float(loss)})


def run_step(
    policies: Policies, model: Model, learning_rate: float, adam: AdamParams
) -> dict[str, float]:
    """Take an optimizer step with the gradient since the last one, and return its metrics."""
    if model.gradient is None:
        raise RequestError("optim_step: there is no gradient: send forward_backward first")
    step = policies.optimizer_step(model.shape, adam)
    gradient, model.gradient = model.gradient, None
    model.state, measured = step(model.state, gradient, np.float32(learning_rate))
    measured = jax.device_get(measured)
    return {name: measured[name].value() for name in ("gradient_norm", "skipped_updates")}


# --- files ----------------------------------------------------------------------------------------


def save_tree(path: pathlib.Path, tree: Any) -> None:
    """Write the arrays of a tree as one file, durably; an earlier file is replaced whole."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    tensors = {jax.tree_util.keystr(at): np.asarray(to_host(leaf)) for at, leaf in leaves}
    unfinished = path.with_suffix(".unfinished")
    save_huggingface.save_tensors(tensors, unfinished)
    flush(unfinished)
    unfinished.rename(path)
    flush(path.parent)


def flush(path: pathlib.Path) -> None:
    """Flush a file or the entries of a folder to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def load_model(path: pathlib.Path, learner: Learner, shape: ModelShape, optimizer: bool) -> Model:
    """Return a model as `save_model` wrote it; with a fresh optimizer unless `optimizer`."""
    tensors = load_file(path)
    abstract = {"state": learner.abstract_state, "gradient": learner.abstract_state.params}
    leaves, structure = jax.tree_util.tree_flatten_with_path(abstract)
    names = [jax.tree_util.keystr(at) for at, _ in leaves]
    if any(name.startswith("['state']") and name not in tensors for name in names):
        raise RequestError(f"{path.parent.name}: the model has other adapters than this one")
    arrays = [
        jax.device_put(tensors[name], leaf.sharding) if name in tensors else None
        for name, (_, leaf) in zip(names, leaves, strict=True)
    ]
    tree = jax.tree_util.tree_unflatten(structure, arrays)
    if not optimizer:
        return Model(shape, learner.start(tree["state"].params))
    has_gradient = any(name.startswith("['gradient']") for name in tensors)
    return Model(shape, tree["state"], tree["gradient"] if has_gradient else None)


def save_model(path: pathlib.Path, model: Model, with_gradient: bool) -> None:
    """Write parameters and optimizer state, and the gradient since the last step."""
    tree = {"state": model.state}
    if with_gradient and model.gradient is not None:
        tree["gradient"] = model.gradient
    save_tree(path, tree)


def save_policy(folder: pathlib.Path, policies: Policies, model: Model, merged: bool) -> None:
    """Write adapters in PEFT's format; without adapters or with `merged`, a model folder."""
    decoder = policies.decoder_of(model.shape)
    flat = flatten(model.state.params)

    def read(path: str) -> Any:
        return to_host(flat[path])

    folder.mkdir(parents=True, exist_ok=True)
    source = policies.config.model
    if model.shape.rank and not merged:
        base = pathlib.Path(source).absolute().name
        peft_adapters.save_adapters(folder, list(flat), read, decoder, base)
    else:
        layers = policy_layers(list(flat), read, decoder, source)
        save_huggingface.save_weights(folder, layers, decoder)
        save_huggingface.save_settings_of(source, folder, "float32")
    for path in folder.iterdir():
        flush(path)
    flush(folder)
