"""A server of Tinker's API in a process of its own, and raw requests to it."""

import contextlib
import http.client
import json
import os
import pathlib
import signal
import subprocess
import sys
from typing import Any

from forked import one_device
from served import free_port
from small_runs import ROOT

from dapo_jax.extras.tinker.messages import MESSAGES

SDK = {"sdk_version": "0.38.0"}
FLAGS = ("--slots=4", "--max_prompt_tokens=64", "--max_response_tokens=32")
NAME = "policy"


class TinkerServer:
    """`dapo-jax serve --tinker` of a model folder, which may be killed and started again.

    Like the tests it compiles fast and not well, unless other flags of XLA are given.
    """

    def __init__(
        self, folder: pathlib.Path, state: pathlib.Path, *flags: str, xla: str | None = None
    ):
        self._xla = one_device() if xla is None else xla
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        names = {"model": folder, "tinker_dir": state, "http_port": self.port, "served_name": NAME}
        given = [f"--{name}={value}" for name, value in names.items()]
        # By name: a setting may be given once.
        self._flags = {flag.split("=")[0]: flag for flag in (*given, *FLAGS, *flags)}.values()
        self.process: subprocess.Popen | None = None
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

    def stop(self) -> int:
        self.process.terminate()
        return self.process.wait(60)

    def post(self, path: str, body: Any, **headers: str) -> tuple[int, Any]:
        """Return status and body of the answer; other bodies than bytes are sent as JSON."""
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        with contextlib.closing(connection):
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


def loss_message(model: str, number: int, data: list, loss: str = "cross_entropy", **fields: Any):
    """Return the body of a forward_backward; a datum is (tokens, inputs by name)."""
    message = MESSAGES["ForwardBackwardRequest"](model_id=model, seq_id=number, loss_fn=loss)
    message.forward_only = fields.pop("forward_only", False)
    for name, value in fields.items():
        message.loss_fn_config_v2.add(key=name).value.number = value
    for tokens, inputs in data:
        datum = message.data.add()
        datum.model_input.add().encoded_text.tokens = as_bytes(tokens, "<i4")
        for name, values in inputs.items():
            tensor = datum.loss_fn_inputs.add(key=name).value
            whole = name == "target_tokens"
            tensor.dtype = 2 if whole else 1
            tensor.dense = as_bytes(values, "<i8" if whole else "<f4")
            tensor.shape.extend([len(values)])
    return message.SerializeToString()


def as_bytes(values: Any, dtype: str) -> bytes:
    import numpy as np

    return np.asarray(values, dtype).tobytes()
