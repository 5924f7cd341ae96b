"""Responses of OpenAI's API, made from the tokens of the generator.

A response is a stream of pieces of its choices. They are sent as they come, or joined.
"""

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator, Callable
from typing import Any, NamedTuple

from dapo_jax.commands.serve.errors import RequestError
from dapo_jax.commands.serve.generator import Responses, TokenChunk
from dapo_jax.commands.serve.logprobs import Score, Scorer, chat_logprobs, completion_logprobs
from dapo_jax.commands.serve.requests import CompletionRequest, ServedModel
from dapo_jax.data.prompts.tokenizer import TextStream, Tokenizer, UntilStop
from dapo_jax.runtime.tool_calls import read_calls


class ResponseFormat(NamedTuple):
    """Differences between completions and chat completions.

    Attributes:
        prefix: prefix of the response's id.
        kind, chunk_kind: `object` of a response, and of a chunk of a stream.
        whole, delta: fields of a choice from its text and tool calls, complete or streamed.
    """

    path: str
    prefix: str
    kind: str
    chunk_kind: str
    whole: Callable[[str, list], dict[str, Any]]
    delta: Callable[[str, list], dict[str, Any]]
    logprobs: Callable[[Tokenizer, list[Score]], dict[str, Any]]


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
    whole=_text,
    delta=_text,
    logprobs=completion_logprobs,
)
CHAT = ResponseFormat(
    path="/v1/chat/completions",
    prefix="chatcmpl",
    kind="chat.completion",
    chunk_kind="chat.completion.chunk",
    whole=_message,
    delta=_delta,
    logprobs=chat_logprobs,
)


class _Piece(NamedTuple):
    """Part of a choice; its last piece has the finish_reason, log-probs and tool calls."""

    text: str = ""
    ids: list[int] = []
    calls: list[dict[str, Any]] = []
    logprobs: dict[str, Any] | None = None
    finish_reason: str | None = None


class _Choice:
    """Tokens and text of one response so far.

    Attributes:
        ids: sampled tokens, without an end token.
        ended: True if an end token was sampled.
        finish_reason: 'stop' or 'length' once the response has ended.
        unsent_ids, unsent_text: what no piece contains yet.
    """

    def __init__(self, tokenizer: Tokenizer, stop: list[str], prompt: list[int], budget: int):
        self._stream = TextStream(tokenizer)
        self._until = UntilStop(stop)
        self._budget = budget
        self.prompt = prompt
        self.ids: list[int] = []
        self.ended = False
        self.finish_reason = None if budget else "length"
        self.unsent_ids: list[int] = []
        self.unsent_text = ""

    def add(self, chunk: TokenChunk) -> None:
        self.ids += chunk.ids
        self.unsent_ids += chunk.ids
        self.unsent_text += self._until.add(self._stream.add(chunk.ids))
        is_full = len(self.ids) == self._budget
        self.ended = chunk.ended and not is_full
        if self.ended or is_full:
            self.unsent_text += self._until.add(self._stream.rest(), last=True)
        if self._until.stopped or self.ended:
            self.finish_reason = "stop"
        elif is_full:
            self.finish_reason = "length"


class CompletionResponse:
    """Response to a request, complete or as events.

    Args:
        responses: of the generator, to `request.responses()`.
        scorer: scores the tokens if the request asks for log-probs.

    Attributes:
        usage: numbers of tokens so far.
    """

    def __init__(
        self,
        kind: ResponseFormat,
        request: CompletionRequest,
        responses: Responses,
        model: ServedModel,
        scorer: Scorer,
    ):
        self._format = kind
        self._request = request
        self._responses = responses
        self._tokenizer = model.tokenizer
        self._scorer = scorer
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

    @property
    def usage(self) -> dict[str, int]:
        prompt = sum(map(len, self._request.prompts))
        completion = sum(len(choice.ids) for choice in self._choices)
        counts = {"prompt_tokens": prompt, "completion_tokens": completion}
        return counts | {"total_tokens": prompt + completion}

    async def complete(self) -> dict[str, Any]:
        """Return the complete response once every choice has ended."""
        pieces: list[list[_Piece]] = [[] for _ in self._choices]
        async for index, piece in self._pieces():
            pieces[index].append(piece)
        choices = []
        for index, choice in enumerate(self._choices):
            text = "".join(piece.text for piece in pieces[index])
            whole = pieces[index][-1]._replace(text=text, ids=choice.ids)
            fields = self._choice_fields(index, whole, self._format.whole)
            if self._request.return_token_ids:
                fields["prompt_token_ids"] = choice.prompt
            choices.append(fields)
        fields = {"object": self._format.kind, "choices": choices, "usage": self.usage}
        return self._header | fields

    async def events(self) -> AsyncIterator[str]:
        """Yield server-sent events; tool calls and log-probs come with a choice's last chunk."""
        usage = {"usage": None} if self._request.include_usage else {}
        chunk = self._header | {"object": self._format.chunk_kind} | usage
        try:
            if self._format is CHAT:
                role = {"delta": {"role": "assistant", "content": ""}}
                for index in range(len(self._choices)):
                    fields = self._choice_fields(index, _Piece(), lambda *_: role)
                    yield _event(chunk | {"choices": [fields]})
            async for index, piece in self._pieces():
                fields = self._choice_fields(index, piece, self._format.delta)
                yield _event(chunk | {"choices": [fields]})
            if usage:
                yield _event(chunk | {"choices": [], "usage": self.usage})
            yield "data: [DONE]\n\n"
        except RequestError as error:
            yield _event(error.fields())

    async def _pieces(self) -> AsyncIterator[tuple[int, _Piece]]:
        """Yield index and piece of the choices as their tokens arrive."""
        for index, choice in enumerate(self._choices):
            if self._request.echo:
                yield index, _Piece(self._tokenizer.decode(choice.prompt))
            if choice.finish_reason:  # the request asks only for the prompt's echo
                yield index, await self._next_piece(choice)
        async for chunk in self._responses:
            choice = self._choices[chunk.response]
            choice.add(chunk)
            if choice.finish_reason:
                self._responses.cancel(chunk.response)
            if choice.finish_reason or (choice.unsent_text and not self._request.tools):
                yield chunk.response, await self._next_piece(choice)

    async def _next_piece(self, choice: _Choice) -> _Piece:
        """Return the unsent part of a choice."""
        text, ids, reason = choice.unsent_text, choice.unsent_ids, choice.finish_reason
        choice.unsent_text, choice.unsent_ids = "", []
        calls = []
        if self._request.tools:
            text, calls = read_calls(text, self._request.tools)
        logprobs = None
        if reason and self._request.likeliest is not None:
            scored = choice.prompt + choice.ids
            if choice.ended:
                scored = [*scored, self._tokenizer.end_ids[0]]
            scores = await asyncio.to_thread(self._scorer.score, scored, self._request.likeliest)
            first = 0 if self._request.echo else len(choice.prompt)
            logprobs = self._format.logprobs(self._tokenizer, scores[first:])
        return _Piece(text, ids, calls, logprobs, "tool_calls" if calls else reason)

    def _choice_fields(
        self, index: int, piece: _Piece, format_text: Callable[[str, list], dict[str, Any]]
    ) -> dict[str, Any]:
        fields = {
            "index": index,
            **format_text(piece.text, piece.calls),
            "logprobs": piece.logprobs,
            "finish_reason": piece.finish_reason,
        }
        return fields | ({"token_ids": piece.ids} if self._request.return_token_ids else {})


def _event(fields: dict[str, Any]) -> str:
    return f"data: {json.dumps(fields)}\n\n"
