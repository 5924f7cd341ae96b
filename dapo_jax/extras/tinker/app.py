"""HTTP routes of Tinker's API, as the published SDK calls them."""

import asyncio
import contextlib
import datetime
import functools
import inspect
import pathlib
import uuid
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from dapo_jax.extras.serve.app import Handler, read_body
from dapo_jax.extras.serve.fields import RequestError, need, need_room
from dapo_jax.extras.serve.settings import ServeConfig
from dapo_jax.extras.tinker.messages import INSTALL, SDK_RELEASE
from dapo_jax.extras.tinker.models import CHECKPOINT_KINDS, find_checkpoint
from dapo_jax.extras.tinker.policies import Policies
from dapo_jax.extras.tinker.requests import Head, parse_loss_message, read_head
from dapo_jax.extras.tinker.store import Entry, Request, State, Store
from dapo_jax.extras.tinker.worker import SAMPLE_KIND, Worker
from dapo_jax.runtime.storage.output_folder import TINKER, claim

WAIT_SECONDS = 20.0  # that a client waits for a result before it asks again
MAX_PENDING = 1024  # requests on the disk, each with a body of at most max_body_mb
CHECKPOINT_TYPES = {"weights": "training", "sampler_weights": "sampler"}
Fields = dict[str, Any]


def _time(seconds: float | None) -> str | None:
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).isoformat() if seconds else None


def _listed(name: str, items: list[Fields]) -> Fields:
    count = len(items)
    return {name: items, "cursor": {"offset": 0, "limit": count, "total_count": count}}


def _describe_shape(entry: Entry) -> Fields:
    rank, targets = entry.fields["rank"], entry.fields["targets"]
    trained = {"train_attn": "query" in targets, "train_mlp": "gate" in targets}
    lora = {"is_lora": True, "lora_rank": rank, "train_unembed": False} | trained
    return lora if rank else {"is_lora": False}


def _describe_checkpoint(checkpoint: Entry) -> Fields:
    fields = checkpoint.fields
    return {
        "checkpoint_id": "/".join(checkpoint.id.split("/")[-2:]),
        "checkpoint_type": CHECKPOINT_TYPES[fields["kind"]],
        "time": _time(checkpoint.created),
        "tinker_path": checkpoint.id,
        "size_bytes": fields["size"],
        "user_metadata": fields["user_metadata"],
        "expires_at": _time(fields["expires"]),
    }


class Call(NamedTuple):
    """A call of a route: the values in its path, the fields of its body in JSON, and the body."""

    path: Mapping[str, str]
    head: Head
    content: bytes


