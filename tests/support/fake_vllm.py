"""A server with the answers of vLLM's HTTP interface, of a policy that is a hash of its adapter."""

import asyncio
import contextlib
import hashlib
import json
import pathlib
import socket
import tempfile
import threading
import time
import types
from collections.abc import Iterator

import jax
import numpy as np
import uvicorn
from starlette.applications import Starlette
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from dapo_jax.config.experiment import Config
from dapo_jax.extras.vllm.vllm_sampler import VllmSampler

WEIGHTS = "adapter_model.safetensors"


class DigestSampler(VllmSampler):
    """Writes what stands for an adapter: a digest of parameters."""

    def save(self, params, folder: pathlib.Path) -> None:
        digest = hashlib.sha256()
        for leaf in jax.tree.leaves(params):
            digest.update(np.asarray(leaf).tobytes())
        (folder / WEIGHTS).write_bytes(digest.digest())


class FakeVllm:
    """Adapters by name, a prefix cache that goes stale, and whether generation is paused."""

    def __init__(self, end_id: int, vocab: int, seconds: float = 0.0, mode="processed_logprobs"):
        self.end_id, self.vocab, self.seconds, self.mode = end_id, vocab, seconds, mode
        self.fails = False  # it answers nothing
        self.served: list[int] = []  # seeds of its responses
        self.adapters: dict[str, bytes] = {}
        self.prefixes: dict[tuple[int, ...], bytes] = {}  # which adapter computed a prompt's cache
        self.paused = False
        self.aborts = 0
        posts = {
            "/v1/completions": self.complete,
            "/v1/load_lora_adapter": self.load,
            "/reset_prefix_cache": self.reset,
            "/pause": self.pause,
            "/resume": self.resume,
        }
        routes = [Route(path, post, methods=["POST"]) for path, post in posts.items()]
        self.app = Starlette(routes=routes)

    async def load(self, http):
        body = await http.json()
        if body["lora_name"] in self.adapters and not body.get("load_inplace"):
            text = f"The lora adapter '{body['lora_name']}' has already been loaded."
            return JSONResponse({"error": {"message": text, "code": 400}}, 400)
        file = pathlib.Path(body["lora_path"]) / WEIGHTS
        if not file.is_file():
            text = f"Loading lora {body['lora_name']} failed: No adapter found"
            return JSONResponse({"error": {"message": text, "code": 404}}, 404)
        self.adapters[body["lora_name"]] = file.read_bytes()
        return PlainTextResponse(f"Success: LoRA adapter '{body['lora_name']}' added successfully.")

    async def reset(self, http):
        self.prefixes.clear()
        return Response(status_code=200)

    async def pause(self, http):
        assert http.query_params["mode"] == "abort"
        self.paused = True
        self.aborts += 1
        return JSONResponse({"status": "paused"})

    async def resume(self, http):
        self.paused = False
        return JSONResponse({"status": "resumed"})

    async def complete(self, http):
        body = await http.json()
        if self.fails:
            return PlainTextResponse("EngineDeadError", 500)
        if body["logprobs"] > 0:
            return JSONResponse({"model": "base", "choices": [self.likeliest(body)]})
        assert body["return_token_ids"]
        aborts = self.aborts
        if self.seconds:
            await asyncio.sleep(self.seconds)
        if body["model"] not in self.adapters:
            text = f"The model `{body['model']}` does not exist."
            return JSONResponse({"error": {"message": text, "code": 404}}, 404)
        prompt = tuple(body["prompt"])
        weights = self.prefixes.setdefault(prompt, self.adapters[body["model"]])
        parts = [prompt, *(body[name] for name in ("seed", "temperature", "top_p", "top_k"))]
        key = hashlib.sha256(weights + json.dumps(parts).encode()).digest()
        random = np.random.default_rng(list(key))
        tokens = random.integers(0, self.vocab - 1, random.integers(24))
        tokens = [*(tokens + (tokens >= self.end_id)).tolist(), self.end_id]
        assert self.end_id in body["stop_token_ids"]
        end = next(i for i, token in enumerate(tokens, 1) if token in body["stop_token_ids"])
        reason = "length" if end > body["max_tokens"] else "stop"
        tokens = tokens[: min(end, body["max_tokens"])]
        if self.aborts != aborts:
            tokens, reason = tokens[:1], "abort"
        logprobs = {"token_logprobs": [-0.5] * len(tokens), "tokens": [""] * len(tokens)}
        self.served.append(body["seed"])
        choice = {"index": 0, "text": "", "finish_reason": reason, "token_ids": tokens}
        return JSONResponse({"model": body["model"], "choices": [choice | {"logprobs": logprobs}]})

    def likeliest(self, body):
        """The likeliest tokens, with log-probs before or after temperature and truncation."""
        logits = np.sort(np.random.default_rng(body["prompt"]).normal(size=self.vocab))
        if self.mode == "processed_logprobs":
            logits = logits[-body["top_k"] :] / body["temperature"]
        logprobs = (logits - np.logaddexp.reduce(logits))[-body["logprobs"] :]
        return {"logprobs": {"top_logprobs": [dict(zip("abcde", logprobs, strict=False))]}}


@contextlib.contextmanager
def serving(fake: FakeVllm) -> Iterator[str]:
    """Run the server; yields its URL."""
    listening = socket.create_server(("127.0.0.1", 0))
    # A configuration of logging would close the streams of absl's handler.
    config = uvicorn.Config(fake.app, lifespan="off", log_config=None, log_level="critical")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    try:
        while not server.started:
            time.sleep(0.01)
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()


@contextlib.contextmanager
def vllm_sampler(fakes: list[FakeVllm], slots: int) -> Iterator[VllmSampler]:
    """A sampler of some servers."""
    with contextlib.ExitStack() as stack:
        config = Config(seed=5)
        config.run_dir = stack.enter_context(tempfile.TemporaryDirectory())
        config.sampler.slots, config.sampler.max_response_tokens = slots, 20
        config.extras.vllm.servers = ",".join(stack.enter_context(serving(f)) for f in fakes)
        tokenizer = types.SimpleNamespace(end_ids=[fakes[0].end_id])
        yield DigestSampler(types.SimpleNamespace(config=config, tokenizer=tokenizer, warn=print))
