"""Servers of Tinker's API, in a thread or a process, and raw requests to them."""

import contextlib
import http.client
import json
import os
import pathlib
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from conftest import first_devices
from forked import one_device
from served import free_port, make_serve_config, serving
from small_runs import ROOT

pytest.importorskip("tinker")

from dapo_jax.extras.tinker.messages import pb

SDK = {"sdk_version": "0.38.0"}
SIZES = {"slots": 4, "max_prompt_tokens": 64, "max_response_tokens": 32}
NAME = "policy"


class Requests:
    """Raw requests to a server on this machine, with a key unless the test sends another."""

    def __init__(self, port: int, key: str = ""):
        self.port, self.url, self._key = port, f"http://127.0.0.1:{port}", key

    def post(self, path: str, body: Any, **headers: str) -> tuple[int, Any]:
        """Return status and body of the answer; other bodies than bytes are sent as JSON."""
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        with contextlib.closing(connection):
            headers = {"x_api_key": self._key} | headers
            names = {name.replace("_", "-"): value for name, value in headers.items()}
            connection.request("POST", f"/api/v1/{path}", raw, names)
            answer = connection.getresponse()
            content = answer.read()
        binary = "json" not in answer.getheader("content-type", "")
        return answer.status, content if binary else json.loads(content)

    def result(self, request_id: str) -> Any:
        """Return the result of a request: an object, or bytes."""
        while True:
            status, answer = self.post("retrieve_future", {"request_id": request_id})
            if status != 408:
                assert status == 200, answer
                return answer

    def run(self, path: str, body: Any) -> Any:
        """Return the result of a request that is sent now."""
        status, future = self.post(path, body)
        assert status == 200, future
        return self.result(future["request_id"])

    def create_session(self) -> str:
        return self.post("create_session", {"tags": [], "user_metadata": None, **SDK})[1][
            "session_id"
        ]

    def create_model(self, session: str, number: int, **lora: Any) -> str:
        body = {"session_id": session, "model_seq_id": number, "base_model": NAME}
        return self.run("create_model", body | {"lora_config": lora})["model_id"]


@contextlib.contextmanager
def tinker_serving(folder: pathlib.Path, state: pathlib.Path, key: str) -> Iterator[Requests]:
    """A server in a thread, on one device."""
    names = {"tinker_dir": str(state), "served_name": NAME}
    state.with_name("key").write_text(key)
    names |= {"api_key_file": str(state.with_name("key"))}
    settings = SIZES | names | {"http_port": free_port(), "temperature": 1.0, "tinker": True}
    with first_devices(), serving(make_serve_config(folder, **settings)) as server:
        yield Requests(server.http_port, key)
    assert not (server.error or server.failure)


class TinkerServer(Requests):
    """`dapo-jax serve --tinker` of a model folder, which may be killed and started again.

    Like the tests it compiles fast and not well, unless other flags of XLA are given.
    """

    def __init__(
        self, folder: pathlib.Path, state: pathlib.Path, *flags: str, xla: str | None = None
    ):
        super().__init__(free_port())
        self._xla = one_device() if xla is None else xla
        names = {"model": folder, "tinker_dir": state, "http_port": self.port, "served_name": NAME}
        given = [f"--{name}={value}" for name, value in (SIZES | names).items()]
        # By name: a setting may be given once.
        self._flags = {flag.split("=")[0]: flag for flag in (*given, *flags)}.values()
        self.start()

    def start(self) -> None:
        environment = os.environ | {"XLA_FLAGS": self._xla, "JAX_PLATFORMS": "cpu"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "dapo_jax", "serve", "--tinker", *self._flags],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        line = self.process.stdout.readline()
        assert f": Tinker's API on {self.url} (" in line, line

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()


def loss_message(model: str, number: int, data: list, loss: str = "cross_entropy", **fields: Any):
    """Return the body of a forward_backward; a datum is (tokens, inputs by name)."""
    message = pb.ForwardBackwardRequest(model_id=model, seq_id=number, loss_fn=loss)
    message.forward_only = fields.pop("forward_only", False)
    for name, value in fields.items():
        message.loss_fn_config_v2[name].number = value
    for tokens, inputs in data:
        datum = message.data.add()
        datum.model_input.add().encoded_text.tokens = as_bytes(tokens, "<i4")
        for name, values in inputs.items():
            tensor = datum.loss_fn_inputs[name]
            whole = name == "target_tokens"
            tensor.dtype = pb.DTYPE_INT64 if whole else pb.DTYPE_FLOAT32
            tensor.dense = as_bytes(values, "<i8" if whole else "<f4")
            tensor.shape.extend([len(values)])
    return message.SerializeToString()


def as_bytes(values: Any, dtype: str) -> bytes:
    return np.asarray(values, dtype).tobytes()