class TinkerApi:
    """Tinker's API. Its handlers run in threads, since they may wait for the disk."""

    def __init__(self, policies: Policies, store: Store):
        self._policies, self._store = policies, store
        self._config, self._name = policies.config, policies.config.served_name
        self._worker = Worker(policies, store)
        self.thread = self._worker.thread
        model, sampler = "model_id seq_id", "session_id sampling_session_seq_id"
        sampled = "sampling_session_id seq_id prompt sampling_params"
        checkpoints = "training_runs/{model}/checkpoints"
        # Method and path of each route, its handler, and the fields of JSON that it needs.
        table: tuple[tuple[str, Callable[[Call], Any], str], ...] = (
            ("POST client/config", self._configure_client, "sdk_version"),
            ("POST client/dynamic_config", lambda call: {}, ""),
            ("POST telemetry", lambda call: {"status": "accepted"}, ""),
            ("POST create_session", self._create_session, "sdk_version"),
            ("POST session_heartbeat", self._heartbeat, "session_id"),
            ("POST sessions/{session}/finish", lambda call: {}, ""),
            ("POST create_sampling_session", self._create_sampler, sampler),
            ("POST create_model", self._submit, "base_model"),
            ("POST load_weights", self._submit, "path"),
            ("POST forward_backward", self._submit_loss, ""),
            ("POST optim_step", self._submit, f"{model} adam_params"),
            *((f"POST {kind}", self._submit, model) for kind in CHECKPOINT_KINDS),
            ("POST asample", self._submit_sample, sampled),
            ("POST retrieve_future", self._retrieve, "request_id"),
            ("POST get_info", self._get_info, "model_id"),
            ("POST weights_info", self._weights_info, "tinker_path"),
            ("GET healthz", lambda call: {"status": "ok"}, ""),
            ("GET get_server_capabilities", self._capabilities, ""),
            ("GET samplers/{sampler}", self._get_sampler, ""),
            ("GET training_runs", self._list_runs, ""),
            ("GET training_runs/{model}", self._list_runs, ""),
            ("GET checkpoints", self._list_checkpoints, ""),
            (f"GET {checkpoints}", self._list_checkpoints, ""),
            (f"DELETE {checkpoints}/{{kind}}/{{name}}", self._delete_checkpoint, ""),
        )
        self.handlers = {
            route.replace(" ", " /api/v1/"): self._endpoint(handler, required)
            for route, handler, required in table
        }

    def _endpoint(self, handler: Callable[[Call], Any], required: str) -> Handler:
        """Return the endpoint that reads the body, and calls a handler."""

        async def answer(http: HttpRequest) -> Response:
            content = await read_body(http, self._config)
            head = read_head(content, *required.split()) if required else Head()
            path = {"kind": http.url.path.rpartition("/")[2]} | http.path_params
            result = await asyncio.to_thread(handler, Call(path, head, content))
            if inspect.isawaitable(result):
                result = await result
            return result if isinstance(result, Response) else JSONResponse(result)

        return answer

    def _entry(self, kind: str, name: str) -> Entry:
        """Return an entry. Raise `RequestError` if there is none."""
        entry = self._store.get(kind, name)
        if entry is None:
            raise RequestError(f"{kind} {name[:200]!r} is unknown", kind, status=404)
        return entry

    def _check_base(self, name: str) -> None:
        allowed = f"{self._name!r}, the model that this server has"
        need(name == self._name, "base_model", name, allowed)

    # --- sessions ---------------------------------------------------------------------------------

    def _configure_client(self, call: Call) -> Fields:
        version, allowed = call.head.sdk_version, f"{SDK_RELEASE}*: {INSTALL}"
        need(version.startswith(SDK_RELEASE), "sdk_version", version, allowed)
        limit = int(self._config.max_body_mb * 1e6)
        return {
            "proto_compress_fwdbwd": False,
            # The SDK's estimate leaves out names and shapes.
            "fwdbwd_max_chunk_bytes_count": limit // 2,
            "fwdbwd_max_chunk_len": max(1, limit // 2000),
            "sample_max_concurrent_requests": max(1, self._config.max_connections // 4),
            "sample_enable_stuck_detection": False,  # a long queue is no failure
        }

    def _create_session(self, call: Call) -> Fields:
        self._configure_client(call)
        name = f"s-{uuid.uuid4().hex[:16]}"
        self._store.put("session", name, {})
        return {"session_id": name, "type": "create_session"}

    def _heartbeat(self, call: Call) -> Fields:
        self._entry("session", call.head.session_id)
        return {"type": "session_heartbeat"}

    def _create_sampler(self, call: Call) -> Fields:
        head = call.head
        session, number = self._entry("session", head.session_id).id, head.sampling_session_seq_id
        if head.model_path:
            find_checkpoint(self._store, head.model_path, "sampler_weights")
        if "base_model" in head.model_fields_set or not head.model_path:
            self._check_base(head.base_model)
        name = f"{session}:sample:{number}"
        self._store.put("sampler", name, {"path": head.model_path, "number": number})
        return {"sampling_session_id": name, "type": "create_sampling_session"}

    # --- requests that the worker runs ------------------------------------------------------------

    def _submit(self, call: Call) -> Fields:
        """Accept a request to a model, which is named by its session if it is new."""
        head, kind = call.head, call.path["kind"]
        if "base_model" in head.model_fields_set:
            self._check_base(head.base_model)
        if head.model_id:
            return self._accept_of_model(head.model_id, head.seq_id, kind, call.content)
        read_head(call.content, "session_id", "model_seq_id")
        session = self._entry("session", head.session_id).id
        return self._accept(f"{session}:train:{head.model_seq_id}", 0, kind, call.content)

    def _submit_sample(self, call: Call) -> Fields:
        head = call.head
        sampler = self._entry("sampler", head.sampling_session_id).id
        future = self._accept(sampler, head.seq_id, SAMPLE_KIND, call.content)
        ids = [f"{future['request_id']}:{i}" for i in range(head.num_samples)]
        return future | {"sample_sequence_ids": ids}

    def _submit_loss(self, call: Call) -> Fields:
        message = parse_loss_message(call.content)
        kind = "forward" if message.forward_only else "forward_backward"
        return self._accept_of_model(message.model_id, message.seq_id, kind, call.content)

    def _accept_of_model(self, model: str, number: int, kind: str, body: bytes) -> Fields:
        need(number > 0, "seq_id", number, "above 0")
        return self._accept(self._entry("model", model).id, number, kind, body)

    def _accept(self, owner: str, number: int, kind: str, body: bytes) -> Fields:
        """Store a request, unless it is a retry, and return its future."""
        need_room(len(self._store.pending()) < MAX_PENDING)
        request = Request(f"{owner}:{number}", owner, number, kind)
        self._store.accept(request, body)
        self.thread.wake()
        return {"request_id": request.id}

    async def _retrieve(self, call: Call) -> Response:
        """Return a result; status 408 tells the client to ask again."""
        name = call.head.request_id
        stored = await self._worker.wait(name, WAIT_SECONDS)
        if stored is None:
            raise RequestError(f"request {name!r} is unknown", "request_id", status=404)
        state, result = stored
        if state == State.PENDING:
            return JSONResponse({"request_id": name, "queue_state": "active"}, 408)
        if result is None:
            raise RequestError(f"the result of {name!r} is no longer kept", status=410)
        kind = "application/x-protobuf" if state == State.DONE else "application/json"
        return Response(result, media_type=kind)

    # --- descriptions -----------------------------------------------------------------------------

    def _capabilities(self, call: Call) -> Fields:
        model = {"model_name": self._name, "trainable": True, "sampleable": True}
        return {"supported_models": [model | {"max_context_length": self._policies.model.context}]}

    def _get_info(self, call: Call) -> Fields:
        model = self._entry("model", call.head.model_id)
        described = {"model_name": self._name, "arch": self._policies.decoder.family}
        info = {"model_id": model.id, "model_name": self._name, "model_data": described}
        return info | _describe_shape(model)

    def _weights_info(self, call: Call) -> Fields:
        checkpoint = self._entry("checkpoint", call.head.tinker_path)
        return {"base_model": self._name} | _describe_shape(checkpoint)

    def _get_sampler(self, call: Call) -> Fields:
        sampler = self._entry("sampler", call.path["sampler"])
        path = sampler.fields["path"] or None
        return {"sampler_id": sampler.id, "base_model": self._name, "model_path": path}

    def _list_runs(self, call: Call) -> Fields:
        """Describe the model in the path, or list all."""
        if "model" in call.path:
            return self._describe_run(self._entry("model", call.path["model"]))
        return _listed("training_runs", list(map(self._describe_run, self._store.entries("model"))))

    def _describe_run(self, model: Entry) -> Fields:
        checkpoints = map(_describe_checkpoint, self._store.entries("checkpoint", model.id))
        last = {item["checkpoint_type"]: item for item in reversed(list(checkpoints))}
        return _describe_shape(model) | {
            "training_run_id": model.id,
            "base_model": self._name,
            "model_owner": "local",
            "last_request_time": _time(model.created),
            "last_checkpoint": last.get("training"),
            "last_sampler_checkpoint": last.get("sampler"),
            "user_metadata": model.fields["user_metadata"],
        }

    def _list_checkpoints(self, call: Call) -> Fields:
        model = call.path.get("model")
        entries = self._store.entries("checkpoint", model and self._entry("model", model).id)
        return _listed("checkpoints", list(map(_describe_checkpoint, entries)))

    def _delete_checkpoint(self, call: Call) -> Response:
        path = "tinker://{model}/{kind}/{name}".format_map(call.path)
        self._store.remove_checkpoint(self._entry("checkpoint", path).id)
        return Response(status_code=204)


@contextlib.contextmanager
def open_tinker(config: ServeConfig) -> Iterator[Callable[[], TinkerApi]]:
    """Yield what opens the API in an event loop, while this process alone has `tinker_dir`."""
    policies = Policies(config)
    with claim("tinker_dir", config.tinker_dir, TINKER) as folder:
        with contextlib.closing(Store(pathlib.Path(str(folder)))) as store:
            yield functools.partial(TinkerApi, policies, store)
