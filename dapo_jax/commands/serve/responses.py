"""Responses of OpenAI's API, complete or streamed, made from the tokens of the generator."""

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, NamedTuple

from starlette.responses import Response

from dapo_jax.commands.serve.generator import GenerationFailed, Responses, TokenChunk
from dapo_jax.commands.serve.logprobs import Scorer, Scores, chat_logprobs, completion_logprobs
from dapo_jax.commands.serve.requests import CompletionRequest, ServedModel
from dapo_jax.data.prompts.tokenizer import TextStream, Tokenizer, UntilStop
from dapo_jax.runtime.tool_calls import read_calls


def json_response(
    fields: dict[str, Any], status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """Return an HTTP response with a JSON body."""
    # Escaped to ASCII: an error may quote a client's text, perhaps with invalid Unicode.
    return Response(json.dumps(fields), status, headers, "application/json")


def error_fields(
    message: str, kind: str, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """Return OpenAI's error object."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def _event(fields: dict[str, Any]) -> str:
    return f"data: {json.dumps(fields)}\n\n"


class ResponseFormat(NamedTuple):
    """Differences between completions and chat completions.

    Attributes:
        prefix: prefix of the response's id.
        kind, chunk_kind: `object` of a response, and of a chunk of a stream.
        text, delta: fields of a choice from its text and tool calls, complete or streamed.
        logprobs: see `completion_logprobs`.
    """

    path: str
    prefix: str
    kind: str
    chunk_kind: str
    text: Callable[[str, list], dict[str, Any]]
    delta: Callable[[str, list], dict[str, Any]]
    logprobs: Callable[[Tokenizer, Scores, int, int | None], dict[str, Any]]


def _text(text: str, _: list) -> dict[str, Any]:
    return {"text": text}


def _message(text: str, calls: list) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
    if calls:
        message |= {"content": text or None, "tool_calls": calls}
    return {"message": message}


def _delta(text: str, calls: list) -> dict[str, Any]:
    delta: dict[str, Any] = {"content": text} if text else {}
    if calls:
        delta["tool_calls"] = [{"index": index, **call} for index, call in enumerate(calls)]
    return {"delta": delta}


COMPLETIONS = ResponseFormat(
    path="/v1/completions",
    prefix="cmpl",
    kind="text_completion",
    chunk_kind="text_completion",
    text=_text,
    delta=_text,
    logprobs=completion_logprobs,
)
CHAT = ResponseFormat(
    path="/v1/chat/completions",
    prefix="chatcmpl",
    kind="chat.completion",
    chunk_kind="chat.completion.chunk",
    text=_message,
    delta=_delta,
    logprobs=chat_logprobs,
)


class _Choice:
    """Text of one response.

    Attributes:
        ids: sampled tokens, without an end token.
        ended: True if an end token was sampled.
        finish_reason: 'stop', 'length' or 'tool_calls' once the response has ended.
    """

    def __init__(self, tokenizer: Tokenizer, stop: list[str], prompt: list[int], budget: int):
        self._stream = TextStream(tokenizer)
        self._until = UntilStop(stop)
        self._budget = budget
        self.prompt = prompt
        self.ids: list[int] = []
        self.ended = False
        self.text = ""
        self.finish_reason = None if budget else "length"

    def add(self, chunk: TokenChunk) -> str:
        """Return the text that may be sent after these tokens."""
        self.ids += chunk.ids
        text = self._until.add(self._stream.add(chunk.ids))
        is_full = len(self.ids) == self._budget
        if chunk.ended or is_full:
            text += self._until.add(self._stream.rest(), last=True)
        self.ended = chunk.ended and not is_full
        if self._until.stopped or self.ended:
            self.finish_reason = "stop"
        elif is_full:
            self.finish_reason = "length"
        self.text += text
        return text


class CompletionResponse:
    """Response to a request, complete or as events.

    Args:
        scorer: scores the tokens if the request asks for log-probs.
        count_tokens: called with the number of new tokens as they arrive.
    """

    def __init__(
        self,
        kind: ResponseFormat,
        request: CompletionRequest,
        responses: Responses,
        model: ServedModel,
        scorer: Scorer,
        count_tokens: Callable[[int], object],
    ):
        self._format = kind
        self._request = request
        self._responses = responses
        self._tokenizer = model.tokenizer
        self._scorer = scorer
        self._count_tokens = count_tokens
        self._choices = [
            _Choice(model.tokenizer, request.stop, prompt, budget)
            for prompt, budget in zip(request.prompts, request.budgets, strict=True)
            for _ in range(request.n)
        ]
        self._header = {
            "id": f"{kind.prefix}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": model.name,
        }

    async def complete(self) -> Response:
        """Return the complete response once every choice has ended."""
        async for _ in self._texts():
            pass
        choices = [await self._complete_choice(i) for i in range(len(self._choices))]
        fields = {"object": self._format.kind, "choices": choices, "usage": self._usage()}
        return json_response(self._header | fields)

    async def events(self) -> AsyncIterator[str]:
        """Yield server-sent events; tool calls and log-probs come with a choice's last chunk."""
        usage = {"usage": None} if self._request.include_usage else {}
        unsent: dict[int, list[int]] = {}
        try:
            for index, choice in enumerate(self._choices):
                if self._format is CHAT:
                    role = {"delta": {"role": "assistant", "content": ""}}
                    yield _event(self._chunk(index, role, None) | usage)
                if self._request.echo:
                    prompt = self._format.delta(self._tokenizer.decode(choice.prompt), [])
                    yield _event(self._chunk(index, prompt, None) | usage)
            async for index, ids, text in self._texts():
                choice = self._choices[index]
                unsent.setdefault(index, []).extend(ids)
                calls: list = []
                if self._request.tools:
                    text, calls = self._split_calls(choice) if choice.finish_reason else ("", [])
                if not (text or choice.finish_reason):
                    continue
                fields = self._format.delta(text, calls)
                if self._request.return_token_ids:
                    fields["token_ids"] = unsent.pop(index)
                if choice.finish_reason:
                    fields["logprobs"] = await self._logprobs(choice)
                yield _event(self._chunk(index, fields, choice.finish_reason) | usage)
            if usage:
                last = {"object": self._format.chunk_kind, "choices": [], "usage": self._usage()}
                yield _event(self._header | last)
            yield "data: [DONE]\n\n"
        except GenerationFailed as error:
            yield _event(error_fields(str(error), "server_error"))

    async def _texts(self) -> AsyncIterator[tuple[int, list[int], str]]:
        """Yield index, tokens and text as they arrive; the last of a choice set finish_reason."""
        for index, choice in enumerate(self._choices):
            if choice.finish_reason:  # the request asks only for the prompt's echo
                yield index, [], ""
        async for chunk in self._responses:
            choice = self._choices[chunk.response]
            self._count_tokens(len(chunk.ids))
            text = choice.add(chunk)
            if choice.finish_reason:
                self._responses.cancel(chunk.response)
            yield chunk.response, chunk.ids, text

    async def _complete_choice(self, index: int) -> dict[str, Any]:
        choice = self._choices[index]
        text, calls = self._split_calls(choice)
        if self._request.echo:
            text = self._tokenizer.decode(choice.prompt) + text
        fields = {
            "index": index,
            **self._format.text(text, calls),
            "logprobs": await self._logprobs(choice),
            "finish_reason": choice.finish_reason,
        }
        if self._request.return_token_ids:
            fields |= {"prompt_token_ids": choice.prompt, "token_ids": choice.ids}
        return fields

    def _chunk(self, index: int, fields: dict[str, Any], reason: str | None) -> dict[str, Any]:
        choice = {"index": index, "logprobs": None, **fields, "finish_reason": reason}
        return self._header | {"object": self._format.chunk_kind, "choices": [choice]}

    def _usage(self) -> dict[str, int]:
        prompt = sum(map(len, self._request.prompts))
        completion = sum(len(choice.ids) for choice in self._choices)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
        }

    def _split_calls(self, choice: _Choice) -> tuple[str, list]:
        """Return a choice's text without its tool calls, and the calls; set its finish_reason."""
        if not self._request.tools:
            return choice.text, []
        text, calls = read_calls(choice.text, self._request.tools)
        if calls:
            choice.finish_reason = "tool_calls"
        return text, calls

    async def _logprobs(self, choice: _Choice) -> dict[str, Any] | None:
        """Return the `logprobs` field of a choice, with the prompt's log-probs for `echo`."""
        if self._request.likeliest is None:
            return None
        ids = choice.prompt + choice.ids
        if choice.ended:
            ids = [*ids, self._tokenizer.end_ids[0]]
        scores = await asyncio.to_thread(self._scorer.score, ids)
        if self._request.echo:
            first_id = choice.prompt[0]
        else:
            first_id = None
            scores = scores.since(len(choice.prompt))
        return self._format.logprobs(self._tokenizer, scores, self._request.likeliest, first_id)
