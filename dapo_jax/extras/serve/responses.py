"""Responses of OpenAI's API, made from the tokens of the generator.

A choice is sent in parts as its tokens come, or as one part at its end.
"""

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest

from dapo_jax.data.prompts.tokenizer import TextStream, Tokenizer
from dapo_jax.extras.serve.errors import RequestError
from dapo_jax.extras.serve.generator import Responses
from dapo_jax.extras.serve.logprobs import Scorer, chat_logprobs, completion_logprobs
from dapo_jax.extras.serve.requests import ServedModel
from dapo_jax.runtime.tool_calls import read_calls
from dapo_jax.types.structs import NewTokens


class _Choice:
    """Tokens of one response so far, with its end token, and the text and ids not sent yet."""

    def __init__(self, tokenizer: Tokenizer, prompt: list[int], budget: int, echo: bool):
        self._end_ids = tokenizer.end_ids
        self.prompt = prompt
        self.ids: list[int] = []
        self.end: list[int] = []
        self.finish_reason = None if budget else "length"
        self.unsent_ids: list[int] = []
        self.unsent_text = ""
        if echo:  # but the beginning of a character that the response may complete
            stream = TextStream(tokenizer)
            pieces = [stream.add([token]) for token in prompt]
            self.unsent_text = "".join(pieces) + ("" if budget else stream.rest())

    def add(self, new: NewTokens) -> None:
        has_end = new.stopped and new.ids and new.ids[-1] in self._end_ids
        ids, self.end = (new.ids[:-1], new.ids[-1:]) if has_end else (new.ids, [])
        self.ids += ids
        self.unsent_ids += ids
        self.unsent_text += new.text
        if new.ended:
            self.finish_reason = "stop" if new.stopped else "length"

    def take(self) -> tuple[str, list[int]]:
        """Return the unsent text and ids, and mark them as sent."""
        unsent = self.unsent_text, self.unsent_ids
        self.unsent_text, self.unsent_ids = "", []
        return unsent


class CompletionResponse:
    """Response to a request, complete or as events."""

    def __init__(self, responses: Responses, model: ServedModel, scorer: Scorer, *, chat: bool):
        self._is_chat = chat
        self._request = request = responses.request
        self._responses = responses
        self._tokenizer = model.tokenizer
        self._scorer = scorer
        self._choices = [
            _Choice(model.tokenizer, prompt, budget, request.echo)
            for prompt, budget in zip(request.prompts, request.budgets, strict=True)
            for _ in range(request.fields.n)
        ]
        self._header = {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}",
            "object": "chat.completion" if chat else "text_completion",
            "created": int(time.time()),
            "model": model.config.served_name,
        }

    async def complete(self, http: HttpRequest) -> dict[str, Any]:
        """Return the complete response once every choice has ended, unless the client leaves."""
        async for index, new in self._responses:
            self._choices[index].add(new)
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
            async for index, new in self._responses:
                choice = self._choices[index]
                choice.add(new)
                if choice.finish_reason or (choice.unsent_text and not self._request.tools):
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
        reason, logprobs = choice.finish_reason, None
        called: dict[str, Any] = {}
        if request.tools:
            text, calls = read_calls(text, request.tools)
            if calls:
                reason, called = "tool_calls", {"tool_calls": calls}
        if reason and request.likeliest is not None:
            logprobs = await asyncio.to_thread(self._score, choice, request.likeliest)
        fields: dict[str, Any] = {"index": index, "finish_reason": reason, "logprobs": logprobs}
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

    def _score(self, choice: _Choice, likeliest: int) -> dict[str, Any]:
        """Return the log-probs of a choice that has ended, in the form of its API."""
        ids = choice.prompt + choice.ids + choice.end
        first = 0 if self._request.echo else len(choice.prompt)
        scores = self._scorer.score(ids, likeliest)[first:]
        form = chat_logprobs if self._is_chat else completion_logprobs
        return form(self._tokenizer, ids[:first], scores)

    def _usage(self) -> dict[str, int]:
        prompt = sum(map(len, self._request.prompts))
        completion = sum(len(choice.ids) for choice in self._choices)
        counts = {"prompt_tokens": prompt, "completion_tokens": completion}
        return counts | {"total_tokens": prompt + completion}


def _event(fields: dict[str, Any]) -> str:
    return f"data: {json.dumps(fields)}\n\n"
