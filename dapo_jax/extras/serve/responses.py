"""Responses of OpenAI's API, made from the tokens of the generator.

A response is a stream of pieces of its choices. They are sent as they come, or joined.
"""

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

from dapo_jax.data.prompts.tokenizer import TextStream, Tokenizer
from dapo_jax.extras.serve.errors import RequestError
from dapo_jax.extras.serve.generator import Responses
from dapo_jax.extras.serve.logprobs import Scorer, chat_logprobs, completion_logprobs
from dapo_jax.extras.serve.requests import ServedModel
from dapo_jax.runtime.tool_calls import read_calls
from dapo_jax.types.structs import NewTokens


class _Piece(NamedTuple):
    """Part of a choice, or the whole; the last one has finish_reason, log-probs and tool calls."""

    text: str
    ids: list[int]
    finish_reason: str | None
    calls: list[dict[str, Any]] = []
    logprobs: dict[str, Any] | None = None


class _Choice:
    """Tokens and text of one response so far; `end`: the end token that was sampled."""

    def __init__(self, tokenizer: Tokenizer, prompt: list[int], budget: int, echo: bool):
        self._end_ids = tokenizer.end_ids
        self.prompt = prompt
        self.ids: list[int] = []
        self.end: int | None = None
        self.finish_reason = None if budget else "length"
        self.unsent_ids: list[int] = []
        self.unsent_text = ""
        if echo:  # but the beginning of a character that the response may complete
            stream = TextStream(tokenizer)
            pieces = [stream.add([token]) for token in prompt]
            self.unsent_text = "".join(pieces) + ("" if budget else stream.rest())

    def add(self, new: NewTokens) -> None:
        ids = new.ids
        if new.stopped and ids and ids[-1] in self._end_ids:
            *ids, self.end = ids
        self.ids += ids
        self.unsent_ids += ids
        self.unsent_text += new.text
        if new.ended:
            self.finish_reason = "stop" if new.stopped else "length"


class CompletionResponse:
    """Response to a request, complete or as events."""

    def __init__(
        self,
        responses: Responses,
        model: ServedModel,
        scorer: Scorer,
        *,
        chat: bool,
    ):
        self._is_chat = chat
        self._request = request = responses.request
        self._responses = responses
        self._model = model
        self._tokenizer = model.tokenizer
        self._scorer = scorer
        self._choices = [
            _Choice(model.tokenizer, prompt, budget, request.echo)
            for prompt, budget in zip(request.prompts, request.budgets, strict=True)
            for _ in range(request.n)
        ]
        self._start = time.monotonic()
        self._header = {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}",
            "object": "chat.completion" if chat else "text_completion",
            "created": int(time.time()),
            "model": model.name,
        }

    async def complete(self) -> dict[str, Any]:
        """Return the complete response once every choice has ended."""
        try:
            async for index, new in self._responses:
                self._choices[index].add(new)
            choices = []
            for index, choice in enumerate(self._choices):
                piece = await self._next_piece(choice)
                fields: dict[str, Any] = {"text": piece.text}
                if self._is_chat:
                    content = None if piece.calls and not piece.text else piece.text
                    message = {"role": "assistant", "content": content, "refusal": None}
                    fields = {"message": message | _calls(piece.calls)}
                if self._request.return_token_ids:
                    fields["prompt_token_ids"] = choice.prompt
                choices.append(self._fields(index, piece, fields))
            return self._header | {"choices": choices, "usage": self._usage()}
        finally:
            self._log()

    async def events(self) -> AsyncIterator[str]:
        """Yield server-sent events; tool calls and log-probs come with a choice's last chunk."""
        header = self._header
        if self._is_chat:
            header = header | {"object": "chat.completion.chunk"}
        if self._request.include_usage:
            header = header | {"usage": None}
        try:
            for index, choice in enumerate(self._choices):
                if self._is_chat:
                    role = {"delta": {"role": "assistant", "content": ""}}
                    first = self._fields(index, _Piece("", [], None), role)
                    yield _event(header | {"choices": [first]})
                elif self._request.echo:  # and perhaps only this
                    yield _event(header | {"choices": [await self._chunk(index, choice)]})
            async for index, new in self._responses:
                choice = self._choices[index]
                choice.add(new)
                if choice.finish_reason or (choice.unsent_text and not self._request.tools):
                    yield _event(header | {"choices": [await self._chunk(index, choice)]})
            if self._request.include_usage:
                yield _event(header | {"choices": [], "usage": self._usage()})
            yield "data: [DONE]\n\n"
        except RequestError as error:
            yield _event(error.fields())
        finally:
            self._log()

    async def _chunk(self, index: int, choice: _Choice) -> dict[str, Any]:
        """Return the next piece of a choice as a chunk."""
        piece = await self._next_piece(choice)
        if not self._is_chat:
            return self._fields(index, piece, {"text": piece.text})
        delta: dict[str, Any] = {"content": piece.text} if piece.text else {}
        calls = [{"index": i, **call} for i, call in enumerate(piece.calls)]
        return self._fields(index, piece, {"delta": delta | _calls(calls)})

    async def _next_piece(self, choice: _Choice) -> _Piece:
        """Return the unsent part of a choice, and mark it as sent."""
        piece = _Piece(choice.unsent_text, choice.unsent_ids, choice.finish_reason)
        choice.unsent_text, choice.unsent_ids = "", []
        if self._request.tools:
            text, calls = read_calls(piece.text, self._request.tools)
            reason = "tool_calls" if calls else piece.finish_reason
            piece = piece._replace(text=text, calls=calls, finish_reason=reason)
        if choice.finish_reason and self._request.likeliest is not None:
            scored = choice.prompt + choice.ids + ([] if choice.end is None else [choice.end])
            scores = await asyncio.to_thread(self._scorer.score, scored, self._request.likeliest)
            first = 0 if self._request.echo else len(choice.prompt)
            format_logprobs = chat_logprobs if self._is_chat else completion_logprobs
            logprobs = format_logprobs(self._tokenizer, scored[:first], scores[first:])
            piece = piece._replace(logprobs=logprobs)
        return piece

    def _fields(self, index: int, piece: _Piece, fields: dict[str, Any]) -> dict[str, Any]:
        """Return a choice, or a chunk of one, with these fields for its text."""
        if self._request.return_token_ids:
            fields["token_ids"] = piece.ids
        ends = {"logprobs": piece.logprobs, "finish_reason": piece.finish_reason}
        return {"index": index, **fields, **ends}

    def _log(self) -> None:
        """Print a line about the request, unless `log_requests` is off."""
        if not self._model.config.log_requests:
            return
        ending = "" if all(choice.finish_reason for choice in self._choices) else ", not finished"
        prompt, response, _ = self._usage().values()
        tokens = f"{prompt} prompt tokens, {response} response tokens"
        seconds = time.monotonic() - self._start
        print(f"{self._header['id']}: {tokens}, {seconds:.2f} s{ending}", flush=True)

    def _usage(self) -> dict[str, int]:
        prompt = sum(map(len, self._request.prompts))
        completion = sum(len(choice.ids) for choice in self._choices)
        counts = {"prompt_tokens": prompt, "completion_tokens": completion}
        return counts | {"total_tokens": prompt + completion}


def _event(fields: dict[str, Any]) -> str:
    return f"data: {json.dumps(fields)}\n\n"


def _calls(calls: list[dict[str, Any]]) -> dict[str, Any]:
    return {"tool_calls": calls} if calls else {}
