"""The models of Tinker's API: gradients, optimizer steps, checkpoints, and their state on disk."""

import collections
import dataclasses
import json
import pathlib
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from etils import epath
from safetensors.numpy import load_file, save

from dapo_jax.extras.serve.fields import RequestError, need, read_fields
from dapo_jax.extras.tinker import requests
from dapo_jax.extras.tinker.losses import LossBatch
from dapo_jax.extras.tinker.messages import pb
from dapo_jax.extras.tinker.policies import ROW_TOKENS, Policies
from dapo_jax.extras.tinker.store import CHANGES, Entry, Request, State, Store
from dapo_jax.learner.batches import TrainState
from dapo_jax.learner.packing import Segment, pack, place_tokens, take_tokens
from dapo_jax.learner.update import Learner
from dapo_jax.model import save_huggingface
from dapo_jax.run.export import policy_layers
from dapo_jax.runtime.sharding import flatten, shards, to_host
from dapo_jax.runtime.storage.files import replacing
from dapo_jax.runtime.storage.output_folder import EXPORTED, replace
from dapo_jax.types.structs import Completion, Prompt, present

MICROBATCH_TOKENS = 4096  # per gradient, padding included
SAVE_EVERY = 32  # requests that change a model, which a restart may run again
KEPT_UNNAMED = 8  # newest unnamed weights for sampling of a model
STATE_FILE = "state.safetensors"
CHECKPOINT_KINDS = {"save_weights": "weights", "save_weights_for_sampler": "sampler_weights"}
_add = jax.jit(lambda total, part: jax.tree.map(jax.numpy.add, total, part), donate_argnums=0)


@dataclasses.dataclass
class Model:
    """A model in memory.

    Attributes:
        gradient: sum of the gradients since the last optimizer step; None: there is none.
        done: number of its last request that changed it.
        unsaved: number of such requests since its state was written.
    """

    shape: requests.ModelShape
    state: TrainState
    gradient: Any = None
    done: int = 0
    unsaved: int = 0


