"""Answers of OpenAI's protocol, whole or as events, made from the tokens of responses."""

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from typing import Any, NamedTuple

from starlette.responses import Response

from dapo_jax.commands.serve.generator import GenerationFailed, Responses, TokenChunk
from dapo_jax.commands.serve.openai_logprobs import chat_logprobs, completion_logprobs
from dapo_jax.commands.serve.openai_requests import CompletionRequest, ServedModel
from dapo_jax.commands.serve.scoring import Scorer, Scores
from dapo_jax.data.prompts.tokenizer import TextStream, Tokenizer, UntilStop
from dapo_jax.runtime.tool_calls import read_calls


class AnswerFormat(NamedTuple):
    """Differences between the answers of completions and of chat completions.

    Attributes:
        path: path of the URL.
        prefix: prefix of an answer's id.
        whole, chunk: value of `object` in an answer, and in a chunk of a stream.
        message, piece: fields of a choice that hold its text and calls, whole or in pieces.
        begin: fields of a choice in a chunk before its first text.
        logprobs: field `logprobs` of scores and the number of likeliest tokens that are shown.
    """

    path: str
    prefix: str
    whole: str
    chunk: str
    message: Callable[[str, list], dict[str, Any]]
    piece: Callable[[str, list], dict[str, Any]]
    begin: dict[str, Any] | None
    logprobs: Callable[[Tokenizer, Scores, int, int | None], dict[str, Any]]


def _message(text: str, calls: list) -> dict[str, Any]:
    content = text if text or not calls else None
    message = {"role": "assistant", "content": content, "refusal": None}
    return {"message": message | ({"tool_calls": calls} if calls else {})}


def _delta(text: str, calls: list) -> dict[str, Any]:
    numbered = [{"index": index, **call} for index, call in enumerate(calls)]
    content = {"content": text} if text else {}
    return {"delta": content | ({"tool_calls": numbered} if calls else {})}


COMPLETIONS = AnswerFormat(
    "/v1/completions",
    "cmpl",
    "text_completion",
    "text_completion",
    message=lambda text, _: {"text": text},
    piece=lambda text, _: {"text": text},
    begin=None,
    logprobs=completion_logprobs,
)
CHAT = AnswerFormat(
    "/v1/chat/completions",
    "chatcmpl",
    "chat.completion",
    "chat.completion.chunk",
    message=_message,
    piece=_delta,
    begin={"delta": {"role": "assistant", "content": ""}},
    logprobs=chat_logprobs,
)


class _Choice:
    """Text of one response.

    Attributes:
        prompt: ids of its prompt.
        ids: those drawn so far, without an end token.
        ended: true where an end token was drawn.
        text: all text so far.
        finish_reason: 'stop', 'length' or 'tool_calls', once the response has ended.
    """

    def __init__(self, tokenizer: Tokenizer, request: CompletionRequest, prompt: int):
        self._stream, self._until = TextStream(tokenizer), UntilStop(request.stop)
        self.prompt, self._budget = request.prompts[prompt], request.budgets[prompt]
        self.ids, self.ended, self.text = list[int](), False, ""
        self.finish_reason: str | None = None if self._budget else "length"

    def add(self, chunk: TokenChunk) -> str:
        """Text that may be sent after these tokens."""
        self.ids += chunk.ids
        text = self._until.add(self._stream.add(chunk.ids))
        full = len(self.ids) == self._budget
        if chunk.ended or full:
            text += self._until.add(self._stream.rest(), last=True)
        self.ended = chunk.ended and not full
        if self._until.stopped or self.ended:
            self.finish_reason = "stop"
        elif full:
            self.finish_reason = "length"
        self.text += text
        return text


