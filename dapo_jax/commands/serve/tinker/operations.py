"""The requests of models: each changes a model in memory, or writes one of its checkpoints."""

import collections
import functools
import json
import time
from collections.abc import Callable
from typing import Any

from dapo_jax.commands.serve.tinker.policies import Policies
from dapo_jax.commands.serve.tinker.requests import (
    CREATE,
    LOAD,
    SAVE,
    ModelShape,
    need,
    read,
    read_adam,
    read_loss_request,
    read_shape,
)
from dapo_jax.commands.serve.tinker.store import CHANGES, Entry, Request, State, Store
from dapo_jax.commands.serve.tinker.training import (
    Model,
    load_model,
    run_loss,
    run_step,
    save_model,
    save_policy,
)
from dapo_jax.structs import present

SAVE_EVERY = 32  # requests that change a model, which a restart may run again
KEPT_UNNAMED = 8  # newest unnamed weights for sampling of a model
STATE_FILE = "state.safetensors"
CHECKPOINT_KINDS = {  # by the request that writes them
    "save_weights": "weights",
    "save_weights_for_sampler": "sampler_weights",
    "save_weights_external": "external_weights",
}
Result = tuple[State, bytes]


def _answer(**fields: Any) -> Result:
    return State.ANSWERED, json.dumps(fields).encode()


def shape_of(entry: Entry) -> ModelShape:
    """Return the trained parameters of a model or checkpoint from its entry."""
    return ModelShape(entry.fields["rank"], tuple(entry.fields["targets"]))


def find_checkpoint(store: Store, path: str, kind: str) -> Entry:
    """Return a checkpoint of a kind. Raise `RequestError` if there is none."""
    entry = store.get("checkpoint", path)
    fits = entry is not None and entry.fields["kind"] == kind
    need(fits, "path", path, f"the path of a checkpoint: tinker://MODEL/{kind}/NAME")
    return present(entry, "checkpoint")


