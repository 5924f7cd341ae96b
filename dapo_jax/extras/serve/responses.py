"""Responses of OpenAI's API, made from the tokens of the generator.

A choice is sent in parts as its tokens come, or as one part at its end.
"""

import asyncio
import dataclasses
import json
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest

from dapo_jax.data.prompts.tokenizer import TextStream
from dapo_jax.extras.serve.fields import RequestError
from dapo_jax.extras.serve.generator import Generator
from dapo_jax.extras.serve.logprobs import Score, chat_logprobs, completion_logprobs
from dapo_jax.extras.serve.policy import ServedModel
from dapo_jax.extras.serve.requests import Chat, CompletionRequest
from dapo_jax.extras.serve.thread import FAILURE
from dapo_jax.runtime.tool_calls import read_calls
from dapo_jax.types.structs import NewTokens

Scoring = Callable[[Sequence[int], int], list[Score]]


@dataclasses.dataclass
class _Choice:
    """One response so far: its text after what is echoed, its tokens, and how much is sent."""

    prompt: list[int]
    text: str
    finish_reason: str | None
    ids: list[int] = dataclasses.field(default_factory=list)
    end: list[int] = dataclasses.field(default_factory=list)  # the end token
    sent: tuple[int, int] = (0, 0)  # characters and ids

    def add(self, new: NewTokens, end_ids: Sequence[int]) -> None:
        has_end = new.stopped and new.ids and new.ids[-1] in end_ids
        ids, self.end = (new.ids[:-1], new.ids[-1:]) if has_end else (new.ids, [])
        self.ids += ids
        self.text += new.text
        if new.ended:
            self.finish_reason = "stop" if new.stopped else "length"

    def take(self) -> tuple[str, list[int]]:
        """Return the text and ids that are not sent, and mark them as sent."""
        text, ids = self.sent
        self.sent = len(self.text), len(self.ids)
        return self.text[text:], self.ids[ids:]


class CompletionResponse:
    """Response to a request, complete or as events; `score` is `Scorer.score` of the policy."""

    def __init__(
        self, request: CompletionRequest, model: ServedModel, generator: Generator, score: Scoring
    ):
        self._request, self._tokenizer, self._score = request, model.tokenizer, score
        self._is_chat = chat = isinstance(request.fields, Chat)
        self._choices = [
            _Choice(prompt, self._echo(prompt, budget), None if budget else "length")
            for prompt, budget in zip(request.prompts, request.budgets, strict=True)
            for _ in range(request.fields.n)
        ]
        self._chunks: asyncio.Queue[tuple[int, NewTokens] | None] = asyncio.Queue()
        generator.submit(request, self._chunks.put_nowait)
        self._header = {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}",
            "object": "chat.completion" if chat else "text_completion",
            "created": int(time.time()),
            "model": model.config.served_name,
        }

    def _echo(self, prompt: list[int], budget: int) -> str:
        """Return the text of an echoed prompt, but a character that the response may complete."""
        if not self._request.echo:
            return ""
        stream = TextStream(self._tokenizer)
        pieces = [stream.add([token]) for token in prompt]
        return "".join(pieces) + ("" if budget else stream.rest())

    async def _changed(self) -> AsyncIterator[int]:
        """Yield the index of a choice each time that it has got tokens. Raise `RequestError`."""
        while not all(choice.finish_reason for choice in self._choices):
            chunk = await self._chunks.get()
            if chunk is None:
                raise RequestError(FAILURE, status=500)
            self._choices[chunk[0]].add(chunk[1], self._tokenizer.end_ids)
            yield chunk[0]
            await asyncio.sleep(0)  # let other tasks run even if many chunks are ready

    async def complete(self, http: HttpRequest) -> dict[str, Any]:
        """Return the complete response once every choice has ended, unless the client leaves."""
        async for _ in self._changed():
            if await http.is_disconnected():
                raise ClientDisconnect
        choices = [await self._part(i, is_whole=True) for i in range(len(self._choices))]
        return self._header | {"choices": choices, "usage": self._usage()}

    async def events(self) -> AsyncIterator[str]:
        """Yield server-sent events; tool calls and log-probs come with a choice's last chunk."""
        header, options = self._header, self._request.fields.stream_options
        if self._is_chat:
            header = header | {"object": "chat.completion.chunk"}
        if options and options.include_usage:
            header = header | {"usage": None}
        try:
            for index in range(len(self._choices)) if self._is_chat or self._request.echo else ():
                first = await self._part(index)  # and perhaps the only one
                if self._is_chat:
                    first["delta"] = {"role": "assistant", "content": ""}
                yield _event(header | {"choices": [first]})
            async for index in self._changed():
                choice = self._choices[index]
                has_text = len(choice.text) > choice.sent[0] and not self._request.tools
                if choice.finish_reason or has_text:
                    yield _event(header | {"choices": [await self._part(index)]})
            if "usage" in header:
                yield _event(header | {"choices": [], "usage": self._usage()})
            yield "data: [DONE]\n\n"
        except RequestError as error:
            yield _event(error.fields())

    async def _part(self, index: int, is_whole: bool = False) -> dict[str, Any]:
        """Return the unsent part of a choice, the whole or a chunk, and mark it as sent."""
        choice, request = self._choices[index], self._request
        text, ids = choice.take()
        fields: dict[str, Any] = {"index": index, "finish_reason": choice.finish_reason}
        called: dict[str, Any] = {}
        if request.tools:
            text, calls = read_calls(text, request.tools)
            if calls:
                fields["finish_reason"], called = "tool_calls", {"tool_calls": calls}
        fields["logprobs"] = None
        if choice.finish_reason and request.likeliest is not None:
            fields["logprobs"] = await asyncio.to_thread(self._logprobs, choice, request.likeliest)
        if not self._is_chat:
            fields["text"] = text
        elif is_whole:
            message = {"role": "assistant", "content": None if called and not text else text}
            fields["message"] = message | {"refusal": None} | called
        else:
            for number, call in enumerate(called.get("tool_calls", ())):
                call["index"] = number
            fields["delta"] = ({"content": text} if text else {}) | called
        if request.fields.return_token_ids:
            fields["token_ids"] = ids
            if is_whole:
                fields["prompt_token_ids"] = choice.prompt
        return fields

    def _logprobs(self, choice: _Choice, likeliest: int) -> dict[str, Any]:
        """Return the log-probs of a choice that has ended, in the form of its API."""
        ids = choice.prompt + choice.ids + choice.end
        first = 0 if self._request.echo else len(choice.prompt)
        scores = self._score(ids, likeliest)[first:]
        form = chat_logprobs if self._is_chat else completion_logprobs
        return form(self._tokenizer, ids[:first], scores)

    def _usage(self) -> dict[str, int]:
        prompt = sum(map(len, self._request.prompts))
        completion = sum(len(choice.ids) for choice in self._choices)
        counts = {"prompt_tokens": prompt, "completion_tokens": completion}
        return counts | {"total_tokens": prompt + completion}


def _event(fields: dict[str, Any]) -> str:
    return f"data: {json.dumps(fields)}\n\n"
