"""HTTP routes of Tinker's API, as the published SDK calls them."""

import asyncio
import datetime
import inspect
import json
import re
import uuid
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, NamedTuple

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from dapo_jax.commands.serve.access import Access
from dapo_jax.commands.serve.app import read_body
from dapo_jax.commands.serve.errors import QueueFull, RequestError
from dapo_jax.commands.serve.tinker.messages import CONTENT_TYPE
from dapo_jax.commands.serve.tinker.operations import find_checkpoint
from dapo_jax.commands.serve.tinker.policies import Policies
from dapo_jax.commands.serve.tinker.requests import (
    CREATE,
    LOAD,
    NAME,
    OF_MODEL,
    SAMPLE,
    TEXT,
    Rule,
    need,
    optional,
    parse_loss_message,
    read,
    whole,
)
from dapo_jax.commands.serve.tinker.store import Entry, Request, State, Store
from dapo_jax.commands.serve.tinker.worker import SAMPLE_KIND, Worker

SDK_VERSIONS = "0.38.*"  # that were tested
IS_SUPPORTED = re.compile(r"0\.38\.\d+").fullmatch
POLL_SECONDS = 20.0  # that a client waits for a result before it asks again
MAX_PENDING = 1024  # requests on the disk, each with a body of at most max_body_mb
CHECKPOINT_TYPES = {"weights": "training", "sampler_weights": "sampler"}
CHECKPOINT = "training_runs/{model}/checkpoints/{kind}/{name}"
PAGE = {"limit": whole(1, 1000, 100), "offset": whole(0, 2**53, 0)}
SESSION = {
    "sdk_version": TEXT,
    "user_metadata": optional(Rule(lambda x: isinstance(x, dict), "an object")),
}
SAMPLER = {
    "session_id": NAME,
    "sampling_session_seq_id": whole(0, 2**53),
    "model_path": optional(TEXT, ""),
    "base_model": optional(TEXT, ""),
}
ASAMPLE = SAMPLE | {"sampling_session_id": NAME, "seq_id": whole(0, 2**63 - 1)}


class Call(NamedTuple):
    """A call of a route."""

    body: bytes
    path: Mapping[str, str]  # values in the path
    query: Mapping[str, str]


def _time(seconds: float | None) -> str | None:
    if seconds is None:
        return None
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).isoformat()