class Operations:
    """The models, of which the most recently used are in memory; one thread calls it."""

    def __init__(self, policies: Policies, store: Store):
        self._policies = policies
        self._store = store
        self._models: collections.OrderedDict[str, Model] = collections.OrderedDict()

    def run(self, request: Request) -> None:
        """Run a request, and store its result together with the entries that it adds."""
        body = self._store.body(request.id)
        writes: list[Callable[[], None]] = []
        if request.kind in CHECKPOINT_KINDS:
            result = self._save_weights(request, body, writes)
        else:
            makes = request.kind in ("create_model", "load_weights")
            model = None if makes else self._model(request.owner)
            model, result, fields = self._change(model, request, body)
            if makes:
                self.discard(request.owner)
                self._remember(request.owner, model)
                session = request.owner.partition(":")[0]
                put = functools.partial(self._store.put, "model", request.owner, session)
                writes.append(functools.partial(put, model.shape._asdict() | fields))
        with self._store.transaction():
            for write in writes:
                write()
            self._store.finish(request, *result)
        model = self._models.get(request.owner)
        if model is not None and request.kind in CHANGES and model.unsaved >= SAVE_EVERY:
            self._save(request.owner, model)

    def discard(self, model_id: str) -> None:
        """Forget a model in memory; its files and requests have its state."""
        self._models.pop(model_id, None)

    def close(self) -> None:
        """Write the models in memory."""
        for model_id, model in self._models.items():
            self._save(model_id, model)

    # --- models -----------------------------------------------------------------------------------

    def _change(
        self, model: Model | None, request: Request, body: bytes
    ) -> tuple[Model, Result, dict[str, Any]]:
        """Return a model after a request, the result, and fields of the model's entry.

        It runs again after a restart, with the same bits.
        """
        policies, fields = self._policies, {}
        if request.kind == "create_model":
            created = read(body, CREATE)
            shape, seed = read_shape(created.lora_config)
            if seed is None:  # it depends on the number of the model in its session
                seed = policies.config.seed + int(request.owner.rpartition(":")[2])
            params = policies.first_params(shape, seed % 2**32)
            model = Model(shape, policies.learner(shape).start(params))
            fields = {"user_metadata": created.user_metadata}
            result = _answer(model_id=request.owner, type=request.kind)
        elif request.kind == "load_weights":
            model, fields, result = self._load_weights(request, body)
        elif request.kind == "optim_step":
            model = present(model, "the model")
            result = _answer(metrics=run_step(policies, model, *read_adam(body)))
        else:
            model = present(model, "the model")
            loss = read_loss_request(body, policies.limits)
            result = State.DONE, run_loss(policies.learner(model.shape), model, loss)
        if request.kind in CHANGES:
            model.done = request.number
            model.unsaved += 1
        return model, result, fields

    def _load_weights(self, request: Request, body: bytes) -> tuple[Model, dict, Result]:
        loaded = read(body, LOAD)
        shape = shape_of(find_checkpoint(self._store, loaded.path, "weights"))
        known = self._store.get("model", request.owner)
        own = shape if known is None else shape_of(known)
        need(shape == own, "path", loaded.path, f"a checkpoint of a model with {own}")
        file = self._store.checkpoint_folder(loaded.path) / STATE_FILE
        model = load_model(file, self._policies.learner(shape), shape, loaded.optimizer)
        # The checkpoint may be removed before this request would run again.
        save_model(self._store.model_file(request.owner, request.number), model, True)
        metadata = loaded.user_metadata if known is None else known.fields["user_metadata"]
        result = _answer(path=loaded.path, model_id=request.owner, type=request.kind)
        return model, {"user_metadata": metadata}, result

    def _save(self, model_id: str, model: Model) -> None:
        """Write a model, and forget what made its state."""
        if model.unsaved:
            path = self._store.model_file(model_id, model.done)
            save_model(path, model, with_gradient=True)
            self._store.forget_bodies(model_id, model.done)
            for other in set(path.parent.glob("*.safetensors")) - {path}:
                other.unlink()
            model.unsaved = 0

    def _model(self, model_id: str) -> Model:
        """Return a model, from memory or the disk."""
        if model_id not in self._models:
            self._remember(model_id, self._open(model_id))
        self._models.move_to_end(model_id)
        return self._models[model_id]

    def _remember(self, model_id: str, model: Model) -> None:
        """Keep a model in memory, and write the least recently used one if there are too many."""
        self._models[model_id] = model
        if len(self._models) > self._policies.config.tinker_models:
            oldest = next(iter(self._models))
            self._save(oldest, self._models[oldest])
            del self._models[oldest]

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
            model, _, _ = self._change(model, request, self._store.body(request.id))
        return present(model, "the model")

    # --- checkpoints ------------------------------------------------------------------------------

    def _save_weights(self, request: Request, body: bytes, writes: list) -> Result:
        """Write a checkpoint: a state to load, weights for sampling, or a merged model folder."""
        fields = read(body, SAVE)
        kind = CHECKPOINT_KINDS[request.kind]
        path = f"tinker://{request.owner}/{kind}/{fields.path or f'unnamed-{request.number}'}"
        fits = self._store.get("checkpoint", path) is None or kind == "weights" and fields.overwrite
        need(fits, "path", fields.path, "a new name; weights may also overwrite")
        model = self._model(request.owner)
        folder = self._store.checkpoint_folder(path)
        save_policy(folder, self._policies, model, merged=kind == "external_weights")
        if kind == "weights":
            save_model(folder / STATE_FILE, model, with_gradient=False)
        described = model.shape._asdict() | {
            "kind": kind,
            "named": fields.path is not None,
            "expires": fields.ttl_seconds and time.time() + fields.ttl_seconds,
            "size": sum(file.stat().st_size for file in folder.iterdir()),
            "user_metadata": fields.user_metadata,
        }
        put = self._store.put
        writes.append(functools.partial(put, "checkpoint", path, request.owner, described))
        number = fields.sampling_session_seq_id
        if number is None or fields.path is not None:
            return _answer(path=path, type=request.kind)
        writes.append(functools.partial(self._remove_unnamed, request.owner))
        session = request.owner.partition(":")[0]
        sampler = f"{session}:sample:{number}"
        described = {"path": path, "number": number}
        writes.append(functools.partial(put, "sampler", sampler, session, described))
        return _answer(sampling_session_id=sampler, type=request.kind)

    def _remove_unnamed(self, model_id: str) -> None:
        """Remove all but the newest unnamed weights for sampling."""
        entries = self._store.entries("checkpoint", model_id)
        for entry in [entry for entry in entries if not entry.fields["named"]][KEPT_UNNAMED:]:
            self._store.remove_checkpoint(entry.id)
