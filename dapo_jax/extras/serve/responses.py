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
from dapo_jax.extras.serve.generator import FAILURE, Generator
from dapo_jax.extras.serve.logprobs import Score, chat_logprobs, completion_logprobs
from dapo_jax.extras.serve.policy import ServedModel
from dapo_jax.extras.serve.requests import Chat, CompletionRequest
from dapo_jax.runtime.tool_calls import read_calls
from dapo_jax.types.structs import NewTokens

Scoring = Callable[[Sequence[int], int], list[Score]]


@dataclasses.dataclass
class _Choice:
    """One response so far: its text after what is echoed, its tokens, and how much is sent."""

    index: int
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


class CompletionResponse:
    """Response to a request, complete or as events; `score` is `Scorer.score` of the policy."""

    def __init__(
        self, request: CompletionRequest, model: ServedModel, generator: Generator, score: Scoring
    ):
        self._request, self._tokenizer, self._score = request, model.tokenizer, score
        self._fields = request.fields
        self._is_chat = isinstance(request.fields, Chat)
        pairs = (pair for pair in request.prompts for _ in range(request.fields.n))
        self._choices = [
            _Choice(index, prompt, self._echo(prompt, budget), None if budget else "length")
            for index, (prompt, budget) in enumerate(pairs)
        ]
        self._chunks: asyncio.Queue[tuple[int, NewTokens] | None] = asyncio.Queue()
        generator.submit(request, self._chunks.put_nowait)
        self._header = {
            "id": f"{'chatcmpl' if self._is_chat else 'cmpl'}-{uuid.uuid4().hex}",
            "object": "chat.completion" if self._is_chat else "text_completion",
            "created": int(time.time()),
            "model": model.config.served_name,
        }

    def _echo(self, prompt: list[int], budget: int) -> str:
        """Return the text of an echoed prompt, but a character that the response may complete."""
        if not self._fields.echo:
            return ""
        stream = TextStream(self._tokenizer)
        pieces = [stream.add([token]) for token in prompt]
        return "".join(pieces) + ("" if budget else stream.rest())

    async def _changed(self) -> AsyncIterator[_Choice]:
        """Yield choices that sample nothing, then each that gets tokens. Raise `RequestError`."""
        for choice in self._choices:
            if choice.finish_reason:
                yield choice
        while not all(choice.finish_reason for choice in self._choices):
            chunk = await self._chunks.get()
            if chunk is None:
                raise RequestError(FAILURE, status=500)
            index, new = chunk
            self._choices[index].add(new, self._tokenizer.end_ids)
            yield self._choices[index]
            await asyncio.sleep(0)  # let other tasks run even if many chunks are ready

    async def complete(self, http: HttpRequest) -> dict[str, Any]:
        """Return the complete response once every choice has ended, unless the client leaves."""
        async for _ in self._changed():
            if await http.is_disconnected():
                raise ClientDisconnect
        choices = []
        for choice in self._choices:
            part = await self._part(choice)
            if self._is_chat:
                message = {"role": "assistant", "content": None, "refusal": None}
                part["message"] = message | part.pop("delta")
            if self._fields.return_token_ids:
                part["prompt_token_ids"] = choice.prompt
            choices.append(part)
        return self._header | {"choices": choices, "usage": self._usage()}

    async def events(self) -> AsyncIterator[str]:
        """Yield server-sent events; tool calls and log-probs come with a choice's last chunk."""
        header, options = self._header, self._fields.stream_options
        if self._is_chat:
            header = header | {"object": "chat.completion.chunk"}
        if options and options.include_usage:
            header = header | {"usage": None}
        try:
            for choice in self._choices if self._is_chat else ():
                first = {"index": choice.index, "delta": {"role": "assistant", "content": ""}}
                yield _event(header | {"choices": [first | {"finish_reason": None}]})
            async for choice in self._changed():
                has_text = len(choice.text) > choice.sent[0] and not self._fields.offered
                if choice.finish_reason or has_text:
                    part = await self._part(choice)
                    for number, call in enumerate(part.get("delta", {}).get("tool_calls", ())):
                        call["index"] = number
                    yield _event(header | {"choices": [part]})
            if "usage" in header:
                yield _event(header | {"choices": [], "usage": self._usage()})
            yield "data: [DONE]\n\n"
        except RequestError as error:
            yield _event(error.fields())

    async def _part(self, choice: _Choice) -> dict[str, Any]:
        """Return the part of a choice that is not sent, and mark it as sent."""
        (characters, count), fields = choice.sent, self._fields
        choice.sent = len(choice.text), len(choice.ids)
        text, reason, calls, logprobs = choice.text[characters:], choice.finish_reason, [], None
        if fields.offered:
            text, calls = read_calls(text, fields.offered)
        if reason and fields.likeliest is not None:
            logprobs = await asyncio.to_thread(self._logprobs, choice, fields.likeliest)
        if not self._is_chat:
            content: dict[str, Any] = {"text": text}
        else:
            content = {"delta": {"content": text} if text or not calls else {}}
        if calls:
            reason = "tool_calls"
            content["delta"]["tool_calls"] = calls
        if fields.return_token_ids:
            content["token_ids"] = choice.ids[count:]
        return {"index": choice.index, "finish_reason": reason, "logprobs": logprobs} | content

    def _logprobs(self, choice: _Choice, likeliest: int) -> dict[str, Any]:
        """Return the log-probs of a choice that has ended, in the form of its API."""
        ids = choice.prompt + choice.ids + choice.end
        first = 0 if self._fields.echo else len(choice.prompt)
        scores = self._score(ids, likeliest)[first:]
        form = chat_logprobs if self._is_chat else completion_logprobs
        return form(self._tokenizer, ids[:first], scores)

    def _usage(self) -> dict[str, int]:
        prompt = sum(len(prompt) for prompt, _ in self._request.prompts)
        completion = sum(len(choice.ids) for choice in self._choices)
        counts = {"prompt_tokens": prompt, "completion_tokens": completion}
        return counts | {"total_tokens": prompt + completion}


def _event(fields: dict[str, Any]) -> str:
    return f"data: {json.dumps(fields)}\n\n"