class Answer:
    """Answer to a request, whole or as events, made from its responses.

    Args:
        scorer: of the tokens whose log-probs the request asks for.
        drawn: is called with the number of new tokens, as they are drawn.
    """

    def __init__(
        self,
        form: AnswerFormat,
        request: CompletionRequest,
        responses: Responses,
        model: ServedModel,
        scorer: Scorer,
        drawn: Callable[[int], object],
    ):
        self._form, self._request, self._responses = form, request, responses
        self._tokenizer, self._scorer, self._drawn = model.tokenizer, scorer, drawn
        count = len(request.prompts) * request.n
        self.choices = [_Choice(model.tokenizer, request, i // request.n) for i in range(count)]
        self._named = {
            "id": f"{form.prefix}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": model.name,
        }

    async def _texts(self) -> AsyncIterator[tuple[_Choice, TokenChunk, str]]:
        """Tokens and text as they come; the last of a choice come with a finish_reason."""
        for index, choice in enumerate(self.choices):
            if choice.finish_reason:  # nothing is drawn, `echo` alone is asked for
                yield choice, TokenChunk(index, [], False), ""
        async for chunk in self._responses:
            choice = self.choices[chunk.response]
            self._drawn(len(chunk.ids))
            text = choice.add(chunk)
            if choice.finish_reason:
                self._responses.cancel(chunk.response)
            yield choice, chunk, text

    def _usage(self) -> dict[str, int]:
        prompt = sum(map(len, self._request.prompts))
        completion = sum(len(choice.ids) for choice in self.choices)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
        }

    def _calls(self, choice: _Choice, text: str) -> tuple[str, list]:
        """Text without calls of tools, and the calls; `choice` has ended by them if there are."""
        if not self._request.tools:
            return text, []
        text, calls = read_calls(text, self._request.tools)
        if calls:
            choice.finish_reason = "tool_calls"
        return text, calls

    async def _logprobs(self, choice: _Choice) -> dict[str, Any] | None:
        """Field `logprobs` of a choice: of its response and, for `echo`, of its prompt."""
        likeliest = self._request.likeliest
        if likeliest is None:
            return None
        ids = [*choice.prompt, *choice.ids]
        ends = [self._tokenizer.end_ids[0]] * choice.ended
        scores = await asyncio.to_thread(self._scorer.score, [*ids, *ends])
        first = 0 if self._request.echo else len(choice.prompt)
        head = choice.prompt[0] if self._request.echo else None
        return self._form.logprobs(self._tokenizer, scores.since(first), likeliest, head)

    async def _whole_choice(self, index: int, choice: _Choice) -> dict[str, Any]:
        text, calls = self._calls(choice, choice.text)
        if self._request.echo:
            text = self._tokenizer.decode(choice.prompt) + text
        fields = {
            "index": index,
            **self._form.message(text, calls),
            "logprobs": await self._logprobs(choice),
            "finish_reason": choice.finish_reason,
        }
        if self._request.return_token_ids:
            fields |= {"prompt_token_ids": choice.prompt, "token_ids": choice.ids}
        return fields

    async def whole(self) -> Response:
        """Whole answer, once every choice has ended."""
        async for _ in self._texts():
            pass
        choices = [await self._whole_choice(i, choice) for i, choice in enumerate(self.choices)]
        fields = {"object": self._form.whole, "choices": choices, "usage": self._usage()}
        return json_answer(self._named | fields)

    def _chunk(self, index: int, fields: dict[str, Any], reason: str | None) -> dict[str, Any]:
        choice = {"index": index, "logprobs": None, **fields, "finish_reason": reason}
        return self._named | {"object": self._form.chunk, "choices": [choice]}

    def _heads(self) -> Iterator[dict[str, Any]]:
        """Chunks before the first text: the beginning of a message, and the prompt of `echo`."""
        for index, choice in enumerate(self.choices):
            if self._form.begin:
                yield self._chunk(index, self._form.begin, None)
            if self._request.echo:
                prompt = self._tokenizer.decode(choice.prompt)
                yield self._chunk(index, self._form.piece(prompt, []), None)

    async def events(self) -> AsyncIterator[str]:
        """Server-sent events with the answer's chunks.

        Calls of tools and log-probs come with a choice's last chunk, whole.
        """
        usage = {"usage": None} if self._request.include_usage else {}
        pending: dict[int, list[int]] = {}
        try:
            for head in self._heads():
                yield event(head | usage)
            async for choice, (index, ids, _), text in self._texts():
                pending.setdefault(index, []).extend(ids)
                calls: list = []
                if self._request.tools:
                    text, calls = self._calls(choice, choice.text * bool(choice.finish_reason))
                if not (text or choice.finish_reason):
                    continue
                fields = self._form.piece(text, calls)
                if self._request.return_token_ids:
                    fields["token_ids"] = pending.pop(index, [])
                if choice.finish_reason:
                    fields["logprobs"] = await self._logprobs(choice)
                yield event(self._chunk(index, fields, choice.finish_reason) | usage)
            if usage:
                last = {"object": self._form.chunk, "choices": [], "usage": self._usage()}
                yield event(self._named | last)
            yield "data: [DONE]\n\n"
        except GenerationFailed as error:
            yield event(error_fields(str(error), "server_error"))


def error_fields(
    message: str, kind: str, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """OpenAI's error object."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def json_answer(
    fields: dict[str, Any], status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """Response of HTTP that holds JSON."""
    # Escaped to ASCII: an error may quote a client's text, which may be invalid Unicode.
    return Response(json.dumps(fields), status, headers, "application/json")


def event(fields: dict[str, Any]) -> str:
    """Server-sent event that holds JSON."""
    return f"data: {json.dumps(fields)}\n\n"