def pack_data(data: Sequence[requests.Datum], loss: str, row_shards: int) -> tuple[LossBatch, int]:
    """Pack the data of a request; return the rows, and the microbatches that are not empty.

    The shapes depend on this request only. Rows are as long as the longest datum, rounded up to a
    power of two.
    """
    longest = max(len(datum.tokens) for datum in data)
    row_tokens = max(ROW_TOKENS, 1 << (longest - 1).bit_length())
    # Few sizes of small batches, since each one is compiled.
    needed = -(-sum(len(datum.tokens) for datum in data) // row_tokens // row_shards)
    most = max(1, MICROBATCH_TOKENS // row_tokens // row_shards)
    rows = min(most, 1 << (needed - 1).bit_length()) * row_shards
    segments = []
    for number, datum in enumerate(data):
        none = np.zeros(len(datum.tokens), np.float32)  # log-probs are inputs of the loss here
        response = Completion(datum.tokens, none, truncated=False, policy_step=0, text="")
        segments.append(Segment(Prompt(number, "", "", datum.tokens[:0], "", ""), response, number))
    packed, microbatches = pack(segments, row_tokens, rows)
    columns = 1 << (max(datum.columns for datum in data) - 1).bit_length()
    inputs = {}
    for name, first in data[0].inputs.items():
        # Inputs [n, k] of all data, filled up to K columns, at their places in the rows.
        padded = [np.pad(d.inputs[name], ((0, 0), (0, columns - d.columns))) for d in data]
        placed = place_tokens(padded, np.asarray(packed.response_index))
        inputs[name] = placed.astype(first.dtype)
    return LossBatch(packed, inputs, loss), microbatches


def run_loss(learner: Learner, model: Model, request: requests.LossRequest) -> bytes:
    """Run `forward` or `forward_backward`, add up the gradient, and return the response."""
    packed, microbatches = pack_data(request.data, request.loss, shards(learner.mesh, "batch"))
    params: Any = model.state.params
    batch: Any = packed
    if request.forward_only:
        scores: Any = learner.score(params, batch, microbatches)
        logprobs, loss = scores[0], np.sum(to_host(scores[1]), dtype=np.float64)
    else:
        gradient, outputs = learner.differentiate(params, batch, microbatches)
        logprobs, loss = outputs.token_logprobs, outputs.means["loss"].total
        model.gradient = gradient if model.gradient is None else _add(model.gradient, gradient)
    output = pb.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord")
    output.metrics["loss:sum"] = float(loss)
    values = take_tokens(to_host(logprobs), np.asarray(packed.rows.response_index))
    for datum, part in zip(request.data, values, strict=True):
        record = output.loss_fn_outputs.add(type_tag="ArrayRecord", num_datums=1)
        tensor = record.fields["logprobs"]
        tensor.data = part[:, : datum.columns].astype(np.float32).tobytes()
        tensor.offsets = np.array([0, len(tensor.data)], np.int64).tobytes()
        tensor.dtype = pb.DTYPE_FLOAT32
        tensor.trailing_shape.extend(datum.shape[1:])
    return output.SerializeToString()


def run_step(policies: Policies, model: Model, adam: requests.AdamParams) -> dict[str, float]:
    """Take an optimizer step with the gradient since the last one, and return its metrics."""
    if model.gradient is None:
        raise RequestError("optim_step: there is no gradient: send forward_backward first")
    constant: Any = adam.model_copy(update={"learning_rate": 0.0})  # frozen, so hashable
    step = policies.optimizer_step(model.shape, constant)
    gradient, model.gradient = model.gradient, None
    model.state, measured = step(model.state, gradient, np.float32(adam.learning_rate))
    measured = jax.device_get(measured)
    return {name: measured[name].value() for name in ("gradient_norm", "skipped_updates")}


# --- files ----------------------------------------------------------------------------------------


def save_model(path: pathlib.Path, model: Model) -> None:
    """Write parameters, optimizer state, and the gradient since the last step, durably."""
    tree = {"state": model.state, "gradient": model.gradient}
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    with replacing(epath.Path(path)) as file:
        file.write(save({jax.tree_util.keystr(at): to_host(leaf) for at, leaf in leaves}))


def load_model(
    path: pathlib.Path, learner: Learner, shape: requests.ModelShape, optimizer: bool
) -> Model:
    """Return a model as `save_model` wrote it, or only its parameters, with a new optimizer."""
    tensors = load_file(path)

    def load(at: Any, leaf: Any) -> Any:
        values = tensors.get(jax.tree_util.keystr(at))
        return None if values is None else jax.device_put(values, leaf.sharding)

    abstract = {"state": learner.abstract_state, "gradient": learner.abstract_state.params}
    tree = jax.tree_util.tree_map_with_path(load, abstract)
    if not optimizer:
        return Model(shape, learner.start(tree["state"].params))
    gradient = tree["gradient"] if jax.tree.leaves(tree["gradient"]) else None
    return Model(shape, tree["state"], gradient)


def save_policy(folder: pathlib.Path, policies: Policies, model: Model) -> None:
    """Write adapters in PEFT's format; without adapters, a model folder."""
    decoder, source = policies.decoder_of(model.shape), policies.config.model
    flat = flatten(to_host(model.state.params))
    if model.shape.rank:
        base = pathlib.Path(source).absolute().name
        save_huggingface.save_adapters(folder, list(flat), flat.__getitem__, decoder, base)
    else:
        layers = policy_layers(list(flat), flat.__getitem__, decoder, source)
        save_huggingface.save_weights(folder, layers, decoder)
        save_huggingface.save_settings_of(source, folder, "float32")


def shape_of(entry: Entry) -> requests.ModelShape:
    """Return the trained parameters of a model or checkpoint from its entry."""
    return requests.ModelShape(entry.fields["rank"], tuple(entry.fields["targets"]))


def find_checkpoint(store: Store, path: str, kind: str) -> Entry:
    """Return a checkpoint of a kind. Raise `RequestError` if there is none."""
    entry = store.get("checkpoint", path)
    fits = entry is not None and entry.fields["kind"] == kind
    need(fits, "path", path, f"the path of a checkpoint: tinker://MODEL/{kind}/NAME")
    return present(entry, "checkpoint")


class Operations:
    """The models; the most recently used are in memory. One thread calls it.

    A request that runs again after a restart has the same effect: its entries, files and bits are
    the same.
    """

    def __init__(self, policies: Policies, store: Store):
        self._policies, self._store = policies, store
        self._models: collections.OrderedDict[str, Model] = collections.OrderedDict()

    def run(self, request: Request) -> None:
        """Run a request, and store its result."""
        most = self._policies.config.tinker_models
        if request.owner not in self._models and len(self._models) >= most:
            self._save(oldest := next(iter(self._models)))
            self.discard(oldest)
        model, result = self._apply(request, self._models.get(request.owner))
        self._store.finish(request, *result)
        self._models[request.owner] = model
        self._models.move_to_end(request.owner)
        if model.unsaved >= SAVE_EVERY:
            self._save(request.owner)

    def discard(self, model_id: str) -> None:
        """Forget a model in memory; its files and requests have its state."""
        self._models.pop(model_id, None)

    def close(self) -> None:
        """Write the models in memory."""
        for model_id in self._models:
            self._save(model_id)

    def _apply(self, request: Request, model: Any) -> tuple[Model, tuple[State, bytes]]:
        """Run a request; return the model after it, and the result. None: read the model first."""
        policies, kind = self._policies, request.kind
        content = self._store.body(request)
        if not (model or kind in ("create_model", "load_weights")):
            model = self._models[request.owner] = self._open(request.owner)
        if kind in ("forward", "forward_backward"):
            loss = requests.read_loss_request(content, policies.model)
            result = State.DONE, run_loss(policies.learner(model.shape), model, loss)
        else:
            body, fields = read_fields(requests.Body, content), {"type": kind}
            if kind == "create_model":
                model = self._create(request, body)
                fields |= {"model_id": request.owner}
            elif kind == "load_weights":
                model = self._load_weights(request, body)
                fields |= {"path": body.path, "model_id": request.owner}
            elif kind == "optim_step":
                fields |= {"metrics": run_step(policies, model, body.adam_params)}
            else:
                fields |= self._save_weights(request, body, model)
            result = State.ANSWERED, json.dumps(fields).encode()
        if kind in CHANGES:
            model.done = request.number
            model.unsaved += 1
        return model, result

    # --- models -----------------------------------------------------------------------------------

    def _create(self, request: Request, body: requests.Body) -> Model:
        policies, lora = self._policies, body.lora_config
        shape, seed = lora.shape(), lora.seed
        if seed is None:  # it depends on the number of the model in its session
            seed = policies.config.seed + int(request.owner.rpartition(":")[2])
        model = Model(shape, policies.learner(shape).start(policies.first_params(shape, seed)))
        self._put_model(request.owner, shape, body)
        return model

    def _load_weights(self, request: Request, body: requests.Body) -> Model:
        path = body.path
        shape = shape_of(find_checkpoint(self._store, path, "weights"))
        described = self._store.get("model", request.owner)
        expected = shape if described is None else shape_of(described)
        need(shape == expected, "path", path, f"a checkpoint of a model with {expected}")
        file = self._store.checkpoint_folder(path) / STATE_FILE
        model = load_model(file, self._policies.learner(shape), shape, body.optimizer)
        # The checkpoint may be removed before this request would run again.
        save_model(self._store.model_file(request.owner, request.number), model)
        if described is None:
            self._put_model(request.owner, shape, body)
        return model

    def _put_model(self, model_id: str, shape: requests.ModelShape, body: requests.Body) -> None:
        described = shape._asdict() | {"user_metadata": body.user_metadata}
        self._store.put("model", model_id, described)

    def _save(self, model_id: str) -> None:
        """Write a model, and delete the requests that its state contains."""
        model = self._models[model_id]
        if model.unsaved:
            path = self._store.model_file(model_id, model.done)
            save_model(path, model)
            self._store.forget_bodies(model_id, model.done)
            for other in set(path.parent.glob("*.safetensors")) - {path}:
                other.unlink()
            model.unsaved = 0

    def _open(self, model_id: str) -> Model:
        """Read a model's file, and run the requests after it again."""
        last = self._store.last_number(model_id)
        files = self._store.model_file(model_id, 0).parent.glob("*.safetensors")
        # A file of a request without a result was written just before a kill.
        saved = max((int(path.stem) for path in files if int(path.stem) <= last), default=-1)
        model = None
        if saved >= 0:
            shape = shape_of(present(self._store.get("model", model_id), "the model"))
            path = self._store.model_file(model_id, saved)
            model = load_model(path, self._policies.learner(shape), shape, optimizer=True)
            model.done = saved
        for request in self._store.changes(model_id, saved):
            model, _ = self._apply(request, model)
        return present(model, "the model")

    # --- checkpoints ------------------------------------------------------------------------------

    def _save_weights(self, request: Request, body: requests.Body, model: Model) -> dict[str, Any]:
        """Write a checkpoint: a state to load, or weights for sampling. Return the answer."""
        kind, name = CHECKPOINT_KINDS[request.kind], body.path
        fits = not name or requests.is_name(name) is not None
        need(fits, "path", name, "letters, digits, _, -, . or :")
        path = f"tinker://{request.owner}/{kind}/{name or f'unnamed-{request.number}'}"
        known = self._store.get("checkpoint", path)
        may_overwrite = kind == "weights" and body.overwrite
        fits = known is None or may_overwrite or known.fields["request"] == request.id
        need(fits, "path", name, "a new name; weights may also overwrite")
        folder = self._store.checkpoint_folder(path)
        folder.parent.mkdir(parents=True, exist_ok=True)
        with replace("path", str(folder), EXPORTED) as new:
            if kind == "weights":
                save_model(new / STATE_FILE, dataclasses.replace(model, gradient=None))
            else:
                save_policy(new, self._policies, model)
        described = model.shape._asdict() | {
            "kind": kind,
            "named": bool(name),
            "request": request.id,
            "expires": body.ttl_seconds and time.time() + body.ttl_seconds,
            "size": sum(file.stat().st_size for file in folder.iterdir()),
            "user_metadata": body.user_metadata,
        }
        self._store.put("checkpoint", path, described, request.owner)
        if name or "sampling_session_seq_id" not in body.model_fields_set:
            return {"path": path}
        number = body.sampling_session_seq_id
        sampler = f"{request.owner.partition(':')[0]}:sample:{number}"
        self._store.put("sampler", sampler, {"path": path, "number": number})
        # Only the newest unnamed weights stay.
        entries = self._store.entries("checkpoint", request.owner)
        for entry in [entry for entry in entries if not entry.fields["named"]][KEPT_UNNAMED:]:
            self._store.remove_checkpoint(entry.id)
        return {"sampling_session_id": sampler}