class TinkerApi:
    """Handlers of the routes. A plain method runs in a thread, since it may wait for the disk."""

    def __init__(self, policies: Policies, worker: Worker, store: Store, access: Access):
        self._config = policies.config
        self._name = policies.config.served_name
        self._policies = policies
        self._worker = worker
        self._store = store
        self._access = access
        models = ("optim_step", "save_weights", "save_weights_for_sampler", "save_weights_external")
        table: dict[str, dict[str, Callable[[Call], Any]]] = {
            "POST": {
                "client/config": self._client_config,
                "client/dynamic_config": lambda call: {},
                "telemetry": lambda call: {"status": "accepted"},
                "create_session": self._create_session,
                "session_heartbeat": self._heartbeat,
                "sessions/{session}/finish": lambda call: {},
                "create_model": self._create_model,
                "load_weights": self._load_weights,
                "forward_backward": self._forward_backward,
                "create_sampling_session": self._create_sampler,
                "asample": self._asample,
                "retrieve_future": self._retrieve,
                "get_info": self._get_info,
                "weights_info": self._weights_info,
                **{kind: self._of_model(kind) for kind in models},
            },
            "GET": {
                "healthz": lambda call: {"status": "ok"},
                "get_server_capabilities": self._capabilities,
                "samplers/{sampler}": self._get_sampler,
                "training_runs": self._list_runs,
                "training_runs/{model}": self._get_run,
                "training_runs/{model}/checkpoints": self._list_checkpoints,
                "checkpoints": self._list_checkpoints,
            },
            "DELETE": {CHECKPOINT: self._delete_checkpoint},
        }
        self.routes = [
            Route(f"/api/v1/{path}", self._endpoint(handler), methods=[method])
            for method, handlers in table.items()
            for path, handler in handlers.items()
        ]

    def _endpoint(self, handler: Callable[[Call], Any]) -> Callable[..., Awaitable[Response]]:
        """Return the endpoint that checks access, reads the body, and calls a handler."""

        async def answer(http: HttpRequest) -> Response:
            headers = dict(http.headers)
            if key := headers.pop("x-api-key", ""):  # where the SDK sends the key
                headers["authorization"] = f"Bearer {key}"
            address = (http.scope.get("server") or ("", 0))[0]
            self._access.check(headers, local_address=address, has_body=False)
            if encoding := headers.get("content-encoding"):
                message = f"content-encoding = {encoding[:100]!r}: must be left out"
                raise RequestError(message, status=415)
            if self._worker.failure:
                raise RequestError(self._worker.failure, status=500)
            body = await read_body(http, self._config)
            call = Call(body, http.path_params, http.query_params)
            if inspect.iscoroutinefunction(handler):
                result = await handler(call)
            else:
                result = await asyncio.to_thread(handler, call)
            if isinstance(result, Response):
                return result
            return Response(json.dumps(result), media_type="application/json")

        return answer

    def _entry(self, kind: str, name: str) -> Entry:
        """Return an entry. Raise `RequestError` if there is none."""
        entry = self._store.get(kind, name)
        if entry is None:
            raise RequestError(f"{kind} {name[:200]!r} is unknown", kind, status=404)
        return entry

    def _check_base(self, name: str | None) -> None:
        allowed = f"{self._name!r}, the model that this server has"
        need(name == self._name, "base_model", name, allowed)

    # --- sessions ---------------------------------------------------------------------------------

    def _check_version(self, version: str) -> None:
        allowed = f"{SDK_VERSIONS}: pip install 'tinker=={SDK_VERSIONS}'"
        need(IS_SUPPORTED(version) is not None, "sdk_version", version, allowed)

    def _client_config(self, call: Call) -> dict:
        self._check_version(read(call.body, {"sdk_version": TEXT}).sdk_version)
        limit = int(self._config.max_body_mb * 1e6)
        return {
            "proto_compress_fwdbwd": False,
            # The SDK's estimate leaves out names and shapes.
            "fwdbwd_max_chunk_bytes_count": limit // 2,
            "fwdbwd_max_chunk_len": max(1, limit // 2000),
            "sample_max_concurrent_requests": max(1, self._config.max_connections // 4),
            "sample_enable_stuck_detection": False,  # a long queue is no failure
        }

    def _create_session(self, call: Call) -> dict:
        fields = read(call.body, SESSION)
        self._check_version(fields.sdk_version)
        name = f"s-{uuid.uuid4().hex[:16]}"
        self._store.put("session", name, "", {"user_metadata": fields.user_metadata})
        return {"session_id": name, "type": "create_session"}

    def _heartbeat(self, call: Call) -> dict:
        self._entry("session", read(call.body, {"session_id": NAME}).session_id)
        return {"type": "session_heartbeat"}

    def _create_sampler(self, call: Call) -> dict:
        fields = read(call.body, SAMPLER)
        session = self._entry("session", fields.session_id).id
        if fields.model_path:
            find_checkpoint(self._store, fields.model_path, "sampler_weights")
        if fields.base_model or not fields.model_path:
            self._check_base(fields.base_model)
        number = fields.sampling_session_seq_id
        name = f"{session}:sample:{number}"
        self._store.put("sampler", name, session, {"path": fields.model_path, "number": number})
        return {"sampling_session_id": name, "type": "create_sampling_session"}

    # --- requests that the worker runs ------------------------------------------------------------

    def _accept(self, owner: str, number: int, kind: str, body: bytes) -> dict:
        """Store a request, unless it is a retry, and return its future."""
        if self._store.count_pending() >= MAX_PENDING:
            raise QueueFull
        request = Request(f"{owner}:{number}", owner, number, kind)
        self._store.accept(request, body)
        self._worker.wake()
        return {"request_id": request.id}

    def _of_model(self, kind: str) -> Callable[[Call], dict]:
        """Return the handler of a request of a model."""

        def handle(call: Call) -> dict:
            fields = read(call.body, OF_MODEL)
            model = self._entry("model", fields.model_id).id
            return self._accept(model, fields.seq_id, kind, call.body)

        return handle

    def _forward_backward(self, call: Call) -> dict:
        message = parse_loss_message(call.body)
        model = self._entry("model", message.model_id).id
        need(message.seq_id > 0, "seq_id", message.seq_id, "above 0")
        kind = "forward" if message.forward_only else "forward_backward"
        return self._accept(model, message.seq_id, kind, call.body)

    def _create_model(self, call: Call) -> dict:
        fields = read(call.body, CREATE)
        self._check_base(fields.base_model)
        session = self._entry("session", fields.session_id).id
        return self._accept(f"{session}:train:{fields.model_seq_id}", 0, "create_model", call.body)

    def _load_weights(self, call: Call) -> dict:
        fields = read(call.body, LOAD)
        if fields.base_model:
            self._check_base(fields.base_model)
        if fields.session_id is None:
            return self._of_model("load_weights")(call)
        session = self._entry("session", fields.session_id).id
        number = read(call.body, {"model_seq_id": CREATE["model_seq_id"]}).model_seq_id
        return self._accept(f"{session}:train:{number}", 0, "load_weights", call.body)

    def _asample(self, call: Call) -> dict:
        fields = read(call.body, ASAMPLE)
        sampler = self._entry("sampler", fields.sampling_session_id).id
        future = self._accept(sampler, fields.seq_id, SAMPLE_KIND, call.body)
        ids = [f"{future['request_id']}:{i}" for i in range(fields.num_samples)]
        return future | {"sample_sequence_ids": ids}

    async def _retrieve(self, call: Call) -> Response:
        """Return a result; status 408 tells the client to ask again."""
        name = read(call.body, {"request_id": NAME}).request_id
        stored = await self._worker.wait(name, POLL_SECONDS)
        if stored is None:
            raise RequestError(f"request {name!r} is unknown", "request_id", status=404)
        state, result = stored
        if state == State.PENDING:
            pending = json.dumps({"request_id": name, "queue_state": "active"})
            return Response(pending, 408, media_type="application/json")
        if result is None:
            raise RequestError(f"the result of {name!r} is no longer kept", status=410)
        kind = CONTENT_TYPE if state == State.DONE else "application/json"
        return Response(result, media_type=kind)

    # --- descriptions -----------------------------------------------------------------------------

    def _capabilities(self, call: Call) -> dict:
        limits = {"max_context_length": self._policies.context}
        model = {"model_name": self._name, "trainable": True, "sampleable": True}
        return {"supported_models": [model | limits]}

    def _lora(self, fields: dict[str, Any]) -> dict[str, Any]:
        rank = fields["rank"]
        return {"is_lora": True, "lora_rank": rank} if rank else {"is_lora": False}

    def _get_info(self, call: Call) -> dict:
        model = self._entry("model", read(call.body, {"model_id": NAME}).model_id)
        described = {"model_name": self._name, "arch": self._policies.decoder.family}
        info = {"type": "get_info", "model_id": model.id, "model_name": self._name}
        return info | {"model_data": described} | self._lora(model.fields)

    def _weights_info(self, call: Call) -> dict:
        fields = self._checkpoint(read(call.body, {"tinker_path": TEXT}).tinker_path).fields
        targets = fields["targets"]
        trained = {"train_attn": "query" in targets, "train_mlp": "gate" in targets}
        info = {"base_model": self._name} | self._lora(fields)
        return info | (trained | {"train_unembed": False} if targets else {})

    def _get_sampler(self, call: Call) -> dict:
        sampler = self._entry("sampler", call.path["sampler"])
        path = sampler.fields["path"] or None
        return {"sampler_id": sampler.id, "base_model": self._name, "model_path": path}

    def _page(self, call: Call, entries: list[Entry]) -> tuple[list[Entry], dict[str, int]]:
        """Return the entries that a query asks for, and where they are in the list."""
        query = {name: int(value) for name, value in call.query.items() if value.isdecimal()}
        cursor = vars(read(query, PAGE))
        first, limit = cursor["offset"], cursor["limit"]
        return entries[first : first + limit], cursor | {"total_count": len(entries)}

    def _list_runs(self, call: Call) -> dict:
        page, cursor = self._page(call, self._store.entries("model"))
        return {"training_runs": [self._describe_run(model) for model in page], "cursor": cursor}

    def _get_run(self, call: Call) -> dict:
        return self._describe_run(self._entry("model", call.path["model"]))

    def _describe_run(self, model: Entry) -> dict[str, Any]:
        checkpoints = list(map(self._describe, self._store.entries("checkpoint", model.id)))
        last = {checkpoint["checkpoint_type"]: checkpoint for checkpoint in reversed(checkpoints)}
        return self._lora(model.fields) | {
            "training_run_id": model.id,
            "base_model": self._name,
            "model_owner": "local",
            "last_request_time": _time(model.created),
            "last_checkpoint": last.get("training"),
            "last_sampler_checkpoint": last.get("sampler"),
            "user_metadata": model.fields["user_metadata"],
        }

    def _checkpoint(self, path: str) -> Entry:
        return self._entry("checkpoint", path)

    def _describe(self, checkpoint: Entry) -> dict[str, Any]:
        fields = checkpoint.fields
        _, kind, name = checkpoint.id.removeprefix("tinker://").split("/")
        return {
            "checkpoint_id": f"{kind}/{name}",
            "checkpoint_type": CHECKPOINT_TYPES.get(kind, "external"),
            "time": _time(checkpoint.created),
            "tinker_path": checkpoint.id,
            "size_bytes": fields["size"],
            "user_metadata": fields["user_metadata"],
            "expires_at": _time(fields["expires"]),
        }

    def _list_checkpoints(self, call: Call) -> dict:
        model = call.path.get("model")
        if model is not None:
            self._entry("model", model)
        page, cursor = self._page(call, self._store.entries("checkpoint", model))
        return {"checkpoints": list(map(self._describe, page)), "cursor": cursor}

    def _delete_checkpoint(self, call: Call) -> Response:
        path = call.path
        checkpoint = self._checkpoint(f"tinker://{path['model']}/{path['kind']}/{path['name']}")
        self._store.remove_checkpoint(checkpoint.id)
        return Response(status_code=204)
