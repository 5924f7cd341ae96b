"""What the tests of serving share: a policy over bytes, a server in a thread, clients."""

import contextlib
import dataclasses
import functools
import http.client
import os
import pathlib
import random
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import flax.linen as nn
import jax
import openai
from conftest import TINY
from samplers import greedy_loop
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from dapo_jax.config.experiment import Mesh
from dapo_jax.data.prompts.tokenizer import Tokenizer
from dapo_jax.extras.serve import server as serve
from dapo_jax.extras.serve.policy import ServedPolicy
from dapo_jax.extras.serve.settings import ServeConfig
from dapo_jax.model import save_huggingface
from dapo_jax.model.decoder import init_params
from dapo_jax.run import checks

END = 256  # after one token per byte
BUDGET = 24
PROMPTS = ["a", "3+4=", "naïve 你好", "Tell me!", "ö" * 10, "?"]
BYTES_DECODER = dataclasses.replace(TINY, vocab=288, tie_embeddings=False)


def byte_tokenizer() -> Tokenizer:
    """A token per byte, as in the vocabularies of Qwen2, so that characters span several."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE({piece: i for i, piece in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<|end|>")])
    return Tokenizer(backend, end_ids=(END,), pad_id=0)


TOKENIZER = byte_tokenizer()


@functools.cache
def make_byte_params() -> dict:
    """Random parameters under which responses wander, and some end."""
    params = nn.unbox(init_params(BYTES_DECODER, jax.random.key(0)))
    head = params["head"] * 20
    # The token that they tend to repeat for ever is made the one that ends them.
    head = head.at[:, END].set(head[:, 118]).at[:, 118].set(0)
    return params | {"head": head.at[:, END + 1 :].set(0)}


def make_byte_folder(folder: pathlib.Path) -> pathlib.Path:
    save_huggingface.save_folder(folder, make_byte_params(), BYTES_DECODER, TOKENIZER.end_ids)
    TOKENIZER.backend.save(str(folder / "tokenizer.json"))
    return folder


def likeliest(prompt: str | list[int], limit: int = 0) -> list[int]:
    """Ids of the likeliest response, by a full forward pass per token, without the end token."""
    ids = TOKENIZER.encode(prompt) if isinstance(prompt, str) else prompt
    drawn = greedy_loop(make_byte_params(), ids, limit or BUDGET, BYTES_DECODER, END)
    return drawn[: drawn.index(END)] if END in drawn else drawn


def likeliest_responses() -> dict[str, list[int]]:
    """By prompt: a response that is empty, one that is cut off, and some between."""
    responses = {prompt: likeliest(prompt) for prompt in PROMPTS}
    lengths = {len(response) for response in responses.values()}
    assert {0, BUDGET} <= lengths and len(lengths) > 3
    return responses


def make_serve_config(folder: pathlib.Path, **changes) -> ServeConfig:
    """Four slots on one device, any free port, the likeliest token."""
    sizes = {"slots": 4, "max_prompt_tokens": 20, "max_response_tokens": BUDGET}
    settings = sizes | {"http_port": 0, "temperature": 0.0} | changes
    config = ServeConfig(model=str(folder), mesh=Mesh(1, 1, 1), **settings)
    checks.check(config)
    return config


def reopen(opened: ServedPolicy, **changes) -> Callable[[ServeConfig], ServedPolicy]:
    """A `load_served` that loads nothing: this policy with the settings of a server."""

    def load(config: ServeConfig) -> ServedPolicy:
        model = dataclasses.replace(opened.model, config=config, **changes)
        return opened._replace(model=model)

    return load


def free_port() -> int:
    """Return a port that no other worker of the tests and no client's connection takes."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:])
    while True:
        port = random.randrange(1000) + 20_000 + 1000 * worker  # below the ephemeral ports
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


class Server:
    """`serve.serve` in a thread: the exception that it raised, or the failure that it returned."""

    def __init__(self, config: ServeConfig):
        self.error: Exception | None = None
        self.failure = ""
        self._leave, self._ready = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, args=(config,))
        self._thread.start()
        self._ready.wait()
        if self.error:
            raise self.error

    def _run(self, config: ServeConfig) -> None:
        try:
            self.failure = serve.serve(config, should_stop=self._leave.is_set, ready=self._announce)
        except Exception as error:
            self.error = error
        self._ready.set()

    def _announce(self, port: int) -> None:
        self.http_port = port
        self._ready.set()

    def stop(self, wait: bool = True) -> None:
        self._leave.set()
        if wait:
            self.join()

    def join(self) -> None:
        self._thread.join(60)
        assert not self._thread.is_alive()


@contextlib.contextmanager
def serving(config: ServeConfig) -> Iterator[Server]:
    server = Server(config)
    try:
        yield server
    finally:
        server.stop()


def make_openai(port: int) -> openai.OpenAI:
    """OpenAI's published client, which is to try once."""
    url = f"http://127.0.0.1:{port}/v1"
    return openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=60)


@contextlib.contextmanager
def http_serving(folder, **changes):
    with serving(make_serve_config(folder, **{"served_name": "policy"} | changes)) as server:
        yield server, make_openai(server.http_port)


def connect(port: int, body: Any, **headers: str) -> http.client.HTTPConnection:
    """Connection after sending a body and before reading the answer."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    headers = {"Content-Type": "application/json"} | headers
    connection.request("POST", "/v1/completions", body, headers)
    return connection
