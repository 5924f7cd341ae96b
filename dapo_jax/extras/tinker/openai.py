"""OpenAI's API of a server of Tinker's API: its prompts become stored requests to sample."""

import json
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import numpy as np
from starlette.responses import JSONResponse, Response, StreamingResponse

from dapo_jax.data.prompts.tokenizer import Tokenizer
from dapo_jax.extras.serve.errors import RequestError
from dapo_jax.extras.serve.requests import CompletionRequest, ServedModel, read_request
from dapo_jax.extras.serve.responses import CompletionResponse
from dapo_jax.extras.tinker.messages import MESSAGES
from dapo_jax.extras.tinker.policies import Policies
from dapo_jax.extras.tinker.store import State
from dapo_jax.rollout.requests import Reader
from dapo_jax.types.structs import NewTokens, Prompt, Request, SamplingRule, Stop

Accept = Callable[[int, bytes], str]  # stores a request with a number and a body, returns its id
Wait = Callable[[str], Awaitable[tuple[State, bytes | None]]]  # for the result of a request


class StoredResponses:
    """Responses to stored requests, one after another; a chunk is a whole response."""

    def __init__(
        self, ids: list[str], wait: Wait, request: CompletionRequest, tokenizer: Tokenizer
    ):
        self._ids = ids
        self._wait = wait
        self._request, self._tokenizer = request, tokenizer

    async def __aiter__(self) -> AsyncIterator[tuple[int, NewTokens]]:
        number = 0
        for request_id in self._ids:
            state, result = await self._wait(request_id)
            if state != State.DONE:
                raise RequestError(json.loads(result or b"{}").get("error", "no result"))
            for sequence in MESSAGES["SampleResponse"].FromString(result).sequences:
                ids = np.frombuffer(sequence.tokens, np.int32).tolist()
                tokens = np.array(self._request.prompts[number // self._request.n])
                prompt = Prompt(number, "", "", tokens, "", "")
                shown: list[NewTokens] = []
                stop = Stop(tuple(self._request.stop))
                request = Request(prompt, [0], stop=stop, watch=shown.append)
                Reader(self._tokenizer, request, self._tokenizer.end_ids).read(0, ids, True)
                yield number, shown[0]
                number += 1

    def cancel(self, index: int) -> None:
        """Do nothing: a chunk was a whole response."""


def complete(
    body: bytes, name: str, policies: Policies, accept: Accept, wait: Wait, *, chat: bool
) -> Awaitable[Response]:
    """Return the response to a completion, or to a chat, of the model with a name."""
    config, limits, tokenizer = policies.config, policies.limits, policies.tokenizer
    rule = SamplingRule(config.temperature, config.top_p, config.top_k)
    model = ServedModel(name, config, limits, tokenizer, rule)
    request = read_request(body, model, chat=chat)
    if request.likeliest is not None:
        message = "logprobs: is not served here; compute_logprobs of Tinker's SDK returns them"
        raise RequestError(message, "logprobs")
    ids = []
    for index, (prompt, budget) in enumerate(zip(request.prompts, request.budgets, strict=True)):
        params = request.rule._asdict() | {"max_tokens": budget, "stop": request.stop or None}
        if request.seed is not None:
            params["seed"] = (request.seed + index) % 2**63
        chunk = {"type": "encoded_text", "tokens": prompt}
        fields = {"prompt": {"chunks": [chunk]}, "num_samples": request.n}
        if budget:  # else only the prompt's echo is requested
            sent = json.dumps(fields | {"sampling_params": params}).encode()
            ids.append(accept(secrets.randbits(62), sent))
    responses: Any = StoredResponses(ids, wait, request, tokenizer)
    scorer: Any = None  # of log-probs
    answer = CompletionResponse(request, responses, model, scorer, chat=chat)

    async def respond() -> Response:
        if request.stream:
            return StreamingResponse(answer.events(), media_type="text/event-stream")
        return JSONResponse(await answer.complete())

    return respond()
